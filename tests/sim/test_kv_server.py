"""What a worker gives of the KV caches of trajectories that have left it, and for how long."""

import asyncio

import pytest

from common.clock import run_sim
from common.errors import Refusal, RequestRefused
from common.messages.rollout import FetchKv
from common.trajectory import pack_tokens
from services.rollout import kv_server
from services.rollout.kv_server import EXPORTS_MAX, GRACE_S, KEPT_MAX, KEPT_S, QUIET_S, KvServer
from services.rollout.moves import Miss
from tests.support.holding_engine import VERSION, HoldingEngine

CONTEXT = pack_tokens(range(100))


def ask(trajectory_id: str = "t0", *, offset: int = 0, version: int = VERSION) -> FetchKv:
    return FetchKv(trajectory_id=trajectory_id, context=CONTEXT, version=version, offset=offset)


LARGE = bytes(kv_server.KV_CHUNK_BYTES)
"""Takes two chunks."""


async def reason(server: KvServer, request: FetchKv) -> str:
    chunk = await server.fetch("target", request)
    assert (chunk.length, chunk.payload) == (0, b"")
    return chunk.reason


def test_a_cache_that_nobody_reads_to_its_end_is_freed() -> None:
    async def scenario() -> None:
        server = KvServer(HoldingEngine(LARGE))
        assert (await server.fetch("target", ask())).length == len(LARGE) + 4
        assert server.kept_bytes
        await asyncio.sleep(KEPT_S + 1)
        server.forget_old()
        assert server.kept_bytes == 0
        assert await reason(server, ask(offset=len(LARGE))) == Miss.NOT_KEPT

    run_sim(scenario())


def test_exports_that_are_kept_are_bounded() -> None:
    async def scenario() -> None:
        server = KvServer(HoldingEngine(LARGE))
        for number in range(KEPT_MAX + 5):
            await server.fetch("target", ask(f"t{number}"))
        assert server.kept_bytes == KEPT_MAX * (len(LARGE) + 4)
        assert await reason(server, ask("t0", offset=len(LARGE))) == Miss.NOT_KEPT
        last = await server.fetch("target", ask(f"t{KEPT_MAX + 4}", offset=len(LARGE)))
        assert len(last.payload) == 4

    run_sim(scenario())


def test_more_exports_than_the_worker_can_do_are_refused() -> None:
    async def scenario() -> None:
        engine = HoldingEngine(b"x")
        engine.export_s = 1.0
        server = KvServer(engine)
        async with asyncio.TaskGroup() as tasks:
            for number in range(EXPORTS_MAX):
                tasks.create_task(server.fetch("target", ask(f"t{number}")))
            await asyncio.sleep(0.5)
            with pytest.raises(RequestRefused) as caught:
                await server.fetch("target", ask("one-more"))
        assert caught.value.refusal is Refusal.OVERLOADED
        assert (await server.fetch("target", ask("one-more"))).length

    run_sim(scenario())


def test_a_source_says_why_there_is_nothing_to_have() -> None:
    async def scenario() -> None:
        engine = HoldingEngine(b"x")
        server = KvServer(engine)
        assert await reason(server, ask(version=VERSION + 1)) == Miss.VERSION
        engine.export_s = 1.0
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(reason(server, ask()))
            await asyncio.sleep(0.5)
            engine.version = VERSION + 1
        assert asked.result() == Miss.VERSION
        engine.version = VERSION
        engine.payload = b""
        assert await reason(server, ask()) == Miss.NOT_KEPT
        engine.broken = True
        assert await reason(server, ask()) == Miss.ENGINE

    run_sim(scenario())


@pytest.mark.parametrize(
    "request_", [ask(offset=-1), ask(offset=1 << 40), ask().model_copy(update={"context": b"abc"})]
)
def test_what_no_target_asks_is_refused(request_: FetchKv) -> None:
    async def scenario() -> None:
        server = KvServer(HoldingEngine(LARGE))
        await server.fetch("target", ask())
        with pytest.raises(RequestRefused) as caught:
            await server.fetch("target", request_)
        assert caught.value.refusal is Refusal.INVALID

    run_sim(scenario())


# A source that stops.


async def lingered_s(server: KvServer) -> float:
    loop = asyncio.get_running_loop()
    before = loop.time()
    await server.linger()
    return loop.time() - before


def test_a_stopping_source_does_not_wait_when_nothing_left_it() -> None:
    assert run_sim(lingered_s(KvServer(HoldingEngine()))) == 0


def test_a_stopping_source_waits_only_a_moment_for_someone_who_never_asks() -> None:
    async def scenario() -> float:
        server = KvServer(HoldingEngine(b"x"))
        server.expect("t0")
        return await lingered_s(server)

    assert run_sim(scenario()) == pytest.approx(QUIET_S)


def test_a_stopping_source_leaves_when_all_have_what_they_want() -> None:
    async def scenario() -> float:
        server = KvServer(HoldingEngine(b"x"))
        server.begin_stopping()
        await server.fetch("target", ask("faster than the word of the scheduler"))
        for name in ("faster than the word of the scheduler", "t0", "t1"):
            server.expect(name)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(lingered_s(server))
            await asyncio.sleep(0.3)
            await server.fetch("target", ask("t0"))
            await asyncio.sleep(0.3)
            await server.fetch("target", ask("t1", version=VERSION + 1))
        return waiting.result()

    assert run_sim(scenario()) == pytest.approx(0.6)


def test_a_stopping_source_does_not_wait_for_ever() -> None:
    async def scenario() -> float:
        engine = HoldingEngine(b"x")
        engine.export_s = 100.0
        server = KvServer(engine)
        server.expect("t0")
        async with asyncio.TaskGroup() as tasks:
            export = tasks.create_task(server.fetch("target", ask("t0")))
            lingered = await lingered_s(server)
            export.cancel()
        return lingered

    assert run_sim(scenario()) == pytest.approx(GRACE_S)
