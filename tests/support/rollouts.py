"""The scheduler's peers: a rollout worker without an engine and a trainer without a model."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import Refusal, RequestRefused, TransportError
from common.membership import Membership
from common.messages.base import Request
from common.messages.coordinator import PublishVersion
from common.messages.rollout import (
    ApplyVersion,
    AssignTrajectory,
    DropTrajectory,
    TrajectoryAssigned,
    TrajectoryDropped,
    VersionApplied,
)
from common.messages.scheduler import (
    BeginLineage,
    FetchGroup,
    GroupData,
    StepFinished,
    TakeBatch,
    TrajectoryResult,
    TurnFinished,
)
from common.service import Runtime
from common.weights import version_id
from tests.support.scheduling import make_report, make_turn, reward

Ending = Callable[[AssignTrajectory, int], TrajectoryResult | None]
"""The result of a turn, or None where the trajectory goes on."""


def coin(order: AssignTrajectory, turn: int) -> TrajectoryResult | None:
    """Two turns, then a reward of 0 or 1 that hangs on the trajectory."""
    return reward(float(random.Random(order.trajectory_id).random() < 0.5)) if turn else None


async def persist(membership: Membership, role: str, request: Request, *, timeout_s: float = 5.0):  # noqa: ANN201
    """Ask until there is an answer; every request of these tests is idempotent."""
    while True:
        member = membership.find(role)
        if member is not None:
            try:
                return await membership.request(member, request, timeout_s=timeout_s)
            except TransportError:
                pass
        await asyncio.sleep(0.2)


async def publish(membership: Membership, request: PublishVersion, *, timeout_s: float = 5) -> None:
    """Tell the coordinator until it has heard; it may be restarted meanwhile."""
    while True:
        try:
            await membership.ask_coordinator(request, timeout_s=timeout_s)
        except TransportError:
            await asyncio.sleep(0.2)
        else:
            return


@dataclass
class FakeWorker:
    """Makes turns of two tokens in `turn_s` each; knows nothing after its process has gone."""

    ending: Ending = coin
    turn_s: float = 0.3
    slots: int = 8
    assigned: list[AssignTrajectory] = field(default_factory=list)
    first_version: int = -1

    def __call__(self, runtime: Runtime) -> "FakeWorker":
        self._runtime = runtime
        self._membership = Membership(runtime, {"bucket": "short"})
        self.version = -1
        self._held: dict[str, asyncio.Task[None]] = {}
        self._leases: dict[str, int] = {}
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        mesh = self._runtime.mesh
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            mesh.serve(AssignTrajectory, self._assign)
            mesh.serve(DropTrajectory, self._drop)
            mesh.serve(ApplyVersion, self._apply)
            loops = [tasks.create_task(self._membership.run()), tasks.create_task(self._report())]
            await stopping.wait()
            for task in [*loops, *self._held.values()]:
                task.cancel()

    def _apply(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        self.version = max(self.version, request.manifest.version)
        return VersionApplied(version=self.version, digest=request.manifest.digest, apply_s=0.0)

    def _assign(self, _sender: str, order: AssignTrajectory) -> TrajectoryAssigned:
        self.assigned.append(order)
        if len(self.assigned) == 1:
            self.first_version = self.version
        known = self._leases.get(order.trajectory_id, 0)
        if order.lease < known:
            raise RequestRefused(Refusal.STALE_FENCE)
        if order.lease > known:
            self._leases[order.trajectory_id] = order.lease
            self._forget(order.trajectory_id)
            self._held[order.trajectory_id] = self._tasks.create_task(self._roll(order))
        return TrajectoryAssigned(holding=len(self._held))

    def _drop(self, _sender: str, request: DropTrajectory) -> TrajectoryDropped:
        self._forget(request.trajectory_id)
        return TrajectoryDropped()

    def _forget(self, trajectory_id: str) -> None:
        task = self._held.pop(trajectory_id, None)
        if task is not None:
            task.cancel()

    async def _report(self) -> None:
        while True:
            report = make_report(list(self._held), version=self.version, slots=self.slots)
            reply = await persist(self._membership, "scheduler", report, timeout_s=1.0)
            for trajectory_id in reply.drop:
                self._forget(trajectory_id)
            await asyncio.sleep(1.0)

    async def _roll(self, order: AssignTrajectory) -> None:
        turn, lease, go_on = order.turn, order.lease, True
        assert len(order.later_tokens) == 2 * order.turn
        assert bool(order.prompt_tokens) == bool(order.turn)
        context = b"".join([order.prompt_tokens, *order.later_tokens])
        while go_on:
            await asyncio.sleep(self.turn_s)
            made = self.make_turn(order, lease, turn, context)
            try:
                recorded = await persist(self._membership, "scheduler", made)
            except RequestRefused:
                go_on = False
            else:
                go_on, lease = recorded.go_on, recorded.lease
                self._leases[order.trajectory_id] = max(lease, order.lease)
            turn += 1
            context += made.prompt_tokens + made.action_tokens + made.observation_tokens
        if self._held.get(order.trajectory_id) is asyncio.current_task():
            del self._held[order.trajectory_id]

    def make_turn(
        self, order: AssignTrajectory, lease: int, turn: int, context: bytes
    ) -> TurnFinished:
        """One turn; `context` are the packed tokens that it follows on."""
        del context
        return make_turn(
            order.trajectory_id,
            lease,
            turn,
            version=self.version,
            result=self.ending(order, turn),
        )


@dataclass
class FakeTrainer:
    """Steps of `step_s` with whatever groups it is offered, until told to stop."""

    resume_at: int = 0
    step_s: float = 0.5
    die_before: Callable[[Request], bool] = lambda _request: False
    """Simulates a crash: the process hangs for ever instead of sending this."""
    trained: dict[int, list[GroupData]] = field(default_factory=dict)
    waited_for: list[str] = field(default_factory=list)
    reason: str | None = None
    """Why it stopped."""
    lineage: int = -1

    def __call__(self, runtime: Runtime) -> "FakeTrainer":
        self._runtime = runtime
        self._membership = Membership(runtime)
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(self._membership.run()), tasks.create_task(self._train())]
            await stopping.wait()
            for task in loops:
                task.cancel()

    async def _ask(self, request: Request):  # noqa: ANN202
        if self.die_before(request):
            await asyncio.Event().wait()
        return await persist(self._membership, "scheduler", request)

    async def _publish(self, step: int) -> None:
        request = self._publication(version_id(self.lineage, step))
        if self.die_before(request):
            await asyncio.Event().wait()
        await publish(self._membership, request)

    def _publication(self, version: int) -> PublishVersion:
        return PublishVersion(version=version, segment="sim:nothing")

    async def _train(self) -> None:
        step = self.resume_at
        self.lineage = (await self._ask(BeginLineage(step=step))).lineage
        await self._publish(step)
        while self.reason is None:
            offer = await self._ask(TakeBatch(lineage=self.lineage, step=step + 1))
            if offer.exhausted:
                self.reason = offer.waiting_for or "exhausted"
            elif not offer.group_ids:
                self.waited_for.append(offer.waiting_for)
            else:
                await self._step(step + 1, offer.group_ids)
                step += 1

    async def _step(self, step: int, group_ids: list[str]) -> None:
        groups = [await self._ask(FetchGroup(group_id=group_id)) for group_id in group_ids]
        metrics = await self._compute()
        recorded = await self._ask(
            StepFinished(
                lineage=self.lineage,
                step=step,
                attempt=0,
                skipped="",
                group_ids=group_ids,
                metrics=metrics,
            )
        )
        self.trained[step] = groups
        await self._publish(step)
        if recorded.stop:
            self.reason = recorded.reason

    async def _compute(self) -> dict[str, float]:
        """The work of a step, and its figures."""
        await asyncio.sleep(self.step_s)
        return {"time/step": self.step_s}
