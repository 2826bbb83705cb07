"""The trainer against a scripted scheduler and the real coordinator, on the simulated network."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from common.clock import run_sim
from common.config import Config
from common.errors import LibraError, Refusal, RequestRefused, RunFailed
from common.membership import Membership
from common.messages.coordinator import GetFleet, Manifest
from common.messages.scheduler import (
    BatchOffer,
    BeginLineage,
    FetchGroup,
    GroupData,
    LineageBegun,
    StepFinished,
    StepRecorded,
    TakeBatch,
)
from common.messages.trainer import GetTrainerStatus
from common.service import Runtime
from common.transport.sim import Faults, SimNetwork
from common.weights import version_id
from services.coordinator.manifest import build_manifest
from services.coordinator.service import CoordinatorService
from services.trainer.checkpoint import latest
from services.trainer.service import TrainerService
from tests.support.models import make_tiny_model
from tests.support.sim import process, serving, until
from tests.support.trainer import group, trainer_config

BETTER_AND_WORSE = (1.0, 0.0)
ALL_EQUAL = (1.0, 1.0)


async def describe(version: int, segment: str) -> Manifest:
    return build_manifest(version, segment)


def coordinator(runtime: Runtime) -> CoordinatorService:
    return CoordinatorService(runtime, describe)


@dataclass
class Scheduler:
    """Offers the same kind of groups at every step, up to the last one."""

    steps: int = 3
    rewards: tuple[float | None, ...] = BETTER_AND_WORSE
    logprob: float = -5.0
    polls: int = 2
    """Answers before a batch is complete."""
    batches: int = 1000
    lineage: int = 0
    begun: list[int] = field(default_factory=list[int])
    taken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reports: list[StepFinished] = field(default_factory=list[StepFinished])
    log: list[str] = field(default_factory=list[str])
    answering: bool = True

    def serve_on(self, runtime: Runtime) -> None:
        mesh = runtime.mesh
        mesh.serve(BeginLineage, self.begin)
        mesh.serve(TakeBatch, self.take)
        mesh.serve(FetchGroup, self.fetch)
        mesh.serve(StepFinished, self.finish)

    def begin(self, _sender: str, request: BeginLineage) -> LineageBegun:
        self.lineage += 1
        self.begun.append(request.step)
        return LineageBegun(lineage=self.lineage)

    async def take(self, _sender: str, request: TakeBatch) -> BatchOffer:
        await asyncio.sleep(0.2)
        if len(self.reports) >= self.batches:
            return BatchOffer(group_ids=[], waiting_for="", exhausted=True)
        self.taken.append((request.lineage, request.step))
        if self.taken.count(self.taken[-1]) <= self.polls:
            return BatchOffer(group_ids=[], waiting_for="1 group", exhausted=False)
        names = [f"{request.step}-{len(self.reports)}-{n}" for n in range(3)]
        return BatchOffer(group_ids=names, waiting_for="", exhausted=False)

    def fetch(self, _sender: str, request: FetchGroup) -> GroupData:
        return group(request.group_id, self.rewards, logprob=self.logprob)

    def finish(self, _sender: str, request: StepFinished) -> StepRecorded:
        if not self.answering:
            raise RequestRefused(Refusal.NOT_READY)
        known = [(r.lineage, r.step, r.attempt) for r in self.reports]
        if (request.lineage, request.step, request.attempt) not in known:
            self.reports.append(request)
        stop = not request.skipped and request.step >= self.steps
        return StepRecorded(stop=stop, reason="max_steps" if stop else "")


@dataclass
class Run:
    """What a scenario looks at."""

    network: SimNetwork
    scheduler: Scheduler
    membership: Membership
    trainer: Runtime
    service: TrainerService
    stopping: asyncio.Event
    done: "asyncio.Task[None]"

    async def versions(self) -> int:
        fleet = await self.membership.ask_coordinator(GetFleet(), timeout_s=5)
        return fleet.versions_published


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "segments").mkdir()
    return make_tiny_model(tmp_path / "model", tied=True)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path, config: Config, scheduler: Scheduler, network: SimNetwork | None = None
) -> AsyncGenerator[Run]:
    """A coordinator, a scheduler and a trainer; the trainer is to end within the block."""
    network = network or SimNetwork(1)
    async with (
        serving(network, "coordinator", "coordinator", coordinator, run_dir=tmp_path),
        process(network, "scheduler", "scheduler") as beside,
        process(network, "trainer", "trainer", config=config, run_dir=tmp_path) as runtime,
        asyncio.TaskGroup() as tasks,
    ):
        scheduler.serve_on(beside)
        membership = Membership(beside)
        member = tasks.create_task(membership.run())
        await membership.joined(timeout_s=10)
        service, stopping = TrainerService(runtime, tmp_path / "segments"), asyncio.Event()
        done = tasks.create_task(service.run(stopping))
        yield Run(network, scheduler, membership, runtime, service, stopping, done)
        async with asyncio.timeout(600):
            await done
        member.cancel()


def run_to_the_end(
    tmp_path: Path,
    config: Config,
    scheduler: Scheduler,
    look: Callable[[Run], Any] | None = None,
    network: SimNetwork | None = None,
) -> Scheduler:
    async def scenario() -> None:
        async with running(tmp_path, config, scheduler, network) as run:
            if look is not None:
                await look(run)

    run_sim(scenario())
    return scheduler


def only_error(group: BaseExceptionGroup[Any]) -> BaseException:
    """The one error that the nested groups carry."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        assert len(found.exceptions) == 1, found.exceptions
        found = found.exceptions[0]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_run_trains_every_step_once_on_a_lossy_network(
    tmp_path: Path, model: Path, seed: int
) -> None:
    async def look(run: Run) -> None:
        await until(run.done.done, 600)  # A lost message costs its whole deadline.
        await until(lambda: run.membership.version == version_id(1, 3))

    network = SimNetwork(seed, Faults(loss=0.05, duplicate=0.05))
    scheduler = run_to_the_end(tmp_path, trainer_config(model), Scheduler(), look, network)
    assert [(r.step, r.attempt, r.skipped) for r in scheduler.reports] == [
        (1, 0, ""),
        (2, 0, ""),
        (3, 0, ""),
    ]
    assert scheduler.reports[1].group_ids == ["2-1-0", "2-1-1", "2-1-2"]
    found = latest(tmp_path)
    assert found is not None
    assert found.contents.step == 3
    assert not list((tmp_path / "segments").iterdir())


def test_the_first_version_is_published_before_the_first_batch(tmp_path: Path, model: Path) -> None:
    async def look(run: Run) -> None:
        await until(lambda: bool(run.scheduler.taken))
        assert await run.versions() == 1

    run_to_the_end(tmp_path, trainer_config(model), Scheduler(steps=1), look)


def test_a_published_segment_holds_the_trained_weights(tmp_path: Path, model: Path) -> None:
    """Compared with the checkpoint of the same step."""

    async def look(run: Run) -> None:
        await until(lambda: len(run.scheduler.reports) == 2)
        await until(lambda: run.membership.version == version_id(1, 2))
        found = latest(tmp_path)
        assert found is not None
        assert found.contents.step == 2
        saved = load_file(found.path / "model.safetensors")
        segment = run.service._publisher.current
        assert segment is not None
        loaded = load_file(segment.path)
        assert loaded.keys() == saved.keys()
        assert all(loaded[name].equal(saved[name].bfloat16()) for name in saved)
        run.scheduler.batches = 0

    config = trainer_config(model, dtype="bfloat16", checkpoint_every_steps=1)
    run_to_the_end(tmp_path, config, Scheduler(steps=99), look)


def test_metrics_name_what_the_run_directory_promises(tmp_path: Path, model: Path) -> None:
    scheduler = run_to_the_end(tmp_path, trainer_config(model), Scheduler(steps=1))
    assert {
        "loss/policy",
        "grad_norm",
        "mismatch_kl/mean",
        "mismatch_kl/max",
        "ratio/clip_share",
        "importance/cap_share",
        "time/step",
        "time/wait_batch",
        "time/fetch",
        "time/train",
        "time/publish",
        "time/publish_loop",
        "tokens/trained",
        "lr",
    } <= scheduler.reports[0].metrics.keys()
    assert scheduler.reports[0].metrics["time/wait_batch"] == pytest.approx(0.6, abs=0.1)


def test_a_restart_goes_on_from_the_newest_checkpoint_and_publishes_it_first(
    tmp_path: Path, model: Path
) -> None:
    run_to_the_end(tmp_path, trainer_config(model), Scheduler(steps=2))
    again = Scheduler(steps=4, lineage=1)
    seen: list[int] = []

    async def look(run: Run) -> None:
        await until(lambda: bool(run.scheduler.taken))
        await until(lambda: run.membership.version >= 0)
        seen.append(run.membership.version)

    run_to_the_end(tmp_path, trainer_config(model), again, look)
    assert again.begun == [2]
    assert seen == [version_id(2, 2)]
    assert [r.step for r in again.reports] == [3, 4]


def test_an_exhausted_run_ends_with_a_checkpoint(tmp_path: Path, model: Path) -> None:
    run_to_the_end(tmp_path, trainer_config(model), Scheduler(steps=99, batches=2))
    found = latest(tmp_path)
    assert found is not None
    assert found.contents.step == 2


def test_a_stop_while_waiting_ends_at_once_with_a_checkpoint(tmp_path: Path, model: Path) -> None:
    async def look(run: Run) -> None:
        await until(lambda: len(run.scheduler.reports) == 1)
        run.scheduler.polls = 10**9
        await asyncio.sleep(30)
        loop = asyncio.get_running_loop()
        run.stopping.set()
        began = loop.time()
        await until(run.done.done)
        assert loop.time() - began < 1

    run_to_the_end(tmp_path, trainer_config(model), Scheduler(steps=99), look)
    found = latest(tmp_path)
    assert found is not None
    assert found.contents.step == 1


def test_a_batch_without_variance_is_skipped_and_the_step_tried_again(
    tmp_path: Path, model: Path
) -> None:
    async def look(run: Run) -> None:
        await until(lambda: len(run.scheduler.reports) == 2)
        assert await run.versions() == 1, "nothing is published for a skipped step"
        run.scheduler.rewards = BETTER_AND_WORSE

    scheduler = Scheduler(steps=1, rewards=ALL_EQUAL)
    run_to_the_end(tmp_path, trainer_config(model), scheduler, look)
    assert [(r.step, r.attempt, r.skipped) for r in scheduler.reports] == [
        (1, 0, "zero_variance"),
        (1, 1, "zero_variance"),
        (1, 2, ""),
    ]


def test_too_many_non_finite_steps_end_the_run_with_the_healthy_weights(
    tmp_path: Path, model: Path
) -> None:
    async def look(run: Run) -> None:
        await until(lambda: len(run.scheduler.reports) == 1)
        run.scheduler.logprob = float("nan")

    scheduler = Scheduler(steps=99)
    with pytest.raises(BaseExceptionGroup) as caught:
        run_to_the_end(tmp_path, trainer_config(model, nonfinite_steps_max=2), scheduler, look)
    error = only_error(caught.value)
    assert isinstance(error, RunFailed)
    assert "2 steps in a row" in str(error)
    assert [r.skipped for r in scheduler.reports[-2:]] == ["nonfinite", "nonfinite"]
    found = latest(tmp_path)
    assert found is not None
    assert found.contents.step == len(scheduler.reports) - 2
    weights = load_file(found.path / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_a_step_that_nobody_recorded_is_not_saved(tmp_path: Path, model: Path) -> None:
    scheduler = Scheduler(answering=False)
    with pytest.raises(BaseExceptionGroup) as caught:
        run_to_the_end(tmp_path, trainer_config(model), scheduler)
    error = only_error(caught.value)
    assert isinstance(error, LibraError)
    assert "scheduler did not answer StepFinished" in str(error)
    assert latest(tmp_path) is None


def test_a_restarted_coordinator_gets_the_version_again(tmp_path: Path, model: Path) -> None:
    async def look(run: Run) -> None:
        await until(lambda: run.membership.version == version_id(1, 0))
        run.scheduler.polls = 10**9
        coordinator_peer = run.membership._coordinator
        assert coordinator_peer is not None
        run.network.kill(coordinator_peer)
        await asyncio.sleep(5)
        async with serving(
            run.network,
            "coordinator",
            "coordinator",
            coordinator,
            run_dir=tmp_path,
            incarnation=2,
        ):
            await until(lambda: run.membership.version == -1)
            await until(lambda: run.membership.version == version_id(1, 0))
            run.stopping.set()
            await until(run.done.done)

    run_to_the_end(tmp_path, trainer_config(model), Scheduler(steps=99), look)


def test_status_says_what_the_trainer_waits_in(tmp_path: Path, model: Path) -> None:
    async def look(run: Run) -> None:
        await until(lambda: bool(run.scheduler.taken))
        await asyncio.sleep(5)
        member = await run.membership.wait_for("trainer", timeout_s=5)
        status = await run.membership.request(member, GetTrainerStatus(), timeout_s=5)
        assert (status.step, status.phase) == (0, "waiting")
        assert status.phase_s > 4
        run.stopping.set()

    run_to_the_end(tmp_path, trainer_config(model), Scheduler(polls=10**9), look)
