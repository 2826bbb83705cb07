"""What every engine must do. One engine of each kind serves all tests of its kind."""

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from common.errors import EngineError, ShardCorrupt, VersionGone
from common.weights import NO_VERSION
from services.rollout.engine import FinishReason, Generation, KvState
from services.rollout.fake_engine import FakeEngine
from tests.support.engines import CONTEXT_TOKENS, LOWERCASE, Subject

TOLERANCE = 1e-3
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["fake", "torch", pytest.param("vllm", marks=needs_vllm)],
)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Subject]:
    subject = Subject(request.param, tmp_path_factory.mktemp(request.param))
    try:
        await subject.start()
        yield subject
    finally:
        await subject.engine.aclose()


@pytest.fixture
def model_subject(subject: Subject) -> Subject:
    if subject.kind == "fake":
        pytest.skip("the fake has no model")
    return subject


async def many(subject: Subject, count: int, **changes: object) -> list[Generation]:
    async with asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(subject.generate(seed=seed, **changes)) for seed in range(count)
        ]
    return [task.result() for task in started]


async def test_it_refuses_before_the_first_version(subject: Subject) -> None:
    assert "no policy version" in str(subject.refusal)


async def test_tokens_logprobs_and_versions_have_equal_length(subject: Subject) -> None:
    for generation in await many(subject, 8):
        assert 1 <= len(generation.tokens) <= 24
        assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions)
        assert set(generation.versions) == {subject.engine.version}
        assert all(logprob < 0 for logprob in generation.logprobs)


async def test_it_stops_at_the_length_limit(subject: Subject) -> None:
    ended = [g for g in await many(subject, 8, max_tokens=5) if g.finish_reason == "length"]
    assert ended
    assert {len(generation.tokens) for generation in ended} == {5}


async def test_a_generation_ends_where_the_context_does(subject: Subject) -> None:
    generation = await subject.generate(context=[50] * (CONTEXT_TOKENS - 2), max_tokens=9)
    assert len(generation.tokens) <= 2


async def test_a_single_token_is_a_context(subject: Subject) -> None:
    assert (await subject.generate(context=[50], max_tokens=3)).tokens


async def test_a_token_that_the_model_does_not_know_fails_its_request_alone(
    model_subject: Subject,
) -> None:
    with pytest.raises(EngineError):
        await model_subject.generate(context=[5, 1 << 20])
    assert (await model_subject.generate()).tokens


async def test_the_tokens_that_complete_a_stop_string_are_kept(subject: Subject) -> None:
    generations = await many(subject, 8, stop=LOWERCASE, max_tokens=64)
    texts = [
        [subject.decode([token]) for token in g.tokens] for g in generations if g.tokens[-1] != 0
    ]
    assert any(text[-1] in LOWERCASE for text in texts)
    assert not any(character in LOWERCASE for text in texts for character in text[:-1])


async def test_a_stop_string_is_found_across_tokens(subject: Subject) -> None:
    whole = await subject.generate(max_tokens=64)
    pair = next(
        text
        for first in range(1, len(whole.tokens) - 1)
        if (text := subject.decode(whole.tokens[first : first + 2])).isascii() and len(text) == 2
    )
    stopped = await subject.generate(max_tokens=64, stop=(pair,))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert subject.decode(stopped.tokens).endswith(pair)
    assert pair not in subject.decode(stopped.tokens[:-1])


async def test_equal_seeds_sample_equal_tokens_and_others_others(subject: Subject) -> None:
    first, second = await subject.generate(seed=1), await subject.generate(seed=1)
    other = await subject.generate(seed=2)
    assert first.tokens == second.tokens != other.tokens


async def test_abort_returns_what_there_is(subject: Subject) -> None:
    seed = await subject.long_seed(200)
    request = subject.request(seed=seed, max_tokens=200)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(subject.engine.generate(request))
        await subject.until_sampling()
        await subject.engine.abort(request.request_id)
    generation = task.result()
    assert generation.finish_reason is FinishReason.ABORTED
    assert 1 <= len(generation.tokens) == len(generation.versions) < 200


async def test_abort_of_an_unknown_request_is_fine(subject: Subject) -> None:
    await subject.engine.abort("nobody")


async def test_cancelling_the_await_frees_the_request(subject: Subject) -> None:
    seed = await subject.long_seed(200)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(subject.generate(seed=seed, max_tokens=200))
        await subject.until_sampling()
        task.cancel()
    load = subject.engine.load()
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
    assert (await subject.generate()).tokens


async def test_nothing_is_sampled_while_paused(subject: Subject) -> None:
    seed = await subject.long_seed(200)
    undisturbed = await subject.generate(seed=seed, max_tokens=200)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(subject.generate(seed=seed, max_tokens=200))
        await subject.until_sampling()
        await subject.engine.pause()
        before = subject.engine.load()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(task)
        assert subject.engine.load().decode_tokens == before.decode_tokens
        assert before.running == 1
        await subject.engine.resume()
    assert task.result().tokens == undisturbed.tokens


async def test_it_stays_paused_over_a_swap(subject: Subject) -> None:
    await subject.engine.pause()
    version = await subject.apply()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(subject.generate())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(task)
        await subject.engine.resume()
    assert set(task.result().versions) == {version}


async def test_a_swap_in_mid_generation_shows_in_the_versions(subject: Subject) -> None:
    old, generations = await swap_in_mid_generation(subject)
    for generation in generations:
        switch = generation.versions.count(old)
        rest = len(generation.versions) - switch
        assert generation.versions == [old] * switch + [subject.engine.version] * rest


async def test_each_token_has_the_logprob_of_its_version(model_subject: Subject) -> None:
    _, generations = await swap_in_mid_generation(model_subject)
    context = model_subject.request().context
    for generation in generations:
        expected = {
            version: model_subject.reference_logprobs(version, context, generation.tokens)
            for version in set(generation.versions)
        }
        for index, version in enumerate(generation.versions):
            assert generation.logprobs[index] == pytest.approx(
                expected[version][index], abs=TOLERANCE
            ), f"token {index} was not computed by version {version}"


async def swap_in_mid_generation(subject: Subject) -> tuple[int, list[Generation]]:
    """Generations of which at least one holds tokens of two versions."""
    for _ in range(5):
        old = subject.engine.version
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(many(subject, 6, max_tokens=200))
            await subject.until_sampling()
            await subject.apply()
        if any(len(set(generation.versions)) == 2 for generation in task.result()):
            return old, task.result()
    raise AssertionError("no swap came in mid-generation")


async def test_a_corrupt_segment_is_refused_and_the_old_version_stays(subject: Subject) -> None:
    version, before = subject.engine.version, await subject.generate()
    manifest = subject.write_version()
    flip_a_bit(Path(manifest.segment))
    with pytest.raises(ShardCorrupt):
        await subject.engine.apply_weights(manifest)
    assert subject.engine.version == version
    assert await again(subject) == (before.tokens, version)


async def test_a_missing_segment_is_a_version_gone(subject: Subject) -> None:
    version, before = subject.engine.version, await subject.generate()
    manifest = subject.write_version()
    remove(manifest.segment)
    with pytest.raises(VersionGone):
        await subject.engine.apply_weights(manifest)
    assert await again(subject) == (before.tokens, version)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def remove(path: str) -> None:
    Path(path).unlink()


async def again(subject: Subject) -> tuple[list[int], int]:
    generation = await subject.generate()
    return generation.tokens, generation.versions[0]


async def test_more_requests_than_slots_all_finish(subject: Subject) -> None:
    generations = await many(subject, 40, max_tokens=8)
    assert all(generation.tokens for generation in generations)


async def test_the_load_returns_to_zero(subject: Subject) -> None:
    before = subject.engine.load()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(many(subject, 6))
        await subject.until(lambda: subject.engine.load().kv_tokens_used >= 6 * 20)
    after = subject.engine.load()
    assert (after.running, after.waiting, after.kv_tokens_used) == (0, 0, 0)
    assert after.kv_tokens_free == before.kv_tokens_free
    sampled = sum(len(generation.tokens) for generation in task.result())
    assert after.decode_tokens == before.decode_tokens + sampled
    assert after.busy_s > before.busy_s


async def test_prefixes_of_an_older_version_are_not_reused(subject: Subject) -> None:
    context = [40 + i % 50 for i in range(200)]
    await subject.generate(context=context)
    version = await subject.apply()
    fresh = await subject.generate(context=context)
    warm = await subject.generate(context=context)
    assert fresh.tokens == warm.tokens
    if isinstance(subject.engine, FakeEngine):
        assert subject.engine.prefix_hits[version] == 1
    else:
        for generation in (fresh, warm):
            expected = subject.reference_logprobs(version, context, generation.tokens)
            assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_score_tells_what_generate_reported(subject: Subject) -> None:
    generation = await subject.generate(temperature=1.0)
    context = list(subject.request().context)
    scores = await subject.engine.score([*context, *generation.tokens])
    assert len(scores) == len(context) + len(generation.tokens) - 1
    assert scores[len(context) - 1 :] == pytest.approx(generation.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0, 1.3])
async def test_logprobs_are_those_of_transformers(
    model_subject: Subject, temperature: float
) -> None:
    context = model_subject.request().context
    for _ in range(2):
        for generation in await many(model_subject, 4, temperature=temperature):
            expected = model_subject.reference_logprobs(
                model_subject.engine.version, context, generation.tokens, temperature or 1.0
            )
            assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)
        await model_subject.apply()


async def test_a_cache_is_given_and_taken_or_both_are_refused(subject: Subject) -> None:
    generation = await subject.generate(temperature=0.0)
    context = [*subject.request().context, *generation.tokens]
    state = await subject.engine.export_kv(context)
    assert (state is None) == (subject.kind == "vllm")
    if state is not None:
        assert list(state.context) == context[: len(state.context)]
        assert len(state.context) >= len(context) - 1
        assert await subject.engine.import_kv(state)
    assert not await subject.engine.import_kv(KvState(context, subject.engine.version, b"x"))
    assert (await subject.generate(temperature=0.0)).tokens == generation.tokens


async def test_a_sleeping_engine_has_no_version_and_takes_none(subject: Subject) -> None:
    await subject.engine.sleep()
    await subject.engine.sleep()
    assert subject.engine.version == NO_VERSION
    with pytest.raises(EngineError, match="no policy version"):
        await subject.generate()
    with pytest.raises(EngineError, match="asleep"):
        await subject.apply()
    await subject.engine.wake()
    await subject.engine.wake()
    with pytest.raises(EngineError, match="no policy version"):
        await subject.generate()
    version = await subject.apply()
    assert set((await subject.generate()).versions) == {version}


async def test_an_engine_decodes_after_a_sleep_as_before(model_subject: Subject) -> None:
    manifest = model_subject.write_version()
    await model_subject.engine.apply_weights(manifest)
    before = await model_subject.generate()
    await model_subject.engine.sleep()
    await model_subject.engine.wake()
    await model_subject.engine.apply_weights(manifest)
    after = await model_subject.generate()
    assert after.tokens == before.tokens
    assert after.logprobs == pytest.approx(before.logprobs, abs=TOLERANCE)
    assert after.versions == before.versions


async def test_closing_twice_is_fine(tmp_path: Path) -> None:
    closed = Subject("torch", tmp_path)
    await closed.start()
    await closed.engine.aclose()
    await closed.engine.aclose()
