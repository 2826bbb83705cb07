"""The scheduler's planner with the real coordinator: slots follow where the run is slow."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from common.clock import run_sim
from common.config import (
    BucketConfig,
    Config,
    CoordinatorConfig,
    ElasticConfig,
    RunConfig,
    SchedulerConfig,
    TasksConfig,
    TrainingConfig,
)
from common.errors import Refusal, RequestRefused
from common.membership import Membership
from common.messages.coordinator import GetFleet, SetSplit
from common.messages.rollout import (
    ApplyVersion,
    AssignTrajectory,
    TrajectoryAssigned,
    VersionApplied,
)
from common.messages.scheduler import GetRunStatus
from common.service import Runtime
from common.tenant import Tenant
from common.transport.sim import Faults, SimNetwork
from common.weights import NO_VERSION
from services.coordinator.service import CoordinatorService
from services.scheduler.ledger import MemoryLedger
from services.scheduler.service import SchedulerService
from tests.support.rollouts import FakeTrainer, FakeWorker, persist
from tests.support.scheduling import make_report
from tests.support.sim import describe, process, seeds, serving, sim_config, until

SLOTS = ("flex-0", "flex-1")
REPLICA_SPEED = 0.8
WORKER_SLOTS = 2


@dataclass
class Pace:
    """How fast the run is; the tests change it while it goes on."""

    train_work_s: float = 20.0
    """Of a step on the core alone."""
    turn_s: float = 1.0
    replicas: int = 0
    """Awake now, with a version."""


class ElasticWorker(FakeWorker):
    """A rollout worker that may be a tenant; it holds two trajectories at once."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(slots=WORKER_SLOTS)
        self._pace = pace
        self._made = 0.0

    def __call__(self, runtime: Runtime) -> "ElasticWorker":
        super().__call__(runtime)
        slot = runtime.name if runtime.name in SLOTS else ""
        labels = {"bucket": runtime.name.split("-")[0], "slot": slot}
        self._membership = Membership(runtime, labels)
        self._slot, self._willing = slot, not slot
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        tenant = Tenant(self._runtime.mesh, self._membership, self) if self._slot else None
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(super().run(stopping)), tasks.create_task(self._work())]
            if tenant is not None:
                loops.append(tasks.create_task(tenant.run()))
            await stopping.wait()
            for task in loops[1:]:
                task.cancel()

    async def wake(self) -> None:
        await asyncio.sleep(0.2)
        self._willing = True

    async def drain(self, deadline_s: float) -> None:
        self._willing = False
        with contextlib.suppress(TimeoutError):
            await until(lambda: not self._held, deadline_s)

    async def release(self) -> None:
        for trajectory_id in list(self._held):
            self._forget(trajectory_id)
        self.version = self._membership.applied_version = NO_VERSION

    def _assign(self, sender: str, order: AssignTrajectory) -> TrajectoryAssigned:
        if not self._willing:
            raise RequestRefused(Refusal.DRAINING)
        return super()._assign(sender, order)

    def _apply(self, sender: str, request: ApplyVersion) -> VersionApplied:
        reply = super()._apply(sender, request)
        self._membership.applied_version = reply.version
        return reply

    async def _work(self) -> None:
        """Two tokens a turn for each trajectory that it holds."""
        while True:
            await asyncio.sleep(0.1)
            self.turn_s = self._pace.turn_s
            if self._held:
                self._membership.busy_s += 0.1
                self._made += 2 * 0.1 * len(self._held) / self.turn_s

    async def _report(self) -> None:
        while True:
            report = make_report(
                list(self._held),
                version=self.version,
                slots=self.slots if self._willing else 0,
            ).model_copy(
                update={
                    "bucket": self._runtime.name.split("-")[0],
                    "decode_tokens": round(self._made),
                }
            )
            try:
                reply = await persist(self._membership, "scheduler", report, timeout_s=1.0)
            except RequestRefused:  # It was awake with weights and is asleep without.
                reply = None
            for trajectory_id in reply.drop if reply else ():
                self._forget(trajectory_id)
            await asyncio.sleep(0.5)


class Replica:
    """The other tenant: while it is awake and has a version, steps are shorter."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __call__(self, runtime: Runtime) -> "Replica":
        self._membership = Membership(runtime, {"slot": runtime.name})
        self._tenant = Tenant(runtime.mesh, self._membership, self)
        self._runtime, self._counted = runtime, False
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        self._runtime.mesh.serve(ApplyVersion, self._apply)
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self._membership.run()),
                tasks.create_task(self._tenant.run()),
            ]
            await stopping.wait()
            for task in loops:
                task.cancel()

    async def wake(self) -> None:
        await asyncio.sleep(0.3)

    async def drain(self, deadline_s: float) -> None:
        del deadline_s

    async def release(self) -> None:
        self._membership.applied_version = NO_VERSION
        self._pace.replicas -= self._counted
        self._counted = False

    def _apply(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        if not self._tenant.awake:
            raise RequestRefused(Refusal.NOT_READY, "asleep")
        self._pace.replicas += not self._counted
        self._counted = True
        version = self._membership.applied_version = request.manifest.version
        return VersionApplied(version=version, digest=request.manifest.digest, apply_s=0.0)


class PacedTrainer(FakeTrainer):
    """Trains as fast as its replicas let it, and says how long everything took."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self.step_s_of: list[float] = []

    async def _step(self, step: int, group_ids: list[str]) -> None:
        self._offered_s = asyncio.get_running_loop().time()
        await super()._step(step, group_ids)

    async def _compute(self) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        began_s = getattr(self, "_began_s", self._offered_s)
        speed = REPLICA_SPEED * self._pace.replicas
        train_s = self._pace.train_work_s / (1 + speed)
        await asyncio.sleep(train_s)
        self._began_s = loop.time()
        self.step_s_of.append(self._began_s - began_s)
        return {
            "time/train": train_s,
            "time/wait_batch": self._offered_s - began_s,
            "time/step": self._began_s - began_s,
            "replicas/micro_batches": 100 * speed / (1 + speed),
            "replicas/own_micro_batches": 100 / (1 + speed),
        }


def job(directory: Path, max_steps: int, **elastic: object) -> Config:
    path = directory / "tasks.jsonl"
    rows = [{"task_id": f"t{n}", "environment": "calculator", "n": n} for n in range(500)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sim_config(
        run=RunConfig(name="sim", max_steps=max_steps, failed_groups_max=4),
        tasks=TasksConfig(path=str(path)),
        training=TrainingConfig(groups_per_step=2, group_size=2, zero_variance="keep"),
        scheduler=SchedulerConfig(max_staleness_steps=1, lease_s=5.0),
        buckets=[
            BucketConfig(name="base"),
            BucketConfig(name="flex", workers=len(SLOTS), hybrid=True),
        ],
        coordinator=CoordinatorConfig(lease_s=3.0),
        elastic=ElasticConfig.model_validate({"drain_timeout_s": 5.0} | elastic),
    )


@dataclass
class Run:
    """Everything of one run; `pace` is what the tests turn."""

    network: SimNetwork
    config: Config
    pace: Pace = field(default_factory=Pace)
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    trainer: PacedTrainer = field(init=False)
    observer: Membership = field(init=False)

    @property
    def rows(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.ledger.lines]

    async def split(self) -> tuple[int, int]:
        """Slots that are active on each side."""
        fleet = await self.observer.ask_coordinator(GetFleet(), timeout_s=5)
        active = [slot.side for slot in fleet.slots if slot.phase == "active"]
        return active.count("train"), active.count("rollout")

    async def trains(self, steps: int) -> None:
        """Go on for so many steps."""
        wanted = len(self.trainer.trained) + steps
        await until(lambda: len(self.trainer.trained) >= wanted, 3600)


@contextlib.asynccontextmanager
async def running(
    directory: Path, seed: int = 0, faults: Faults | None = None, **options: object
) -> AsyncGenerator[Run]:
    run = Run(SimNetwork(seed, faults), job(directory, max_steps=500, **options))
    run.trainer = PacedTrainer(run.pace)

    def serve(role: str, name: str, build: object):  # noqa: ANN202
        return serving(
            run.network,
            role,
            name,
            build,  # type: ignore[arg-type]
            config=run.config,
            run_dir=directory,
        )

    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(serve("coordinator", "coordinator", lambda r: CoordinatorService(r, describe)))
        await enter(serve("scheduler", "scheduler", lambda r: SchedulerService(r, run.ledger)))
        for name in ("base-0", *SLOTS):
            await enter(serve("rollout", name, ElasticWorker(run.pace)))
        for name in SLOTS:
            await enter(serve("replica", name, Replica(run.pace)))
        await enter(serve("trainer", "trainer", run.trainer))
        runtime = await enter(process(run.network, "cli", "cli", config=run.config))
        tasks = await enter(asyncio.TaskGroup())
        run.observer = Membership(runtime)
        watching = tasks.create_task(run.observer.run())
        await run.observer.joined(timeout_s=60)
        yield run
        watching.cancel()
    run.ledger.close()


@pytest.mark.parametrize("seed", seeds(5))
def test_slots_train_while_training_is_slow_and_roll_out_while_that_is(
    seed: int, tmp_path: Path
) -> None:
    async def scenario() -> None:
        faults = Faults(loss=0.005, duplicate=0.1, reorder=0.1)
        async with running(tmp_path, seed, faults) as run:
            await run.trains(20)
            assert await run.split() == (2, 0)
            assert run.trainer.step_s_of[-1] < 12 < run.trainer.step_s_of[1]
            run.pace.train_work_s, run.pace.turn_s = 2.0, 8.0
            await run.trains(20)
            assert await run.split() == (0, 2)
            assert run.rows[-1]["slots/train"] == 0
            assert run.rows[-1]["slots/switches"] == pytest.approx(4, abs=2)
            steps = [row["step"] for row in run.rows]
            assert steps == sorted(set(steps))  # No step twice.

    run_sim(scenario())


def test_a_plan_is_told_with_what_it_was_made_from_and_then_measured(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as run:
            with structlog.testing.capture_logs() as logs:
                await run.trains(20)
        plans = [entry for entry in logs if entry["event"] == "split.planned"]
        change = next(entry for entry in plans if entry["reason"] == "better")
        assert change["log_level"] == "info"
        assert (change["train"], change["target_train"]) == (0, 2)
        assert [a["train"] for a in change["alternatives"]] == [0, 1, 2]
        assert change["inputs"]["train_s"] == pytest.approx(20.0)
        assert change["gain_s"] * change["horizon_steps"] > change["cost_s"]
        assert {e["log_level"] for e in plans if e["reason"] != "better"} == {"debug"}
        measured = next(entry for entry in logs if entry["event"] == "split.measured")
        assert measured["target"] == [2, 0]
        assert measured["measured_gain_s"] > 5

    run_sim(scenario())


def test_an_operators_order_holds_against_the_planner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as run:
            order = SetSplit(train=0, rollout=2, by="operator", hold_s=1e6)
            await run.observer.ask_coordinator(order, timeout_s=5)
            with structlog.testing.capture_logs() as logs:
                await run.trains(15)
            assert await run.split() == (0, 2)
        refused = [entry for entry in logs if entry["event"] == "split.refused"]
        assert {entry["reason"] for entry in refused} == {Refusal.STALE_FENCE.value}
        assert 1 <= len(refused) <= 4

    run_sim(scenario())


def test_without_the_planner_only_people_change_the_split(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, planner=False) as run:
            await run.trains(12)
            assert await run.split() == (0, 2)
            await run.observer.ask_coordinator(
                SetSplit(train=1, rollout=1, by="operator"), timeout_s=5
            )
            await run.trains(3)
            assert await run.split() == (1, 1)

    run_sim(scenario())


def test_the_status_says_where_the_slots_stand(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as run:
            await run.trains(3)
            status = await persist(run.observer, "scheduler", GetRunStatus())
            assert [(slot.slot, slot.side) for slot in status.slots] == [
                (name, "rollout") for name in SLOTS
            ]

    run_sim(scenario())
