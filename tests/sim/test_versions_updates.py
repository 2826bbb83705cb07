"""`on_weight_update`: what becomes of turns at work when a version is swapped in."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from common.clock import run_sim
from common.config import RolloutConfig
from common.errors import EngineError, ShardCorrupt
from common.messages.coordinator import Manifest
from common.messages.rollout import ApplyVersion
from common.trajectory import unpack_tokens
from services.rollout.engine import FinishReason, GenerateRequest, Generation
from services.rollout.fake_engine import FakeEngine
from services.rollout.updates import SAMPLED_ANEW_MAX, Policy, Updates
from tests.support.rollout import END, TINY, Cluster, assign, rollout_config
from tests.support.sim import manifest, seeds, until

WAIT_S = 5.0


def request(number: int = 0, max_tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(f"t{number}/1/0", (65, 66, 67), max_tokens, 1.0, seed=number)


def play(
    policy: Policy,
    scenario: Callable[[Updates, FakeEngine], Awaitable[None]],
    engine: FakeEngine | None = None,
) -> None:
    """Run a scenario with an engine that has version 1."""

    async def run() -> None:
        used = engine or FakeEngine()
        await used.start()
        await used.apply_weights(manifest(1))
        await scenario(Updates(used, policy, WAIT_S), used)

    run_sim(run())


async def undisturbed(version: int, number: int = 0, max_tokens: int = 100) -> Generation:
    """What another engine samples with that version alone."""
    engine = FakeEngine()
    await engine.start()
    await engine.apply_weights(manifest(version))
    return await engine.generate(request(number, max_tokens))


def logprobs(version: int, tokens: list[int]) -> list[float]:
    engine = FakeEngine()
    engine.digest = f"digest-{version}"
    return [engine._logprob(a, b) for a, b in zip([67, *tokens], tokens, strict=False)]


@pytest.mark.parametrize("after_s", [0.011, 0.123, 0.5, 0.987])
def test_keep_changes_the_version_at_exactly_the_token_of_the_swap(after_s: float) -> None:
    async def scenario(updates: Updates, engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(updates.generate(request()))
            await asyncio.sleep(after_s)
            before = engine.load().decode_tokens
            await updates.swap(manifest(2))
        made = task.result()
        assert made.versions == [1] * before + [2] * (100 - before)
        assert made.logprobs[:before] == logprobs(1, made.tokens)[:before]
        assert made.logprobs[before:] == logprobs(2, made.tokens)[before:]

    play("keep", scenario)


def test_abort_samples_the_turn_anew_from_its_first_token() -> None:
    async def scenario(updates: Updates, engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(updates.generate(request()))
            await asyncio.sleep(0.5)
            await updates.swap(manifest(2))
            assert engine.version == 2
        made, expected = task.result(), await undisturbed(2)
        assert (made.tokens, made.logprobs) == (expected.tokens, expected.logprobs)
        assert made.versions == [2] * 100
        assert made.queue_s == pytest.approx(0.51, abs=0.02)

    play("abort", scenario)


def test_wait_lets_the_turn_end_and_begins_no_other_before_the_swap() -> None:
    async def scenario(updates: Updates, engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(updates.generate(request(0)))
            await asyncio.sleep(0.5)
            swap = tasks.create_task(updates.swap(manifest(2)))
            await asyncio.sleep(0.1)
            second = tasks.create_task(updates.generate(request(1)))
            await swap
            assert first.done()
        assert (first.result().versions, second.result().versions) == ([1] * 100, [2] * 100)
        assert engine.load().decode_tokens == 200

    play("wait", scenario)


def test_wait_has_an_end_after_which_the_turn_is_sampled_anew() -> None:
    async def scenario(updates: Updates, _engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(updates.generate(request()))
            await asyncio.sleep(0.01)
            async with asyncio.timeout(WAIT_S + 1.0):
                await updates.swap(manifest(2))
        assert set(task.result().versions) == {2}

    play("wait", scenario, FakeEngine(token_s=1.0))


class Refusing(FakeEngine):
    """Takes one version and no other."""

    async def apply_weights(self, manifest: Manifest) -> None:
        if manifest.version > 1:
            raise ShardCorrupt(manifest.version, "chunk 0")
        await super().apply_weights(manifest)


@pytest.mark.parametrize("policy", ["keep", "abort", "wait"])
def test_turns_go_on_with_the_old_version_when_the_new_one_cannot_be_applied(
    policy: Policy,
) -> None:
    async def scenario(updates: Updates, _engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(updates.generate(request()))
            await asyncio.sleep(0.5)
            with pytest.raises(ShardCorrupt):
                await updates.swap(manifest(2))
        assert task.result().versions == [1] * 100

    play(policy, scenario, Refusing())


def test_a_turn_that_every_version_overtakes_has_an_end() -> None:
    async def scenario(updates: Updates, engine: FakeEngine) -> None:
        async def publish() -> None:
            for version in range(2, SAMPLED_ANEW_MAX + 4):
                await asyncio.sleep(0.5)
                await updates.swap(manifest(version))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish())
            with pytest.raises(EngineError, match="16 versions arrived"):
                await updates.generate(request())
        assert engine.load().running == 0

    play("abort", scenario)


def test_who_gives_up_leaves_nothing_that_a_swap_waits_for() -> None:
    async def scenario(updates: Updates, _engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(updates.generate(request()))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.sleep(0)
            async with asyncio.timeout(0.05):
                await updates.swap(manifest(2))

    play("wait", scenario)


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("policy", ["keep", "abort", "wait"])
def test_swaps_among_ten_times_as_many_requests_as_slots(policy: Policy, seed: int) -> None:
    slots = 4

    async def scenario(updates: Updates, engine: FakeEngine) -> None:
        async with asyncio.TaskGroup() as tasks:
            made = [
                tasks.create_task(
                    updates.generate(request(n + 100 * seed, 5 + (n * 7 + seed) % 30))
                )
                for n in range(10 * slots)
            ]
            for version in (2, 3, 4):
                await asyncio.sleep(0.15 + 0.01 * seed)
                async with asyncio.timeout(WAIT_S + 2.0):
                    await updates.swap(manifest(version))
        assert engine.load().kv_tokens_used == 0
        assert engine.version == 4
        for task in made:
            generation = task.result()
            assert generation.finish_reason is not FinishReason.ABORTED
            assert generation.versions == sorted(generation.versions)
            assert policy == "keep" or len(set(generation.versions)) == 1
            expected = [
                logprobs(version, generation.tokens)[index]
                for index, version in enumerate(generation.versions)
            ]
            assert generation.logprobs == expected

    play(policy, scenario, FakeEngine(slots=slots))


@pytest.mark.parametrize("policy", ["abort", "wait"])
def test_no_journaled_turn_mixes_versions(policy: Policy) -> None:
    """The whole worker: nothing of the old sample reaches the journal."""
    texts = {7: "seven", 8: "<answer>eight</answer>"}

    def script(_context: object, _seed: int, version: int) -> list[int]:
        return TINY.encode(texts[version] + END)

    engine = FakeEngine(script=script, decode=TINY.decode, token_s=0.2)
    config = rollout_config().model_copy(
        update={"rollout": RolloutConfig(tool_format="tags", on_weight_update=policy)}
    )
    cluster = Cluster(engine, config=config)  # type: ignore[arg-type]

    async def scenario() -> None:
        await engine.start()
        await engine.apply_weights(manifest(7))
        async with cluster.running():
            await cluster.ask(assign())
            await until(lambda: engine.load().decode_tokens >= 3)
            await cluster.ask(ApplyVersion(manifest=manifest(8)))
            await cluster.result()

    run_sim(scenario())
    (turn,) = cluster.scheduler.turns
    version = 8 if policy == "abort" else 7
    assert set(unpack_tokens(turn.action_versions)) == {version}
    assert unpack_tokens(turn.action_tokens) == TINY.encode(texts[version] + END)
