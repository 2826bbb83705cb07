"""Versions on their way to other hosts: real services and mirrors on simulated networks."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from common.clock import run_sim
from common.copies import Copies
from common.membership import Membership
from common.messages.coordinator import GetSegmentsInUse, Manifest, PublishVersion
from common.mirror import Mirror
from common.service import Runtime
from common.transport.sim import SimNetwork
from common.transport.sim_stream import SimStreamNetwork, SimStreamServer, StreamFaults
from services.coordinator.service import CoordinatorService
from services.rollout.fake_engine import FakeEngine
from services.rollout.service import RolloutService
from tests.support.rollout import TINY
from tests.support.rollouts import publish
from tests.support.segments import CHUNK, manifest_of
from tests.support.sim import process, seeds, serving, sim_config, until

CHUNKS = 40
HERE = "trainer-host"
SEEDS = seeds(20)
WORKERS = {"short-0": HERE, "short-1": "b", "short-2": "c", "short-3": "d", "short-4": "d"}
CONFIG = sim_config(
    rollout={"tool_format": "tags"},
    buckets=[{"name": "short", "workers": len(WORKERS)}],
    coordinator={"apply_timeout_s": 30.0},
)


class Elsewhere:
    """A mirror on a host that does not have the trainer's files."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self.labels = mirror.labels

    @property
    def streamed_bytes(self) -> int:
        return self._mirror.streamed_bytes

    async def bring(
        self, manifest: Manifest, sources: Sequence[str], *, timeout_s: float
    ) -> Manifest:
        away = manifest.model_copy(update={"segment": f"/elsewhere{manifest.segment}"})
        return await self._mirror.bring(away, sources, timeout_s=timeout_s)


@dataclass
class World:
    """A run on several hosts."""

    directory: Path
    seed: int = 0
    faults: StreamFaults = field(default_factory=StreamFaults)
    engines: dict[str, FakeEngine] = field(default_factory=dict[str, FakeEngine])
    servers: dict[str, SimStreamServer] = field(default_factory=dict[str, SimStreamServer])
    runtimes: dict[str, Runtime] = field(default_factory=dict[str, Runtime])
    incarnations: dict[str, int] = field(default_factory=dict[str, int])
    digests: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        self.network = SimNetwork(self.seed)
        self.streams = SimStreamNetwork(self.seed, self.faults)
        self.content = bytearray(random.Random(self.seed).randbytes(CHUNK * CHUNKS - 7))
        (self.directory / HERE).mkdir()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["World"]:
        """All processes."""
        async with contextlib.AsyncExitStack() as self.stack:
            await self.start("coordinator")
            runtime = await self.stack.enter_async_context(
                process(self.network, "trainer", "trainer", config=CONFIG)
            )
            self.trainer = Membership(runtime)
            tasks = await self.stack.enter_async_context(asyncio.TaskGroup())
            task = tasks.create_task(self.trainer.run())
            self.stack.callback(task.cancel)
            await self.trainer.joined(timeout_s=10)
            for name in WORKERS:
                await self.start(name)
            for name in WORKERS:
                await self.trainer.wait_for("rollout", name=name, timeout_s=10)
            yield self

    async def start(self, name: str) -> None:
        """One more incarnation of a process."""
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        role = "coordinator" if name == "coordinator" else "rollout"
        self.runtimes[name] = await self.stack.enter_async_context(
            serving(
                self.network,
                role,
                name,
                self.coordinator if role == "coordinator" else self.worker,  # type: ignore[arg-type]
                config=CONFIG,
                run_dir=self.directory,
                incarnation=self.incarnations[name],
            )
        )

    def kill(self, name: str) -> None:
        """As SIGKILL does."""
        self.network.kill(self.runtimes[name].mesh.identity)
        if name in self.servers:
            self.streams.kill(self.servers[name].address)

    def coordinator(self, runtime: Runtime) -> CoordinatorService:
        async def describe(version: int, segment: str) -> Manifest:
            return manifest_of(version, Path(segment).read_bytes(), segment)  # noqa: ASYNC240

        return CoordinatorService(
            runtime, describe, self.stream_of, memory=HERE, directory=self.directory / HERE
        )

    def worker(self, runtime: Runtime) -> RolloutService:
        engine = FakeEngine()
        self.engines[runtime.name] = engine
        return RolloutService(runtime, lambda *_: engine, lambda _path: TINY, self.copies)

    def stream_of(self, runtime: Runtime) -> SimStreamServer:
        number = self.incarnations[runtime.name]
        server = self.streams.server(f"stream://{runtime.name}/{number}")
        self.servers[runtime.name] = server
        return server

    @contextlib.asynccontextmanager
    async def copies(self, runtime: Runtime) -> AsyncGenerator[Copies]:
        host = WORKERS[runtime.name]
        memory = self.directory / host
        memory.mkdir(exist_ok=True)
        async with self.stream_of(runtime) as server:
            mirror = Mirror("sim", self.streams.streamer(), server, memory, host)
            yield mirror if host == HERE else Elsewhere(mirror)
            mirror.close()

    def write(self, version: int) -> str:
        """The next version lies in a segment that nobody reads."""
        dice = random.Random(version)
        for _ in range(len(self.content) // 400):
            self.content[2 * dice.randrange(len(self.content) // 2)] ^= 1
        path = self.directory / HERE / f"w{version % 4}"
        path.write_bytes(self.content)
        self.digests[version] = xxhash.xxh3_128_hexdigest(bytes(self.content))
        return str(path)

    async def publish(self, version: int) -> None:
        """As the trainer does, also to a coordinator that was restarted."""
        segment = self.write(version)
        async with asyncio.timeout(60):
            while segment in await self.in_use():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await self.announce(version, segment)

    async def in_use(self) -> list[str]:
        reply = await self.trainer.ask_coordinator(GetSegmentsInUse(), timeout_s=5)
        return reply.segments

    async def announce(self, version: int, segment: str) -> None:
        async with asyncio.timeout(60):
            request = PublishVersion(version=version, segment=segment)
            await publish(self.trainer, request, timeout_s=10)

    async def applied(self, version: int, *names: str, timeout_s: float = 60.0) -> None:
        """Wait until these workers (all by default) hold exactly these bytes."""
        wanted = names or tuple(WORKERS)

        def reached() -> bool:
            return all(self.engines[name].version == version for name in wanted)

        await until(reached, timeout_s)
        assert {self.engines[name].digest for name in wanted} == {self.digests[version]}


def play(world: World, scenario: Callable[[World], Coroutine[None, None, None]]) -> set[int]:
    """Run a scenario; the versions that the workers hold at its end."""

    async def run() -> set[int]:
        async with world.running():
            await scenario(world)
            return {engine.version for engine in world.engines.values()}

    return run_sim(run())


@pytest.mark.parametrize("seed", SEEDS)
def test_every_host_gets_every_bit_over_a_faulty_network(seed: int, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for version in range(1, 5):
            await world.publish(version)
            await world.applied(version)

    assert play(World(tmp_path, seed, StreamFaults(loss=0.02, flip=0.02)), scenario) == {4}


def test_the_source_sends_a_version_about_once_and_then_only_differences(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        source = world.servers["coordinator"].address
        await world.publish(1)
        await world.applied(1)
        first = world.streams.sent_bytes[source]
        assert first < 1.5 * len(world.content), "three hosts make a chain"
        await world.publish(2)
        await world.applied(2)
        assert world.streams.sent_bytes[source] - first < len(world.content) / 4

    play(World(tmp_path), scenario)


def test_a_run_on_one_host_streams_nothing(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for name in ("short-1", "short-2", "short-3", "short-4"):
            world.kill(name)
        await asyncio.sleep(5)
        await world.publish(1)
        await world.applied(1, "short-0")
        assert world.streams.sent_bytes == {}
        assert not list((tmp_path / HERE).glob("libra-*"))

    play(World(tmp_path), scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_receiver_killed_in_mid_stream_costs_itself_alone(seed: int, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.publish(1)
        await asyncio.sleep(0.02 * seed)
        victim = ("short-1", "short-2", "short-3")[seed % 3]
        world.kill(victim)
        await world.applied(1, *(name for name in WORKERS if name != victim))
        await world.start(victim)
        await world.publish(2)
        await world.applied(2)

    slow = StreamFaults(bytes_per_s=400_000.0)
    assert play(World(tmp_path, seed, slow), scenario) == {2}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_coordinator_killed_in_mid_publish_is_told_again(seed: int, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.publish(1)
        await world.applied(1)
        segment = world.write(2)
        await world.announce(2, segment)
        await asyncio.sleep(0.02 * seed)
        world.kill("coordinator")
        await asyncio.sleep(1.0)
        assert all(engine.version in (1, 2) for engine in world.engines.values())
        await world.start("coordinator")
        await world.announce(2, segment)
        await world.applied(2)
        await world.publish(3)
        await world.applied(3)

    play(World(tmp_path, seed, StreamFaults(bytes_per_s=400_000.0)), scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_source_that_accepts_and_never_answers_is_named_by_the_deadline(
    seed: int, tmp_path: Path
) -> None:
    async def scenario(world: World) -> None:
        source = world.servers["coordinator"]
        source.silent = True
        await world.publish(1)
        await world.applied(1, "short-0")
        await asyncio.sleep(40.0)
        members = {member.name for member in world.trainer.members.values()}
        assert set(WORKERS) <= members, "whoever cannot fetch says so and stays"
        assert {world.engines[name].version for name in WORKERS} == {1, -1}
        source.silent = False
        await world.publish(2)
        await world.applied(2)

    play(World(tmp_path, seed), scenario)


def flip_a_bit(segment: Path, seed: int) -> None:
    content = bytearray(segment.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
    with segment.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bit_that_flips_in_the_segment_reaches_nobody(seed: int, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.publish(1)
        await world.applied(1)
        segment = Path(world.write(2))

        await world.announce(2, str(segment))
        flip_a_bit(segment, seed)
        await asyncio.sleep(20.0)
        for engine in world.engines.values():
            assert (engine.version, engine.digest) in (
                (1, world.digests[1]),
                (2, world.digests[2]),
            )
        await world.publish(3)
        await world.applied(3)

    play(World(tmp_path, seed, StreamFaults(bytes_per_s=100_000.0)), scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_join_and_leave_while_a_version_streams(seed: int, tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        world.kill("short-1")
        await world.publish(1)
        await asyncio.sleep(0.02 * seed)
        await world.start("short-1")
        world.kill("short-3")
        await world.applied(1, "short-0", "short-1", "short-2", "short-4")
        await world.start("short-3")
        await world.applied(1)

    assert play(World(tmp_path, seed, StreamFaults(bytes_per_s=400_000.0)), scenario) == {1}
