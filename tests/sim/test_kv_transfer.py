"""A KV cache on its way between two workers, from sources honest and not."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import run_sim
from common.errors import Refusal, RequestRefused
from common.membership import Membership
from common.messages.coordinator import Member
from common.messages.rollout import FetchKv, KvChunk
from common.trajectory import pack_tokens
from common.transport.sim import SimNetwork
from services.rollout import kv_server
from services.rollout.engine import KvState
from services.rollout.kv_client import FETCHES_MAX, KV_BYTES_MAX, KV_DEADLINE_S, KvClient
from services.rollout.kv_server import KvServer
from services.rollout.moves import Miss
from tests.support.holding_engine import VERSION, HoldingEngine
from tests.support.sim import process, until

CONTEXT = list(range(100))
Answer = Callable[[str, FetchKv], KvChunk | Awaitable[KvChunk]]


@dataclass
class Pair:
    """A source that answers by a function, and the worker that fetches from it."""

    client: KvClient
    engine: HoldingEngine
    network: SimNetwork
    source: str
    asked: list[FetchKv]

    async def take_over(self, trajectory_id: str = "t0") -> Miss | None:
        return await self.client.take_over(self.source, trajectory_id, CONTEXT)


@contextlib.asynccontextmanager
async def pair(answer: Answer, engine: HoldingEngine | None = None) -> AsyncGenerator[Pair]:
    network, asked, target = SimNetwork(0), list[FetchKv](), engine or HoldingEngine()
    async with (
        process(network, "rollout", "short-0") as source,
        process(network, "rollout", "short-1") as runtime,
    ):

        def serve(sender: str, request: FetchKv) -> KvChunk | Awaitable[KvChunk]:
            asked.append(request)
            return answer(sender, request)

        source.mesh.serve(FetchKv, serve)
        membership = Membership(runtime)
        peer = source.mesh.identity
        membership.members[peer] = Member(
            peer=peer, role="rollout", name="short-0", address=source.mesh.address, labels={}
        )
        client = KvClient(membership, target, runtime.mesh.identity)
        yield Pair(client, target, network, peer, asked)


def chunk_of(content: bytes, request: FetchKv, **changes: object) -> KvChunk:
    """What an honest source answers in small chunks, unless `changes` say otherwise."""
    values: dict[str, object] = {
        "payload": content[request.offset : request.offset + 64],
        "length": len(content),
        "digest": xxhash.xxh3_64_hexdigest(content),
        "reason": "",
    }
    return KvChunk.model_validate(values | changes)


CONTENT = bytes(range(200)) + pack_tokens([99])


def lie(**changes: object) -> Answer:
    return lambda _sender, request: chunk_of(CONTENT, request, **changes)


def later_lie(**changes: object) -> Answer:
    """Honest at first."""
    return lambda _sender, request: chunk_of(
        CONTENT, request, **(changes if request.offset else {})
    )


def refuse(_sender: str, _request: FetchKv) -> KvChunk:
    raise RequestRefused(Refusal.OVERLOADED)


async def hang(_sender: str, _request: FetchKv) -> KvChunk:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_later(sender: str, request: FetchKv) -> KvChunk:
    return await hang(sender, request) if request.offset else chunk_of(CONTENT, request)


async def trickle(_sender: str, request: FetchKv) -> KvChunk:
    """Every chunk in time, and all of them never."""
    await asyncio.sleep(1.0)
    return chunk_of(CONTENT, request, payload=b"x")


def garbage(_sender: str, _request: FetchKv) -> KvChunk:
    return KvChunk.model_construct(payload=7, length="?", digest=None, reason="")  # type: ignore[arg-type]


def of_tokens(tokens: int) -> Answer:
    content = bytes(100) + pack_tokens([tokens])
    return lambda _sender, request: chunk_of(content, request)


LIES: list[tuple[Answer, Miss]] = [
    (lie(digest="0" * 16), Miss.CORRUPT),
    (lie(length=KV_BYTES_MAX + 1), Miss.TOO_LARGE),
    (lie(length=1 << 62), Miss.TOO_LARGE),
    (lie(length=-5), Miss.CORRUPT),
    (lie(length=3), Miss.CORRUPT),
    (lie(payload=b""), Miss.CORRUPT),
    (lie(payload=bytes(500)), Miss.CORRUPT),
    (lie(length=0, payload=b"", reason="version"), Miss.VERSION),
    (lie(length=0, payload=b"", reason="not_kept"), Miss.NOT_KEPT),
    (lie(length=0, payload=b"", reason="any other word"), Miss.CORRUPT),
    (later_lie(length=999), Miss.CORRUPT),
    (later_lie(digest="1" * 16), Miss.CORRUPT),
    (later_lie(payload=bytes(64)), Miss.CORRUPT),
    (later_lie(length=0, payload=b"", reason="not_kept"), Miss.NOT_KEPT),
    (of_tokens(0), Miss.CORRUPT),
    (of_tokens(101), Miss.CORRUPT),
    (of_tokens(-1), Miss.CORRUPT),
    (garbage, Miss.CORRUPT),
    (refuse, Miss.REFUSED),
    (hang, Miss.TOO_SLOW),
    (trickle, Miss.TOO_SLOW),
]


@pytest.mark.parametrize(("answer", "miss"), LIES)
def test_whatever_a_source_says_the_fetch_ends_in_time_and_with_a_reason(
    answer: Answer, miss: Miss
) -> None:
    async def scenario() -> None:
        async with pair(answer) as made:
            assert await made.take_over() is miss
            assert made.engine.given == []
            assert asyncio.get_running_loop().time() < KV_DEADLINE_S + 1

    run_sim(scenario())


def test_an_honest_source_is_believed() -> None:
    async def scenario() -> None:
        async with pair(lie()) as made:
            assert await made.take_over() is None
            assert made.engine.given == [KvState(CONTEXT[:99], VERSION, CONTENT[:-4])]
            assert [request.offset for request in made.asked] == [0, 64, 128, 192]

    run_sim(scenario())


def test_a_source_that_dies_in_the_middle_is_gone() -> None:
    async def scenario() -> None:
        async with pair(hang_later) as made, asyncio.TaskGroup() as tasks:
            fetch = tasks.create_task(made.take_over())
            await until(lambda: len(made.asked) == 2)
            made.network.kill(made.source)
        assert fetch.result() is Miss.SOURCE_GONE
        assert asyncio.get_running_loop().time() < 1

    run_sim(scenario())


def test_nobody_the_worker_itself_and_strangers_are_not_asked() -> None:
    async def scenario() -> None:
        async with pair(hang) as made:
            for source, miss in (
                ("", Miss.NO_SOURCE),
                ("sim/rollout/short-1/0001", Miss.LOCAL),
                ("sim/rollout/short-9/0001", Miss.SOURCE_GONE),
            ):
                assert await made.client.take_over(source, "t0", CONTEXT) is miss
            assert asyncio.get_running_loop().time() == 0

    run_sim(scenario())


def test_an_engine_that_does_not_take_a_cache_is_a_reason_too() -> None:
    async def scenario() -> None:
        engine = HoldingEngine()
        async with pair(lie(), engine) as made:
            engine.takes = False
            assert await made.take_over() is Miss.ENGINE
            engine.broken = True
            assert await made.take_over() is Miss.ENGINE

    run_sim(scenario())


def test_only_so_many_are_fetched_at_once_and_the_others_wait_their_turn() -> None:
    async def scenario() -> None:
        at_once: list[int] = []
        now = 0

        async def answer(_sender: str, request: FetchKv) -> KvChunk:
            nonlocal now
            now += 1
            at_once.append(now)
            await asyncio.sleep(0.1)
            now -= 1
            return chunk_of(CONTENT, request)

        async with pair(answer) as made, asyncio.TaskGroup() as tasks:
            fetches = [tasks.create_task(made.take_over(f"t{n}")) for n in range(20)]
        assert {fetch.result() for fetch in fetches} == {None}
        assert max(at_once) == FETCHES_MAX

    run_sim(scenario())


@given(size=st.integers(1, 5000), chunk_bytes=st.integers(1, 6000), seed=st.integers(0, 255))
@settings(max_examples=50)
def test_a_cache_of_any_size_arrives_whole_in_chunks_of_any_size(
    size: int, chunk_bytes: int, seed: int
) -> None:
    payload = bytes((seed + index * index) % 256 for index in range(size))

    async def scenario() -> None:
        source = HoldingEngine(payload)
        server = KvServer(source)
        async with pair(server.fetch) as made:
            assert await made.take_over() is None
            assert made.engine.given == [KvState(CONTEXT[:99], VERSION, payload)]
            assert len(made.asked) == -(-(size + 4) // max(chunk_bytes, least))
        assert source.exports == 1
        assert server.kept_bytes == 0

    least = size // 50 + 1  # Keeps the number of round trips small.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_server, "KV_CHUNK_BYTES", max(chunk_bytes, least))
        run_sim(scenario())
