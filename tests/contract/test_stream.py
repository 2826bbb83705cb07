"""The contract of `common.stream`, on ZeroMQ and on the simulation."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import structlog
import uvloop
import zmq

from common.clock import run_sim
from common.delta import encode
from common.digests import hash_pieces
from common.errors import ShardCorrupt, StreamBroken
from common.messages.blob import Blob
from common.stream import PIECE_BYTES, Base, Chunk, Encoding, Fetched, Streamer, StreamServer
from common.transport.sim_stream import SimStreamNetwork
from common.transport.stream import ZmqStreamer, ZmqStreamServer

LIMIT_S = 10.0
SHORT_S = 0.4
CHUNK = 64 << 10

Servers = contextlib.AbstractAsyncContextManager[StreamServer]
Streamers = contextlib.AbstractAsyncContextManager[Streamer]


@dataclass
class Net:
    """Makes and runs both ends of one kind."""

    run: Callable[[Coroutine[Any, Any, None]], None]
    server: Callable[[str], Servers]
    streamer: Callable[[int], Streamers]

    @contextlib.asynccontextmanager
    async def offering(
        self, source: "Source", rate: int = 0
    ) -> AsyncGenerator[tuple[StreamServer, Streamer]]:
        """A server of a blob, and who may fetch it."""
        async with self.server("a") as server, self.streamer(rate) as streamer:
            server.offer("digest", source)
            yield server, streamer


def sim() -> Net:
    network = SimStreamNetwork(seed=1)

    @contextlib.asynccontextmanager
    async def streamer(rate: int = 0) -> AsyncGenerator[Streamer]:
        yield network.streamer(rate)

    return Net(run_sim, lambda name: network.server(f"sim://{name}"), streamer)


@pytest.fixture(params=["sim", "zmq-asyncio", "zmq-uvloop"])
def net(request: pytest.FixtureRequest) -> Net:
    if request.param == "sim":
        return sim()
    run = asyncio.run if request.param == "zmq-asyncio" else uvloop.run
    return Net(run, lambda _: ZmqStreamServer(), ZmqStreamer)


@dataclass
class Source:
    """Serves some bytes, as differences to a base where it has one."""

    content: bytes
    chunk_bytes: int = CHUNK
    base: tuple[str, bytes] | None = None
    missing: set[int] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)
    flip: dict[int, int] = field(default_factory=dict)
    """How often a chunk is served with a flipped bit, by number."""

    def chunk(self, number: int, base: str) -> Chunk | None:
        self.asked.append(number)
        if number in self.missing:
            return None
        part = slice(number * self.chunk_bytes, (number + 1) * self.chunk_bytes)
        content = self.content[part]
        if self.flip.get(number, 0):
            self.flip[number] -= 1
            return Chunk(Encoding.FULL, bytes([content[0] ^ 1]) + content[1:])
        if self.base is not None and self.base[0] == base:
            return encode(self.base[1][part], content, 2)
        return Chunk(Encoding.FULL, content)


async def until(reached: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(LIMIT_S):
        while not reached():  # noqa: ASYNC110  A thread sets no asyncio event.
            await asyncio.sleep(0.001)


def blob_of(content: bytes, chunk_bytes: int = CHUNK, digest: str = "digest") -> Blob:
    chunks = hash_pieces([memoryview(content)], chunk_bytes)
    return Blob(
        path="/none", length=len(content), chunk_bytes=chunk_bytes, chunks=chunks, digest=digest
    )


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


@dataclass
class Receiver:
    """Memory for one blob."""

    blob: Blob
    timeout_s: float = LIMIT_S

    def __post_init__(self) -> None:
        self.memory = bytearray(self.blob.length)
        self.have = bytearray(len(self.blob.chunks))
        self.arrived: list[int] = []

    async def fetch(self, streamer: Streamer, *sources: str, **options: Any) -> Fetched:
        return await streamer.fetch(
            self.blob,
            memoryview(self.memory),
            self.have,
            sources,
            timeout_s=self.timeout_s,
            on_chunk=self.arrived.append,
            **options,
        )


@pytest.mark.parametrize(
    ("length", "chunk_bytes"),
    [(1, CHUNK), (CHUNK, CHUNK), (5 * CHUNK + 7, CHUNK), (3 * PIECE_BYTES + 1, 2 * PIECE_BYTES)],
)
def test_what_arrives_is_what_was_offered(net: Net, length: int, chunk_bytes: int) -> None:
    content = noise(length)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content, chunk_bytes))
        async with net.offering(Source(content, chunk_bytes)) as (server, streamer):
            fetched = await receiver.fetch(streamer, server.address)
        assert receiver.memory == content
        assert all(receiver.have)
        assert sorted(receiver.arrived) == list(range(len(receiver.have)))
        assert (fetched.received_bytes, fetched.wrong) == (length, 0)

    net.run(scenario())


def test_only_wanted_and_missing_chunks_are_asked_for(net: Net) -> None:
    content = noise(6 * CHUNK)

    async def scenario() -> None:
        receiver, source = Receiver(blob_of(content)), Source(content)
        receiver.have[2] = 1
        async with net.offering(source) as (server, streamer):
            await receiver.fetch(streamer, server.address, chunks=[1, 2, 4])
        assert set(source.asked) == {1, 4}
        assert list(receiver.have) == [0, 1, 1, 0, 1, 0]
        assert receiver.memory[4 * CHUNK : 5 * CHUNK] == content[4 * CHUNK : 5 * CHUNK]

    net.run(scenario())


def test_a_base_makes_it_cheap(net: Net) -> None:
    old = noise(4 * CHUNK)
    new = bytearray(old)
    for place in range(0, len(new), 1000):
        new[place] ^= 1

    async def scenario() -> None:
        receiver = Receiver(blob_of(bytes(new)))
        async with net.offering(Source(bytes(new), base=("old", old))) as (server, streamer):
            base = Base("old", memoryview(old))
            fetched = await receiver.fetch(streamer, server.address, base=base)
        assert receiver.memory == new
        assert fetched.deltas == 4
        assert fetched.received_bytes < len(new) / 50

    net.run(scenario())


def test_a_damaged_base_costs_only_time(net: Net) -> None:
    old = noise(2 * CHUNK)
    new = old[:100] + b"!" + old[101:]

    async def scenario() -> None:
        receiver = Receiver(blob_of(new))
        async with net.offering(Source(new, base=("old", old))) as (server, streamer):
            base = Base("old", memoryview(old[:-1] + b"\0"))
            fetched = await receiver.fetch(streamer, server.address, base=base)
        assert receiver.memory == new
        assert fetched.wrong == 1

    net.run(scenario())


def test_a_base_that_the_source_does_not_know_changes_nothing(net: Net) -> None:
    content = noise(2 * PIECE_BYTES)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content, 2 * PIECE_BYTES))
        async with net.offering(Source(content, 2 * PIECE_BYTES)) as (server, streamer):
            base = Base("other", memoryview(bytes(len(content))))
            fetched = await receiver.fetch(streamer, server.address, base=base)
        assert receiver.memory == content
        assert fetched.deltas == 0

    net.run(scenario())


def test_a_wrong_chunk_is_asked_for_again(net: Net) -> None:
    content = noise(3 * CHUNK)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content))
        async with net.offering(Source(content, flip={1: 2})) as (server, streamer):
            fetched = await receiver.fetch(streamer, server.address)
        assert receiver.memory == content
        assert fetched.wrong == 2

    net.run(scenario())


def test_a_source_that_is_wrong_three_times_is_named(net: Net) -> None:
    content = noise(3 * CHUNK)

    async def scenario() -> None:
        receiver, source = Receiver(blob_of(content)), Source(content, flip={1: 99})
        async with net.offering(source) as (server, streamer):
            with pytest.raises(ShardCorrupt, match="chunk 1 of digest"):
                await receiver.fetch(streamer, server.address)
        assert source.asked.count(1) == 3

    net.run(scenario())


def test_a_source_that_is_wrong_gives_way_to_one_that_is_right(net: Net) -> None:
    content = noise(3 * CHUNK)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content))
        async with (
            net.server("a") as bad,
            net.server("b") as good,
            net.streamer(0) as streamer,
        ):
            bad.offer("digest", Source(content, flip={1: 99}))
            good.offer("digest", Source(content))
            await receiver.fetch(streamer, bad.address, good.address)
        assert receiver.memory == content

    net.run(scenario())


def test_a_source_without_it_gives_way(net: Net) -> None:
    content = noise(3 * CHUNK)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content))
        async with net.server("a") as bare, net.server("b") as full, net.streamer(0) as streamer:
            full.offer("digest", Source(content))
            await receiver.fetch(streamer, bare.address, full.address)
        assert receiver.memory == content

    net.run(scenario())


def test_a_relay_answers_when_the_chunk_arrives(net: Net) -> None:
    content = noise(3 * CHUNK)

    async def scenario() -> None:
        receiver, source = Receiver(blob_of(content)), Source(content, missing={2})
        async with (
            net.offering(source) as (server, streamer),
            asyncio.timeout(LIMIT_S),
            asyncio.TaskGroup() as tasks,
        ):
            fetch = tasks.create_task(receiver.fetch(streamer, server.address))
            await until(lambda: 2 in source.asked)
            assert not fetch.done()
            source.missing.clear()
            server.arrived()
        assert receiver.memory == content

    net.run(scenario())


def test_whoever_waits_is_told_when_it_is_withdrawn(net: Net) -> None:
    content = noise(2 * CHUNK)

    async def scenario() -> None:
        receiver, source = Receiver(blob_of(content)), Source(content, missing={1})
        async with net.offering(source) as (server, streamer):

            async def broken() -> None:
                with pytest.raises(StreamBroken, match="no more"):
                    await receiver.fetch(streamer, server.address)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(broken())
                await until(lambda: 1 in source.asked)
                server.withdraw("digest")
        assert list(receiver.have) == [1, 0]

    net.run(scenario())


def test_a_source_that_dies_gives_way_and_nothing_is_fetched_twice(net: Net) -> None:
    content = noise(4 * CHUNK)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content))
        first, second = Source(content, missing={3}), Source(content)
        async with net.server("b") as after, net.streamer(0) as streamer:
            after.offer("digest", second)
            async with asyncio.TaskGroup() as tasks:
                async with net.server("a") as before:
                    before.offer("digest", first)
                    fetch = tasks.create_task(
                        receiver.fetch(streamer, before.address, after.address)
                    )
                    await until(lambda: sum(receiver.have) == 3)
                await fetch
        assert receiver.memory == content
        assert set(second.asked) == {3}

    net.run(scenario())


def test_a_source_that_never_answers_is_named_by_the_deadline(net: Net) -> None:
    async def scenario() -> None:
        receiver = Receiver(blob_of(noise(CHUNK)), timeout_s=SHORT_S)
        loop = asyncio.get_running_loop()
        began = loop.time()
        source = Source(noise(CHUNK), missing={0})  # It has none, and never will.
        async with net.offering(source) as (server, streamer):
            with pytest.raises(StreamBroken) as caught:
                await receiver.fetch(streamer, server.address)
            assert loop.time() - began < 2 * SHORT_S
            assert caught.value.source == server.address
            assert (caught.value.digest, caught.value.chunk) == ("digest", 0)

    net.run(scenario())


def test_the_rate_is_kept(net: Net) -> None:
    content = noise(8 * CHUNK)

    async def scenario() -> None:
        receiver = Receiver(blob_of(content))
        loop = asyncio.get_running_loop()
        async with net.offering(Source(content), 16 * CHUNK) as (server, streamer):
            began = loop.time()
            await receiver.fetch(streamer, server.address)
            took = loop.time() - began
        assert 7 / 16 <= took < 2.0

    net.run(scenario())


def test_a_fetch_that_is_cancelled_lets_go_of_the_memory(net: Net) -> None:
    content = noise(2 * CHUNK)

    async def scenario() -> None:
        receiver, source = Receiver(blob_of(content)), Source(content, missing={1})
        async with net.offering(source) as (server, streamer):
            async with asyncio.TaskGroup() as tasks:
                fetch = tasks.create_task(receiver.fetch(streamer, server.address))
                await until(lambda: 1 in source.asked)
                fetch.cancel()
            source.missing.clear()
            before = bytes(receiver.memory)
            again = Receiver(blob_of(content))
            await again.fetch(streamer, server.address)
        assert again.memory == content
        assert receiver.memory == before

    net.run(scenario())


def test_a_listener_that_says_nothing_is_given_up() -> None:
    async def scenario() -> None:
        receiver = Receiver(blob_of(noise(CHUNK)), timeout_s=SHORT_S)
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as mute:
            address = "tcp://{}:{}".format(*mute.getsockname())
            async with ZmqStreamer() as streamer:
                with pytest.raises(StreamBroken, match="silent"):
                    await receiver.fetch(streamer, address)

    asyncio.run(scenario())


def test_garbage_ends_neither_a_server_nor_a_fetch() -> None:
    content = noise(2 * CHUNK)

    async def scenario() -> None:
        async with ZmqStreamServer() as server, ZmqStreamer() as streamer:
            server.offer("digest", Source(content))
            with zmq.Context() as context, context.socket(zmq.DEALER) as rude:
                rude.connect(server.address)
                for frames in ([b"x"], [b"\xc1", b"y"], [b"\x96\x01\x02\x03\x04\x05\x06"]):
                    rude.send_multipart(frames)
                receiver = Receiver(blob_of(content))
                await receiver.fetch(streamer, server.address)
                rude.close(linger=0)
            assert receiver.memory == content

    with structlog.testing.capture_logs():
        asyncio.run(scenario())
