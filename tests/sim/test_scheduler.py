"""The scheduler service on the simulated network, with the real coordinator."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.clock import run_sim
from common.config import (
    BucketConfig,
    Config,
    RunConfig,
    SchedulerConfig,
    TasksConfig,
    TrainingConfig,
)
from common.errors import LedgerError, RunFailed
from common.membership import Membership
from common.messages.base import Request
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import (
    GetRunStatus,
    RunStatus,
    StepFinished,
    TrajectoryResult,
)
from common.trajectory import unpack_tokens
from common.transport.sim import Faults, SimNetwork
from common.weights import step_of, version_id
from services.coordinator.service import CoordinatorService
from services.scheduler.ledger import MemoryLedger
from services.scheduler.service import SchedulerService
from services.scheduler.summary import summarise
from tests.support.rollouts import FakeTrainer, FakeWorker, coin, persist
from tests.support.scheduling import failure, reward
from tests.support.sim import describe, process, serving, sim_config, until


def write_tasks(directory: Path, count: int) -> Path:
    path = directory / "tasks.jsonl"
    rows = [{"task_id": f"t{n}", "environment": "calculator", "n": n} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job(directory: Path, *, tasks: int = 16, max_steps: int = 4, **training: object) -> Config:
    values: dict[str, object] = {"groups_per_step": 2, "group_size": 2, "zero_variance": "keep"}
    return sim_config(
        run=RunConfig(name="sim", max_steps=max_steps, failed_groups_max=4),
        tasks=TasksConfig(path=str(write_tasks(directory, tasks))),
        training=TrainingConfig.model_validate(values | training),
        scheduler=SchedulerConfig(max_staleness_steps=1, lease_s=5.0),
        buckets=[BucketConfig(name="short", workers=2)],
    )


@dataclass
class Mesh:
    """One run on the simulated network; its ledger outlives its scheduler."""

    network: SimNetwork
    config: Config
    directory: Path
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    incarnations: Counter = field(default_factory=Counter)

    def serving(self, role: str, name: str, build):  # noqa: ANN201
        self.incarnations[name] += 1
        return serving(
            self.network,
            role,
            name,
            build,
            config=self.config,
            run_dir=self.directory,
            incarnation=self.incarnations[name],
        )

    def coordinator(self):  # noqa: ANN201
        return self.serving("coordinator", "coordinator", lambda r: CoordinatorService(r, describe))

    def scheduler(self):  # noqa: ANN201
        return self.serving("scheduler", "scheduler", lambda r: SchedulerService(r, self.ledger))

    def worker(self, worker: FakeWorker, name: str = "short-0"):  # noqa: ANN201
        return self.serving("rollout", name, worker)

    def trainer(self, trainer: FakeTrainer):  # noqa: ANN201
        return self.serving("trainer", "trainer", trainer)

    def table(self, sql: str) -> list[tuple]:
        return self.ledger._store.rows(sql)

    def count(self, where: str) -> int:
        return self.table(f"SELECT COUNT(*) FROM {where}")[0][0]


@contextlib.asynccontextmanager
async def mesh_of(
    directory: Path, seed: int = 0, faults: Faults | None = None, **options: object
) -> AsyncGenerator[Mesh]:
    mesh = Mesh(SimNetwork(seed, faults), job(directory, **options), directory)  # type: ignore[arg-type]
    async with mesh.coordinator():
        yield mesh
    mesh.ledger.close()


async def ask_status(mesh: Mesh) -> RunStatus:
    async with (
        process(mesh.network, "cli", "cli", config=mesh.config) as runtime,
        asyncio.TaskGroup() as tasks,
    ):
        membership = Membership(runtime)
        task = tasks.create_task(membership.run())
        status = await persist(membership, "scheduler", GetRunStatus())
        task.cancel()
        return status


def check_run(mesh: Mesh, steps: int) -> None:
    """Each step trained its groups once, with tokens young enough."""
    trained = mesh.table("SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY 1")
    assert dict(trained) == dict.fromkeys(range(1, steps + 1), 2)
    tasks = Counter(mesh.table("SELECT epoch, task_id FROM groups WHERE state = 'trained'"))
    assert all(count == 1 for count in tasks.values())
    for step, oldest in mesh.table(
        "SELECT g.step, t.oldest_version FROM trajectories t JOIN groups g USING (group_id)"
        " WHERE g.state = 'trained' AND t.state = 'finished'"
    ):
        assert step - 1 - step_of(oldest) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_run_on_a_bad_network_trains_every_step_and_stops(seed: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        faults = Faults(loss=0.05, duplicate=0.1, reorder=0.1)
        async with mesh_of(tmp_path, seed, faults) as mesh:
            trainer = FakeTrainer()
            async with (
                mesh.scheduler(),
                mesh.worker(FakeWorker(), "short-0"),
                mesh.worker(FakeWorker(), "short-1"),
                mesh.trainer(trainer),
            ):
                await until(lambda: trainer.reason is not None, 300)
            assert trainer.reason == "max_steps"
            check_run(mesh, 4)
            rows = [json.loads(line) for line in mesh.ledger.lines]
            assert [row["step"] for row in rows] == [1, 2, 3, 4]
            assert 0 <= rows[-1]["idle/rollout"] <= 1

    run_sim(scenario())


def test_all_tasks_trained_ends_the_run_before_its_last_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with mesh_of(tmp_path, tasks=5, max_steps=10) as mesh:
            trainer = FakeTrainer()
            async with mesh.scheduler(), mesh.worker(FakeWorker()), mesh.trainer(trainer):
                await until(lambda: trainer.reason is not None, 300)
            assert trainer.reason == "exhausted"
            check_run(mesh, 2)
            states = Counter(mesh.table("SELECT state, reason FROM tasks"))
            assert states == {("trained", ""): 4, ("filtered", "incomplete_batch"): 1}

    run_sim(scenario())


def test_the_trainer_gets_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with mesh_of(tmp_path, max_steps=1) as mesh:
            trainer = FakeTrainer()
            async with mesh.scheduler(), mesh.worker(FakeWorker()), mesh.trainer(trainer):
                await until(lambda: trainer.reason is not None, 300)
            trajectory = trainer.trained[1][0].trajectories[0]
            assert unpack_tokens(trajectory.prompt_tokens) == [1, 2, 3]
            assert [unpack_tokens(t.action_tokens) for t in trajectory.turns] == [
                [10, 10],
                [11, 11],
            ]
            assert trajectory.reward in (0.0, 1.0)

    run_sim(scenario())


def test_a_killed_worker_costs_its_turn_and_the_rest_goes_on_elsewhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        def slow(order: AssignTrajectory, turn: int) -> TrajectoryResult | None:
            return reward(1.0) if turn == 5 else None

        async with mesh_of(tmp_path, max_steps=2) as mesh:
            trainer, second = FakeTrainer(), FakeWorker(slow, slots=8)
            first = FakeWorker(slow, slots=8)
            async with mesh.scheduler(), mesh.trainer(trainer):
                async with mesh.worker(first, "short-0") as runtime:
                    await until(lambda: mesh.count("turns WHERE turn = 2") >= 4, 60)
                    mesh.network.kill(runtime.mesh.identity)
                async with mesh.worker(second, "short-1"):
                    await until(lambda: trainer.reason is not None, 300)
            check_run(mesh, 2)
            resumed = [order for order in second.assigned if order.turn > 0]
            assert len(resumed) >= 4
            assert {order.lease for order in resumed} == {2}
            assert mesh.count("trajectories WHERE state = 'finished' AND turns = 6") >= 8

    run_sim(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_scheduler_goes_on_from_its_ledger(seed: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with mesh_of(tmp_path, seed) as mesh:
            trainer, worker = FakeTrainer(), FakeWorker(turn_s=0.7)
            async with mesh.worker(worker), mesh.trainer(trainer):
                for turns in (3, 9, 17):
                    async with mesh.scheduler() as runtime:
                        await until(lambda n=turns: mesh.count("turns") >= n, 60)
                        mesh.network.kill(runtime.mesh.identity)
                async with mesh.scheduler():
                    await until(lambda: trainer.reason is not None, 300)
            check_run(mesh, 4)
            adopted = mesh.count("trajectories WHERE turns = 2 AND lease = 1")
            assert adopted == mesh.count("trajectories WHERE turns = 2")  # Nothing was moved.

    run_sim(scenario())


@pytest.mark.parametrize("vanishes_at", ["taken", "saved", "between"])
def test_a_trainer_that_vanishes_is_resumed_with_every_task_once(
    vanishes_at: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        def dies(request: Request) -> bool:
            return isinstance(request, StepFinished) and request.step == 3

        async with mesh_of(tmp_path, max_steps=5) as mesh:
            first = FakeTrainer(die_before=dies)
            second = FakeTrainer(resume_at={"taken": 2, "saved": 3, "between": 1}[vanishes_at])
            async with mesh.scheduler(), mesh.worker(FakeWorker()):
                async with mesh.trainer(first) as runtime:
                    taken = "groups WHERE state = 'taken' AND step = 3"
                    await until(lambda: mesh.count(taken) == 2, 60)
                    mesh.network.kill(runtime.mesh.identity)
                async with mesh.trainer(second):
                    await until(lambda: second.reason is not None, 300)
            assert (first.lineage, second.lineage) == (0, 1)
            check_run(mesh, 5)
            again = {group.task_id for group in second.trained.get(2, [])}
            if vanishes_at == "between":  # Step 2 is trained again, with the groups it had.
                assert again == {group.task_id for group in first.trained[2]}

    run_sim(scenario())


def test_no_rollout_begins_before_a_version_of_the_trainers_lineage_is_applied(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with mesh_of(tmp_path, max_steps=4) as mesh:
            first, before = FakeTrainer(), FakeWorker()
            async with mesh.scheduler():
                async with mesh.worker(before), mesh.trainer(first):
                    await until(lambda: 2 in first.trained, 60)
                resumed, after = FakeTrainer(resume_at=2), FakeWorker()
                async with mesh.worker(after, "short-1"), mesh.trainer(resumed):
                    await until(lambda: resumed.reason is not None, 300)
            assert before.first_version == version_id(0, 0)
            assert after.first_version >= version_id(1, 2)

    run_sim(scenario())


def test_groups_that_keep_failing_end_the_run_with_the_servers_own_message(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with mesh_of(tmp_path) as mesh:
            trainer = FakeTrainer()
            worker = FakeWorker(lambda _order, _turn: failure(detail="no such sandbox"))
            with pytest.raises(ExceptionGroup) as raised:
                async with mesh.worker(worker), mesh.trainer(trainer), mesh.scheduler():
                    await asyncio.sleep(600)
            assert "no such sandbox" in (trainer.reason or "")
            failed = raised.value
            while isinstance(failed, ExceptionGroup):
                failed = failed.exceptions[0]
            assert isinstance(failed, RunFailed)
            assert "4 groups in a row failed" in str(failed)

    run_sim(scenario())


def test_status_names_what_the_step_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        def stuck(order: AssignTrajectory, turn: int) -> TrajectoryResult | None:
            return None if order.trajectory_id.endswith(".0") else coin(order, turn)

        async with mesh_of(tmp_path) as mesh, mesh.scheduler():
            assert (await ask_status(mesh)).waiting_for == "the trainer, to load its state"
            async with mesh.trainer(FakeTrainer()):
                await asyncio.sleep(5)
                assert "no rollout worker has reported" in (await ask_status(mesh)).waiting_for
                async with mesh.worker(FakeWorker(stuck, turn_s=1.0)):
                    await asyncio.sleep(30)
                    status = await ask_status(mesh)
            assert "0 of 2 groups are ready" in status.waiting_for
            assert ".e0.a0.0 on short-0 for " in status.waiting_for
            assert status.trajectories["running"] == 4
            assert status.trajectories["finished"] == 4
            assert [worker.holding for worker in status.workers] == [4]

    run_sim(scenario())


def test_a_run_directory_of_other_tasks_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with mesh_of(tmp_path) as mesh:
            async with mesh.scheduler():
                await asyncio.sleep(1)
            write_tasks(tmp_path, 17)
            with pytest.raises(ExceptionGroup) as raised:
                async with mesh.scheduler():
                    await asyncio.sleep(1)
            refused = raised.value.exceptions[0]
            while isinstance(refused, ExceptionGroup):
                refused = refused.exceptions[0]
            assert isinstance(refused, LedgerError)
            assert "other tasks" in str(refused)

    run_sim(scenario())


@pytest.mark.slow
def test_a_run_on_a_file_leaves_metrics_and_a_summary_that_adds_up(tmp_path: Path) -> None:
    """The one test here on the wall clock: the file's writer is a thread."""

    async def scenario() -> None:
        async with mesh_of(tmp_path, max_steps=2) as mesh:
            trainer = FakeTrainer(step_s=0.01)
            scheduler = mesh.serving("scheduler", "scheduler", SchedulerService)
            async with (
                mesh.trainer(trainer),
                mesh.worker(FakeWorker(turn_s=0.01)),
                scheduler,
            ):
                await until(lambda: trainer.reason is not None, 30)

    asyncio.run(scenario())
    summary = summarise(tmp_path / "ledger.sqlite", tmp_path / "metrics.jsonl")
    assert summary["steps"] == 2
    assert summary["trajectories"]["adds_up"]
    assert summary["trajectories"]["trained"] == 8
    assert summary["reward_last"] is not None
    assert summary["tool_calls"]["ok"] >= 8
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
