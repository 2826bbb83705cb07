"""Versions in a whole job while processes lie, die, join and leave, on the simulated network."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from common.canary import canary_tokens
from common.clock import run_sim
from common.config import BucketConfig, Config, SchedulerConfig
from common.messages.base import Request
from common.messages.coordinator import Fleet, Manifest, PublishVersion
from common.messages.scheduler import GroupData, StepFinished
from common.service import Runtime
from common.trajectory import unpack_tokens
from common.transport.sim import Faults, SimNetwork
from common.weights import lineage_of, step_of
from services.coordinator.service import CoordinatorService
from services.rollout.fake_engine import FakeEngine
from services.rollout.service import RolloutService
from services.scheduler.service import SchedulerService
from tests.support.sim import manifest, seeds, serving, until
from tests.support.sim_job import PATIENCE_S, TINY, CheckingTrainer, SimJob, script, turns

LOSSY = Faults(loss=0.02, duplicate=0.05, reorder=0.05, delay_s=(0.001, 0.02))
SEEDS = seeds(20)
FIRST = ("coordinator", "scheduler", "calculator", "short-0", "long-0", "trainer")


def honest(version: int) -> FakeEngine:
    """An engine that holds a version."""
    engine = FakeEngine()
    engine.version, engine.digest = version, f"digest-{version}"
    return engine


def canary_of(version: int) -> list[float]:
    """What an honest engine computes with a version."""
    engine = honest(version)
    tokens = canary_tokens(engine.vocabulary)
    return [engine._logprob(a, b) for a, b in pairwise(tokens)]


class CanaryTrainer(CheckingTrainer):
    """Publishes with the canary of a version."""

    def _publication(self, version: int) -> PublishVersion:
        request = super()._publication(version)
        return request.model_copy(update={"canary": canary_of(version)})


class OldWeights(FakeEngine):
    """Names the new version and its digest, and computes with the first one that it got."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.true_digest = ""
        self.lies = True

    async def apply_weights(self, manifest: Manifest) -> None:
        await super().apply_weights(manifest)
        if not self.lies or not self.true_digest:
            self.true_digest = manifest.digest

    def _logprob(self, previous: int, token: int) -> float:
        claimed, self.digest = self.digest, self.true_digest
        try:
            return super()._logprob(previous, token)
        finally:
            self.digest = claimed


class FlippedBit(FakeEngine):
    """What lies in its memory after a swap differs from what was published, once."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.flips = 1

    async def apply_weights(self, manifest: Manifest) -> None:
        await super().apply_weights(manifest)
        if step_of(manifest.version) >= 2 and self.flips:
            self.flips -= 1
            self.digest = f"{manifest.digest} but for one bit"


class Mute(FakeEngine):
    """Begins to apply the second version, and never ends."""

    async def apply_weights(self, manifest: Manifest) -> None:
        if step_of(manifest.version) >= 2:
            await asyncio.Event().wait()
        await super().apply_weights(manifest)


@dataclass
class VersionJob(SimJob):
    """A job whose workers have engines of their own."""

    kinds: dict[str, type[FakeEngine]] = field(default_factory=dict[str, type[FakeEngine]])
    engines: dict[str, FakeEngine] = field(default_factory=dict[str, FakeEngine])
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    trainer: CheckingTrainer = field(default_factory=CanaryTrainer)
    coordinators: list[CoordinatorService] = field(default_factory=list[CoordinatorService])

    def config(self) -> Config:
        buckets = [
            BucketConfig(name="short", slots=6, workers=3),
            BucketConfig(name="long", slots=6),
        ]
        return super().config().model_copy(update={"scheduler": self.scheduler, "buckets": buckets})

    def coordinator(self, runtime: Runtime) -> CoordinatorService:
        async def describe(version: int, segment: str) -> Manifest:
            await asyncio.sleep(0.3)  # So long are its bytes hashed.
            return manifest(version, segment)

        service = CoordinatorService(runtime, describe)
        self.coordinators.append(service)
        return service

    def rollout(self, runtime: Runtime) -> RolloutService:
        kind = self.kinds.get(runtime.name, FakeEngine)
        engine = kind(script=script, decode=TINY.decode, slots=6)
        self.engines[runtime.name] = engine
        return RolloutService(runtime, lambda *_: engine, lambda _path: TINY)

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncGenerator["Started"]:
        """All processes of a small job."""
        async with contextlib.AsyncExitStack() as stack:
            started = Started(self, stack, self.config())
            for name in FIRST:
                await started.start(name)
            yield started

    def fleet(self) -> Fleet:
        """What the newest coordinator knows."""
        return self.coordinators[-1]._fleet("", None)  # type: ignore[arg-type]

    def quarantined(self) -> set[str]:
        return {status.member.name for status in self.fleet().members if status.quarantined}

    def check_trained(self) -> None:
        """Every group of every step once, within the bound of staleness."""
        assert sorted(self.trainer.trained) == list(range(1, self.max_steps + 1))
        assert set(self.trainer.groups.values()) == {1}
        assert self.trainer.staleness_max <= self.scheduler.max_staleness_steps


@dataclass
class Started:
    """The processes of a job that runs."""

    job: VersionJob
    stack: contextlib.AsyncExitStack
    config: Config
    runtimes: dict[str, Runtime] = field(default_factory=dict[str, Runtime])
    incarnations: dict[str, int] = field(default_factory=dict[str, int])

    async def start(self, name: str, build: Callable[[Runtime], object] | None = None) -> None:
        """One more incarnation of a process."""
        job = self.job
        role = {"calculator": "tools"}.get(name, name if "-" not in name else "rollout")
        builds = {
            "coordinator": job.coordinator,
            "scheduler": lambda runtime: SchedulerService(runtime, job.ledger),
            "tools": job.tools,
            "rollout": job.rollout,
            "trainer": job.trainer,
        }
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        self.runtimes[name] = await self.stack.enter_async_context(
            serving(
                job.network,
                role,
                name,
                build or builds[role],  # type: ignore[arg-type]
                config=self.config,
                run_dir=job.directory,
                incarnation=self.incarnations[name],
            )
        )

    def kill(self, name: str) -> None:
        """As SIGKILL does, for all that the others can see."""
        self.job.network.kill(self.runtimes[name].mesh.identity)

    async def steps(self, count: int) -> None:
        await until(lambda: len(self.job.trainer.trained) >= count, PATIENCE_S)

    async def finished(self) -> None:
        await until(lambda: self.job.trainer.reason is not None, PATIENCE_S)


def mislabelled(groups: dict[int, list[GroupData]]) -> int:
    """Trained turns whose log-probabilities are not those of the versions that they name."""
    count = 0
    for group in groups.values():
        for turn in turns(group):
            tokens = unpack_tokens(turn.action_tokens)
            versions = unpack_tokens(turn.action_versions)
            found = list(array("f", turn.action_logprobs))
            expected = [
                honest(versions[index])._logprob(tokens[index - 1], tokens[index])
                for index in range(1, len(tokens))
            ]
            count += found[1:] != pytest.approx(expected, abs=1e-5)
    return count


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [OldWeights, FakeEngine])
def test_a_worker_that_lies_about_applying_is_out_and_the_run_goes_on(
    kind: type[FakeEngine], seed: int, tmp_path: Path
) -> None:
    job = VersionJob(SimNetwork(seed, LOSSY), tmp_path, kinds={"short-0": kind}, max_steps=4)

    async def scenario() -> None:
        async with job.started() as started:
            await started.steps(1)
            liar = job.engines["short-0"]
            liar.lies_about_applying = kind is FakeEngine
            await until(lambda: "short-0" in job.quarantined())
            await asyncio.sleep(1.0)
            assert liar.load().running == 0, "its trajectories go on elsewhere"
            sampled = liar.load().decode_tokens
            await started.finished()
            assert "short-0" in job.quarantined()
            assert liar.load().decode_tokens == sampled, "it gets nothing new"

    run_sim(scenario())
    job.check_trained()
    # No more than one worker holds can have ended between its swap and its judgement.
    assert mislabelled(job.trainer.trained) <= 6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flipped_bit_in_applied_weights_is_found_and_mended(seed: int, tmp_path: Path) -> None:
    kinds: dict[str, type[FakeEngine]] = {"short-0": FlippedBit, "long-0": FlippedBit}
    job = VersionJob(SimNetwork(seed, LOSSY), tmp_path, kinds=kinds, max_steps=4)

    async def scenario() -> None:
        async with job.started() as started:
            await started.finished()
            await until(lambda: not job.quarantined(), 10)

    run_sim(scenario())
    job.check_trained()
    flips = [engine.flips for engine in job.engines.values() if isinstance(engine, FlippedBit)]
    assert flips == [0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_never_ends_a_swap_holds_up_nobody(seed: int, tmp_path: Path) -> None:
    job = VersionJob(SimNetwork(seed, LOSSY), tmp_path, kinds={"long-0": Mute})

    async def scenario() -> None:
        async with job.started() as started:
            await started.finished()

    run_sim(scenario())
    job.check_trained()


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_join_and_leave_while_versions_arrive(seed: int, tmp_path: Path) -> None:
    job = VersionJob(SimNetwork(seed, LOSSY), tmp_path)

    async def scenario() -> None:
        async with job.started() as started:
            for step, (leaves, joins) in enumerate(
                [("short-0", "short-1"), ("long-0", "short-2"), ("short-1", "long-0")], start=1
            ):
                await started.steps(step)
                await asyncio.sleep(0.02 * seed)
                started.kill(leaves)
                await started.start(joins)
            await started.finished()
            await until(lambda: newest_everywhere(job, {"short-2", "long-0"}), 30)

    run_sim(scenario())
    job.check_trained()
    assert mislabelled(job.trainer.trained) == 0


def newest_everywhere(job: VersionJob, names: set[str]) -> bool:
    fleet = job.fleet()
    applied = {s.member.name for s in fleet.members if s.version == fleet.version}
    return names <= applied


@pytest.mark.parametrize("seed", SEEDS)
def test_a_coordinator_killed_while_it_hashes_a_version_stops_nobody(
    seed: int, tmp_path: Path
) -> None:
    job = VersionJob(SimNetwork(seed, LOSSY), tmp_path)

    async def scenario() -> None:
        async with job.started() as started:
            await started.steps(2)
            await asyncio.sleep(0.015 * seed)  # Within or around the 0.3 s of hashing.
            before = {name: engine.load() for name, engine in job.engines.items()}
            started.kill("coordinator")
            await asyncio.sleep(1.0)
            for name, load in before.items():
                sampled = job.engines[name].load().decode_tokens - load.decode_tokens
                assert sampled or not load.running, "workers keep generating"
            await started.start("coordinator")
            await started.finished()

    run_sim(scenario())
    job.check_trained()
    assert mislabelled(job.trainer.trained) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fatal", [PublishVersion, StepFinished])
def test_a_resumed_trainer_publishes_before_the_first_rollout_without_staleness(
    fatal: type[Request], seed: int, tmp_path: Path
) -> None:
    rules = SchedulerConfig(max_staleness_steps=0)
    job = VersionJob(SimNetwork(seed, LOSSY), tmp_path, scheduler=rules, max_steps=4)
    first = job.trainer
    died = asyncio.Event()

    def dies(request: Request) -> bool:
        at_third = len(first.trained) >= (3 if fatal is PublishVersion else 2)
        if isinstance(request, fatal) and at_third:
            died.set()
            return True
        return False

    first.die_before = dies
    second = CanaryTrainer(resume_at=2)

    async def scenario() -> None:
        async with job.started() as started:
            await died.wait()
            await asyncio.sleep(0.05 * seed)
            started.kill("trainer")
            job.trainer = second
            await started.start("trainer")
            await started.finished()

    run_sim(scenario())
    assert sorted(second.trained) == [3, 4]
    assert second.lineage > first.lineage
    for step, groups in second.trained.items():
        for turn in turns(groups):
            for version in unpack_tokens(turn.action_versions):
                assert step_of(version) == step - 1
                assert lineage_of(version) in (first.lineage, second.lineage)
    assert mislabelled(second.trained) == 0
