"""A rollout worker while its engine is up: trajectories held, versions swapped in, reports made."""

import asyncio
import contextlib
import math
from dataclasses import dataclass

import structlog

from common.config import BucketConfig, Config
from common.copies import Copies, InPlace
from common.errors import Refusal, RequestRefused, RunFailed, TransportError
from common.membership import Membership
from common.messages.rollout import (
    ApplyVersion,
    AssignTrajectory,
    DropTrajectory,
    FetchKv,
    FetchVersion,
    TrajectoryAssigned,
    TrajectoryDropped,
)
from common.messages.scheduler import ReportWorker
from common.service import Runtime
from common.tenant import Tenant
from common.weights import NO_VERSION
from services.rollout.engine import Engine
from services.rollout.equipment import Equipment
from services.rollout.journal import Journal
from services.rollout.kv_client import KvClient
from services.rollout.kv_server import KvServer
from services.rollout.limits import Limits
from services.rollout.loop import Trajectory
from services.rollout.parsers import PARSERS
from services.rollout.receiving import WAIT_SHARE, Receiving
from services.rollout.render import Renderer
from services.rollout.tenancy import RolloutBody
from services.rollout.tool_client import ToolClient
from services.rollout.updates import Updates

log = structlog.get_logger()

REPORT_INTERVAL_S = 1.0
REPORT_TIMEOUT_S = 3.0
DRAIN_GRACE_S = 10.0
"""For turns at work when the process is asked to stop; the rest is done again elsewhere."""
CANCEL_GRACE_S = 2.0
"""For what was cancelled to be gone: a decode step."""
EXCLUDED_MAX_S = 300.0
"""Some versions long; an engine that no version mends is started anew, by an end with an error."""
HELD_PER_SLOT_MAX = 2
"""An assignment may arrive before the last trajectory of its slot has left; more is a mistake."""


@dataclass(frozen=True, slots=True)
class Held:
    """A trajectory at work."""

    trajectory: Trajectory
    task: asyncio.Task[None]

    @property
    def lease(self) -> int:
        """Number under which it is held; grows when a move was taken back."""
        return self.trajectory.lease


class Worker:
    """Serves the scheduler and the coordinator.

    The scheduler says which trajectories, the coordinator says which weights; nothing here
    decides where anything runs.
    """

    def __init__(
        self,
        runtime: Runtime,
        bucket: BucketConfig,
        engine: Engine,
        renderer: Renderer,
        copies: Copies | None = None,
        *,
        started: bool = True,
    ) -> None:
        config = runtime.config
        copies = copies or InPlace()
        self._mesh = runtime.mesh
        self._bucket = bucket
        self._engine = engine
        labels = {"slot": runtime.name} if bucket.hybrid else {}
        self._membership = Membership(runtime, {"bucket": bucket.name, **copies.labels, **labels})
        limit_s = config.coordinator.apply_timeout_s
        updates = Updates(engine, config.rollout.on_weight_update, WAIT_SHARE * limit_s)
        self._equipment = Equipment(
            engine=engine,
            sampler=updates,
            renderer=renderer,
            parser=PARSERS[config.rollout.tool_format],
            tools=ToolClient(self._membership, config),
            journal=Journal(self._membership),
            caches=KvClient(self._membership, engine, runtime.mesh.identity),
            limits=Limits.of(config, engine_context_tokens=engine.context_tokens_max),
            temperature=config.sampling.temperature,
            draining=lambda: self._draining,
        )
        self._kv = KvServer(engine)
        self._held: dict[str, Held] = {}
        self._excluded_s = math.inf
        """Since when the others are told that it is gone."""
        self._news = asyncio.Event()
        """Something that the scheduler waits for: a report does not wait for its turn."""
        self._draining = bucket.hybrid
        """No work is taken; a tenant of a slot begins asleep."""
        self._tasks = asyncio.TaskGroup()
        self._versions = Receiving(
            engine,
            updates,
            self._membership,
            copies,
            limit_s=limit_s,
            tasks=self._tasks,
            on_applied=self._news.set,
        )
        self._membership.on_excluded(self._exclude)
        self._tenant = self._as_tenant(config, started=started) if bucket.hybrid else None

    def _as_tenant(self, config: Config, *, started: bool) -> Tenant:
        self._versions.refusing = Refusal.DRAINING
        body = RolloutBody(
            self._engine,
            self._versions,
            self._hand_back,
            self._open_again,
            started=started,
            start_timeout_s=config.rollout.start_timeout_s,
        )
        return Tenant(self._mesh, self._membership, body)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set; then finish the turns at work."""
        self._mesh.serve(AssignTrajectory, self._assign)
        self._mesh.serve(DropTrajectory, self._drop)
        self._mesh.serve(FetchVersion, self._versions.fetch)
        self._mesh.serve(ApplyVersion, self._versions.apply)
        self._mesh.serve(FetchKv, self._kv.fetch)
        async with self._tasks as tasks:
            background = [
                tasks.create_task(self._membership.run(), name="membership"),
                tasks.create_task(self._keep_reporting(), name="reports"),
            ]
            if self._tenant is not None:
                background.append(tasks.create_task(self._tenant.run(), name="tenant"))
            await stopping.wait()
            await self._hand_back(DRAIN_GRACE_S)
            self._versions.cancel()
            for task in background:
                task.cancel()

    # ── trajectories ─────────────────────────────────────────────────────────────────────────

    def _assign(self, _sender: str, request: AssignTrajectory) -> TrajectoryAssigned:
        """Start one trajectory. Idempotent by id and lease."""
        if self._draining or self._membership.excluded:
            raise RequestRefused(Refusal.DRAINING)
        if self._engine.version == NO_VERSION:
            raise RequestRefused(Refusal.NOT_READY, "no version is applied yet")
        held = self._held.get(request.trajectory_id)
        if held and held.lease > request.lease:
            detail = f"lease {request.lease} < {held.lease}"
            raise RequestRefused(Refusal.STALE_FENCE, detail)
        if held is None or held.lease < request.lease:
            self._begin(request, held)
        return TrajectoryAssigned(holding=len(self._held))

    def _begin(self, request: AssignTrajectory, older: Held | None) -> None:
        if older is None and len(self._held) >= HELD_PER_SLOT_MAX * self._bucket.slots:
            raise RequestRefused(Refusal.OVERLOADED, f"{len(self._held)} trajectories are held")
        try:
            trajectory = Trajectory(request, self._equipment)
        except ValueError as error:
            raise RequestRefused(Refusal.INVALID, str(error)) from error
        if older:
            older.task.cancel()
        trajectory_id = request.trajectory_id
        task = self._tasks.create_task(
            trajectory.run(lambda: self._release(trajectory_id, trajectory)), name=trajectory_id
        )
        task.add_done_callback(lambda _: self._leave(trajectory_id, trajectory))
        self._held[trajectory_id] = Held(trajectory, task)
        log.debug(
            "trajectory.assigned",
            trajectory_id=trajectory_id,
            group_id=request.group_id,
            lease=request.lease,
            turn=request.turn,
        )

    def _drop(self, _sender: str, request: DropTrajectory) -> TrajectoryDropped:
        """Stop one trajectory. Idempotent; an order under an older lease changes nothing."""
        held = self._held.get(request.trajectory_id)
        if held and held.lease <= request.lease:
            self._cancel(request.trajectory_id, held)
        return TrajectoryDropped()

    def _cancel(self, trajectory_id: str, held: Held) -> None:
        held.task.cancel()
        self._leave(trajectory_id, held.trajectory)
        log.info("trajectory.dropped", trajectory_id=trajectory_id, lease=held.lease)

    def _leave(self, trajectory_id: str, trajectory: Trajectory) -> None:
        """It is no longer at work here, and has no result: while draining, someone goes on."""
        if self._release(trajectory_id, trajectory) and self._draining and trajectory.begun:
            self._kv.expect(trajectory_id)

    def _release(self, trajectory_id: str, trajectory: Trajectory) -> bool:
        """Hold it no longer; False when it was released or replaced before."""
        held = self._held.get(trajectory_id)
        if held is None or held.trajectory is not trajectory:
            return False
        del self._held[trajectory_id]
        return True

    def _open_again(self) -> None:
        self._draining = False
        self._versions.refusing = None
        self._news.set()

    async def _hand_back(self, grace_s: float) -> None:
        """Trajectories stop at their next turn boundary; then, or after the grace, all do."""
        self._draining = True
        self._versions.refusing = Refusal.DRAINING
        self._kv.begin_stopping()
        log.info("worker.draining", holding=len(self._held))
        at_work = {held.task for held in self._held.values()}
        if at_work:
            # At once, so that the scheduler looks for other workers before the turns end.
            self._tasks.create_task(self._report(), name="report draining")
            await asyncio.wait(at_work, timeout=grace_s)
        for trajectory_id, held in list(self._held.items()):
            self._cancel(trajectory_id, held)
        if at_work:
            await asyncio.wait(at_work, timeout=CANCEL_GRACE_S)
        await self._report()
        if any(member.role == "rollout" for member in self._membership.members.values()):
            await self._kv.linger()

    # ── versions ─────────────────────────────────────────────────────────────────────────────

    def _exclude(self, excluded: bool) -> None:  # noqa: FBT001
        """What is sampled here has a false version: others go on, until a version is proved."""
        if excluded:
            for trajectory_id, held in list(self._held.items()):
                self._cancel(trajectory_id, held)
        self._excluded_s = asyncio.get_running_loop().time() if excluded else math.inf
        log.warning("worker.excluded" if excluded else "worker.cleared")
        self._news.set()

    # ── reports ──────────────────────────────────────────────────────────────────────────────

    async def _keep_reporting(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() - self._excluded_s > EXCLUDED_MAX_S:
                raise RunFailed(
                    f"this worker has decoded with other weights than it names for "
                    f"{EXCLUDED_MAX_S:g} s; it must be started anew"
                )
            self._news.clear()
            await self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._news.wait()

    def _slots(self) -> int:
        """How many trajectories it takes in all. A tenant that wakes needs its version first."""
        asleep = self._bucket.hybrid and self._engine.version == NO_VERSION
        return 0 if self._draining or asleep or self._membership.excluded else self._bucket.slots

    async def _report(self) -> None:
        """Tell the scheduler what is held here, and drop what it does not count as ours."""
        self._kv.forget_old()
        load = self._engine.load()
        self._membership.busy_s = load.busy_s
        scheduler = self._membership.find("scheduler")
        if scheduler is None:
            return
        leases = {trajectory_id: held.lease for trajectory_id, held in self._held.items()}
        report = ReportWorker(
            bucket=self._bucket.name,
            version=self._engine.version,
            kv_tokens_used=load.kv_tokens_used,
            kv_tokens_free=load.kv_tokens_free,
            slots=self._slots(),
            holding=sorted(leases),
            decode_tokens=load.decode_tokens,
            running=load.running,
            waiting=load.waiting,
        )
        try:
            noted = await self._membership.request(scheduler, report, timeout_s=REPORT_TIMEOUT_S)
        except (TransportError, RequestRefused) as error:
            log.debug("report.lost", reason=str(error))
            return
        for trajectory_id in noted.drop:
            held = self._held.get(trajectory_id)
            # With another lease, the answer is about an older placement. While a turn is being
            # reported the trajectory may count as another worker's, and come back yet.
            if held and held.lease == leases.get(trajectory_id) and not held.trajectory.reporting:
                self._cancel(trajectory_id, held)
