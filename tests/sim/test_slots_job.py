"""A whole job in which a rollout worker changes sides, on the simulated network."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from common.clock import run_sim
from common.config import BucketConfig, Config, CoordinatorConfig, ElasticConfig
from common.errors import PeerUnreachable, Refusal, RequestRefused
from common.membership import Membership
from common.messages.coordinator import SetSplit
from common.messages.rollout import ApplyVersion, FetchVersion, VersionApplied, VersionFetched
from common.service import Runtime
from common.tenant import Tenant
from common.transport.sim import Faults, SimNetwork
from common.weights import NO_VERSION
from services.rollout.fake_engine import FakeEngine
from services.rollout.service import RolloutService
from tests.support.devices import Devices
from tests.support.sim import process, seeds, serving, until
from tests.support.sim_job import PATIENCE_S, TINY, SimJob, script

SLOT = "long-0"


class SlotEngine(FakeEngine):
    """Holds the slot's devices while it is awake."""

    devices: Devices

    async def wake(self) -> None:
        self.devices.take("rollout")
        await super().wake()

    async def sleep(self) -> None:
        await super().sleep()
        self.devices.free("rollout")

    async def generate(self, request):  # noqa: ANN201
        assert self.devices.holder == "rollout"
        return await super().generate(request)


class Replica:
    """Keeps the contract of a tenant, and computes nothing."""

    def __init__(self, runtime: Runtime, devices: Devices) -> None:
        self._runtime, self._devices = runtime, devices
        self._membership = Membership(runtime, {"slot": runtime.name})
        self.tenant = Tenant(runtime.mesh, self._membership, self)

    async def wake(self) -> None:
        self._devices.take("replica")

    async def drain(self, deadline_s: float) -> None:
        await asyncio.sleep(min(0.5, deadline_s))

    async def release(self) -> None:
        self._membership.applied_version = NO_VERSION
        self._devices.free("replica")

    async def apply(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        if not self.tenant.awake:
            raise RequestRefused(Refusal.NOT_READY, "asleep")
        version = self._membership.applied_version = request.manifest.version
        return VersionApplied(version=version, digest=request.manifest.digest, apply_s=0.0)

    async def fetch(self, _sender: str, request: FetchVersion) -> VersionFetched:
        return VersionFetched(version=request.manifest.version, streamed_bytes=0, fetch_s=0.0)

    async def run(self, stopping: asyncio.Event) -> None:
        self._runtime.mesh.serve(ApplyVersion, self.apply)
        self._runtime.mesh.serve(FetchVersion, self.fetch)
        async with asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(self._membership.run()),
                tasks.create_task(self.tenant.run()),
            ]
            await stopping.wait()
            for task in work:
                task.cancel()


class HybridJob(SimJob):
    """The worker of the long bucket shares its slot with a replica."""

    devices: Devices

    def config(self) -> Config:
        buckets = [
            BucketConfig(name="short", slots=6),
            BucketConfig(name="long", slots=6, hybrid=True),
        ]
        return (
            super()
            .config()
            .model_copy(
                update={
                    "buckets": buckets,
                    "coordinator": CoordinatorConfig(apply_timeout_s=8.0),
                    "elastic": ElasticConfig(planner=False, drain_timeout_s=1.0),
                }
            )
        )

    def rollout(self, runtime: Runtime) -> RolloutService:
        if runtime.name != SLOT:
            return super().rollout(runtime)

        def engine(config: Config, bucket: BucketConfig, index: int, run_id: str) -> FakeEngine:
            del config, index, run_id
            made = SlotEngine(script=script, decode=TINY.decode, slots=bucket.slots)
            made.devices = self.devices
            return made

        return RolloutService(runtime, engine, lambda _path: TINY)

    def replica(self, incarnation: int = 1):  # noqa: ANN201
        return serving(
            self.network,
            "replica",
            SLOT,
            lambda runtime: Replica(runtime, self.devices),
            config=self.config(),
            incarnation=incarnation,
        )


async def keep_switching(job: HybridJob, every_s: float) -> None:
    """As an operator who cannot decide."""
    async with process(job.network, "launcher", "launcher", config=job.config()) as runtime:
        membership = Membership(runtime)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(membership.run())
            train = 0
            while job.trainer.reason is None:
                await asyncio.sleep(every_s)
                train = 1 - train
                order = SetSplit(train=train, rollout=1 - train, by="operator")
                with contextlib.suppress(PeerUnreachable, TimeoutError):
                    await membership.ask_coordinator(order, timeout_s=2.0)
            task.cancel()


def play(seed: int, directory: Path, faults: Faults, *, victim: str = "") -> HybridJob:
    """A job in which a worker changes sides every few seconds; maybe something is killed."""
    job = HybridJob(SimNetwork(seed, faults), directory, max_steps=8)
    job.devices = Devices()

    async def scenario() -> None:
        async with job.running() as start, job.replica(), asyncio.TaskGroup() as tasks:
            runtimes: dict[str, Runtime] = {}
            for name in ("coordinator", "scheduler", "calculator", "short-0", SLOT, "trainer"):
                runtimes[name] = await start(name)
            tasks.create_task(keep_switching(job, 1.5 + 0.3 * seed))
            if victim:
                await until(lambda: len(job.trainer.trained) >= 2 + seed % 3, PATIENCE_S)
                job.network.kill(runtimes[victim].mesh.identity)
                await asyncio.sleep(0.5)
                await start(victim, incarnation=2)
            await until(lambda: job.trainer.reason is not None, PATIENCE_S)

    run_sim(scenario())
    return job


@pytest.mark.parametrize("seed", seeds(8))
def test_a_worker_that_changes_sides_loses_nothing_and_repeats_nothing(
    seed: int, tmp_path: Path
) -> None:
    job = play(seed, tmp_path, Faults())
    assert len(job.trainer.groups) == job.max_steps * 4
    assert set(job.trainer.groups.values()) == {1}
    assert job.trainer.staleness_max <= 1
    assert job.devices.history[:3] == ["rollout", "replica", "rollout"]


@pytest.mark.parametrize("seed", range(2))
def test_nor_does_it_on_a_lossy_network(seed: int, tmp_path: Path) -> None:
    faults = Faults(loss=0.03, duplicate=0.05, reorder=0.1, delay_s=(0.001, 0.05))
    job = play(seed, tmp_path, faults)
    assert len(job.trainer.groups) == job.max_steps * 4
    assert set(job.trainer.groups.values()) == {1}
    assert job.trainer.staleness_max <= 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", ["coordinator", "scheduler"])
def test_nor_does_it_when_the_services_die_meanwhile(
    victim: str, seed: int, tmp_path: Path
) -> None:
    job = play(seed, tmp_path, Faults(), victim=victim)
    assert len(job.trainer.groups) == job.max_steps * 4
    assert set(job.trainer.groups.values()) == {1}
