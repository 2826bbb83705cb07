"""`common.mirror` on the simulated network: hosts that fetch, die, resume and pass on."""

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from common.clock import run_sim
from common.errors import ShardCorrupt, StreamBroken, VersionGone, WeightError
from common.messages.coordinator import Manifest
from common.mirror import Mirror
from common.stream import Chunk, Encoding
from common.transport.sim_stream import SimStreamNetwork, SimStreamServer, StreamFaults
from tests.support.segments import CHUNK, manifest_of
from tests.support.sim import seeds

TIMEOUT_S = 60.0


@dataclass
class Source:
    """The trainer's host."""

    content: bytes
    flip: set[int] = field(default_factory=set)

    def chunk(self, number: int, base: str) -> Chunk | None:
        del base
        content = self.content[number * CHUNK : (number + 1) * CHUNK]
        if number in self.flip:
            content = content[:-1] + bytes([content[-1] ^ 128])
        return Chunk(Encoding.FULL, content)


def noise(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count * CHUNK - 5)


def step_after(content: bytes, seed: int) -> bytes:
    """A few changed elements."""
    changed, dice = bytearray(content), random.Random(seed)
    for _ in range(len(content) // 500):
        changed[2 * dice.randrange(len(content) // 2)] ^= 1
    return bytes(changed)


class World:
    """A network, and the hosts as directories."""

    def __init__(self, directory: Path, seed: int = 0, faults: StreamFaults | None = None) -> None:
        self.network = SimStreamNetwork(seed, faults)
        self.directory = directory
        self.stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.origin = await self.serve("origin")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()

    async def serve(self, name: str) -> SimStreamServer:
        return await self.stack.enter_async_context(self.network.server(f"sim://{name}"))

    async def mirror(self, host: str, process: str) -> Mirror:
        memory = self.directory / host
        memory.mkdir(exist_ok=True)
        server = await self.serve(process)
        return Mirror("run", self.network.streamer(), server, memory, host)

    def publish(self, version: int, content: bytes) -> Manifest:
        manifest = manifest_of(version, content)
        self.origin.offer(manifest.digest, Source(content))
        return manifest

    @property
    def sent(self) -> int:
        return self.network.sent_bytes.get("sim://origin", 0)

    def files(self, host: str) -> list[str]:
        return sorted(path.name for path in (self.directory / host).iterdir())


ORIGIN = ["sim://origin"]


async def brought(mirror: Mirror, manifest: Manifest, *sources: str) -> bytes:
    local = await mirror.bring(manifest, sources or ORIGIN, timeout_s=TIMEOUT_S)
    return Path(local.segment).read_bytes()  # noqa: ASYNC240


def run(scenario: Coroutine[object, object, None]) -> None:
    run_sim(scenario)


def test_what_is_here_is_mapped_where_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = noise(9)
        segment = tmp_path / "w0"
        segment.write_bytes(content)
        manifest = manifest_of(1, content, str(segment))
        async with World(tmp_path) as world:
            mirror = await world.mirror("host", "a")
            assert await mirror.bring(manifest, ORIGIN, timeout_s=TIMEOUT_S) is manifest
            assert world.sent == 0

    run(scenario())


def test_a_file_of_the_same_name_is_not_mistaken_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = noise(9)
        (tmp_path / "w0").write_bytes(noise(9, seed=1))
        async with World(tmp_path) as world:
            manifest = world.publish(1, content)
            manifest = manifest.model_copy(update={"segment": str(tmp_path / "w0")})
            assert await brought(await world.mirror("host", "a"), manifest) == content

    run(scenario())


def test_one_process_of_a_host_streams_and_the_others_map(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = noise(20)
        async with World(tmp_path) as world:
            manifest = world.publish(1, content)
            mirrors = [await world.mirror("host", name) for name in "abc"]
            async with asyncio.TaskGroup() as tasks:
                found = [tasks.create_task(brought(m, manifest)) for m in mirrors]
            assert [task.result() for task in found] == [content] * 3
            assert world.sent == len(content)
            assert world.files("host") == [f"libra-run-m-{manifest.digest[:16]}"]

    run(scenario())


def test_the_next_version_comes_as_differences_to_this_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        old = noise(20)
        new = step_after(old, 1)
        async with World(tmp_path) as world:
            first = await world.mirror("one", "a")
            second = await world.mirror("two", "b")
            v1, v2 = world.publish(1, old), world.publish(2, new)
            for mirror in (first, second):
                await brought(mirror, v1)
            await brought(first, v2)  # The origin has no base.
            assert await brought(second, v2, "sim://a") == new
            assert world.network.sent_bytes["sim://a"] < len(new) / 10
            assert world.files("two") == [f"libra-run-m-{v2.digest[:16]}"]

    run(scenario())


def test_a_chain_costs_the_origin_one_transfer_and_two_link_times(tmp_path: Path) -> None:
    async def scenario() -> None:
        content, hosts = noise(200), 8
        link_s = 2.0
        faults = StreamFaults(bytes_per_s=len(content) / link_s)
        async with World(tmp_path, faults=faults) as world:
            manifest = world.publish(1, content)
            mirrors = [await world.mirror(f"host-{n}", f"m{n}") for n in range(hosts)]
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with asyncio.TaskGroup() as tasks:
                for number, mirror in enumerate(mirrors):
                    before = [f"sim://m{number - 1}"] if number else []
                    tasks.create_task(brought(mirror, manifest, *before, *ORIGIN))
            assert loop.time() - began < 2 * link_s
            assert world.sent == len(content)

    run(scenario())


def test_the_next_process_goes_on_where_a_killed_one_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = noise(50)
        async with World(tmp_path, faults=StreamFaults(bytes_per_s=CHUNK * 10)) as world:
            manifest = world.publish(1, content)
            killed = await world.mirror("host", "a")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3):
                    await brought(killed, manifest)
            assert any(name.endswith(".part") for name in world.files("host"))
            before = world.sent
            assert before > 20 * CHUNK
            assert await brought(await world.mirror("host", "b"), manifest) == content
            assert world.sent - before < len(content) - 15 * CHUNK

    run(scenario())


def test_a_lock_that_is_held_too_long_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = noise(50)
        async with World(tmp_path) as world:
            manifest = world.publish(1, content)
            world.origin.silent = True
            holder, waiter = await world.mirror("host", "a"), await world.mirror("host", "b")

            async def held() -> None:
                with pytest.raises(StreamBroken, match="silent"):
                    await brought(holder, manifest)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(held())
                await asyncio.sleep(0.01)
                with pytest.raises(StreamBroken, match="another process"):
                    await waiter.bring(manifest, ORIGIN, timeout_s=1)

    run(scenario())


def test_a_flipped_bit_at_the_source_is_named_with_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = noise(9)
        async with World(tmp_path) as world:
            manifest = manifest_of(7, content)
            world.origin.offer(manifest.digest, Source(content, flip={4}))
            with pytest.raises(ShardCorrupt, match="version 7: chunk 4"):
                await brought(await world.mirror("host", "a"), manifest)
            world.origin.offer(manifest.digest, Source(content))
            assert await brought(await world.mirror("host", "b"), manifest) == content

    run(scenario())


def test_without_sources_what_is_not_here_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            mirror = await world.mirror("host", "a")
            with pytest.raises(VersionGone):
                await mirror.bring(world.publish(1, noise(2)), [], timeout_s=TIMEOUT_S)

    run(scenario())


def test_the_last_process_of_a_host_removes_the_copy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with World(tmp_path) as world:
            manifest = world.publish(1, noise(5))
            mirrors = [await world.mirror("host", name) for name in "ab"]
            for mirror in mirrors:
                await brought(mirror, manifest)
            mirrors[0].close()
            assert world.files("host")
            mirrors[1].close()
            assert not world.files("host")

    run(scenario())


@pytest.mark.parametrize("seed", seeds(20))
def test_loss_flips_and_death_leave_every_host_with_the_right_bytes(
    tmp_path: Path, seed: int
) -> None:
    async def bring_until(mirror: Mirror, manifest: Manifest, *sources: str) -> bytes:
        for _ in range(10):
            with contextlib.suppress(WeightError):
                return await brought(mirror, manifest, *sources)
        raise AssertionError("ten tries")

    async def scenario() -> None:
        old = noise(24, seed)
        faults = StreamFaults(loss=0.01, flip=0.05, bytes_per_s=CHUNK * 100)
        async with World(tmp_path, seed, faults) as world:
            mirrors = [await world.mirror(f"host-{n}", f"m{n}") for n in range(4)]
            for version, content in enumerate((old, step_after(old, seed))):
                manifest = world.publish(version, content)
                async with asyncio.TaskGroup() as tasks:
                    found = [
                        tasks.create_task(
                            bring_until(
                                mirror, manifest, *([f"sim://m{n - 1}"] if n else []), *ORIGIN
                            )
                        )
                        for n, mirror in enumerate(mirrors)
                    ]
                    await asyncio.sleep(random.Random(seed).uniform(0, 1))
                    world.network.kill("sim://m1")
                assert all(task.result() == content for task in found)

    run(scenario())
