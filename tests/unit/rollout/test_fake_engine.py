"""What the fake engine has beyond the contract, under virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from common.clock import run_sim
from common.errors import EngineError
from services.rollout.engine import GenerateRequest
from services.rollout.fake_engine import FakeEngine
from tests.support.sim import manifest


def request(name: str = "a", max_tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(name, [65, 66], max_tokens, 1.0, 0)


async def ready(engine: FakeEngine) -> FakeEngine:
    await engine.start()
    await engine.apply_weights(manifest(0))
    return engine


def test_tokens_take_their_time_on_the_loops_clock() -> None:
    async def scenario() -> tuple[float, float]:
        engine = await ready(FakeEngine(token_s=0.5, slots=1))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.generate(request("a")))
            second = tasks.create_task(engine.generate(request("b")))
        return second.result().queue_s, second.result().decode_s

    assert run_sim(scenario()) == pytest.approx((5.5, 4.5))


def test_it_follows_its_script() -> None:
    def script(context: Sequence[int], seed: int, version: int) -> list[int]:
        return [*context, seed, version]

    async def scenario() -> list[int]:
        engine = await ready(FakeEngine(script=script))
        return (await engine.generate(request())).tokens

    assert run_sim(scenario()) == [65, 66, 0, 0]


def test_death_fails_what_runs_and_what_comes() -> None:
    async def failed(engine: FakeEngine) -> str:
        with pytest.raises(EngineError) as raised:
            await engine.generate(request())
        return str(raised.value)

    async def scenario() -> tuple[str, str]:
        engine = await ready(FakeEngine(token_s=1.0))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(failed(engine))
            await asyncio.sleep(2.5)
            engine.kill("power cut")
        return task.result(), await failed(engine)

    assert run_sim(scenario()) == ("power cut", "power cut")


def test_a_lie_about_applying_shows_in_digest_and_scores_but_not_in_the_version() -> None:
    async def scenario() -> None:
        honest, liar = await ready(FakeEngine()), await ready(FakeEngine())
        liar.lies_about_applying = True
        before = await liar.score([1, 2, 3])
        for engine in (honest, liar):
            await engine.apply_weights(manifest(1))
        assert liar.version == honest.version == 1
        assert (honest.digest, liar.digest) == ("digest-1", "digest-0")
        assert await liar.score([1, 2, 3]) == before != await honest.score([1, 2, 3])

    run_sim(scenario())


def test_a_cached_context_moves_between_engines_of_one_version_only() -> None:
    async def scenario() -> None:
        source, target = await ready(FakeEngine()), await ready(FakeEngine())
        await source.generate(request())
        state = await source.export_kv([65, 66])
        assert state is not None
        assert await target.import_kv(state)
        await target.generate(request())
        assert target.prefix_hits == {0: 1}
        await target.apply_weights(manifest(1))
        assert not await target.import_kv(state)
        assert await target.export_kv([65, 66]) is None

    run_sim(scenario())


def test_what_is_not_cached_and_what_is_moved_cost_time() -> None:
    async def scenario() -> tuple[float, float, float, int]:
        def costly() -> FakeEngine:
            return FakeEngine(token_s=0.0, prefill_token_s=0.5, transfer_token_s=0.125)

        source, target = await ready(costly()), await ready(costly())
        loop = asyncio.get_running_loop()
        fresh = await source.generate(request(max_tokens=1))
        state = await source.export_kv([65, 66])
        assert state is not None
        before = loop.time()
        assert await target.import_kv(state)
        moved_s = loop.time() - before
        longer = GenerateRequest("b", [65, 66, 67], 1, 1.0, 0)
        return (
            fresh.queue_s,
            moved_s,
            (await target.generate(longer)).queue_s,
            target.prefill_tokens,
        )

    assert run_sim(scenario()) == pytest.approx((1.0, 0.25, 0.5, 1))


def test_the_least_recently_used_context_is_forgotten() -> None:
    async def scenario() -> list[bool]:
        engine = await ready(FakeEngine(slots=1))
        for start in (0, 1, 0, 2):
            await engine.generate(GenerateRequest("a", [70 + start] * 3, 1, 1.0, 0))
        return [await engine.export_kv([70 + start] * 3) is not None for start in (0, 1, 2)]

    assert run_sim(scenario()) == [True, False, True]
