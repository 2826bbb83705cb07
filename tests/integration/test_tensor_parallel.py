"""One model on one rank, on two, and in transformers: the same tokens, before and after updates.

The two engines serve all tests of the file, in order; the last one kills a rank.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

import services.rollout.vllm_engine
from common.errors import EngineError, VersionGone
from common.messages.coordinator import Manifest
from services.rollout.engine import Generation
from services.rollout.segment import Segment, open_checked
from tests.support.engines import Subject

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
TOLERANCE = 1e-4
CONTEXTS = [tuple(range(40, 60)), tuple(range(3, 40)), (77, 5, 91)]
TOKENS = 24
DEATH_S = 30.0
"""The rank that is left hangs in a collective for five seconds before vLLM kills it."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def subjects(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Subject, Subject]]:
    one = Subject("vllm", tmp_path_factory.mktemp("one"), cores=[0])
    two = Subject("vllm", tmp_path_factory.mktemp("two"), cores=[1, 0])
    try:
        await one.start()  # One by one: an engine takes its settings from this process.
        await two.start()
        yield one, two
    finally:
        await one.engine.aclose()
        await two.engine.aclose()


async def sample(subject: Subject, temperature: float = 0.0) -> list[Generation]:
    """All contexts at once."""
    async with asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(
                subject.generate(context=context, max_tokens=TOKENS, temperature=temperature)
            )
            for context in CONTEXTS
        ]
    return [task.result() for task in started]


async def agree(one: Subject, two: Subject) -> None:
    """Greedy tokens, their log-probabilities, and scores are those of transformers in both."""
    version = two.engine.version
    assert one.engine.version == version
    for context, a, b in zip(CONTEXTS, await sample(one), await sample(two), strict=True):
        assert a.tokens == b.tokens == one.reference_greedy(version, context, len(a.tokens))
        assert set(a.versions) == set(b.versions) == {version}
        expected = pytest.approx(one.reference_logprobs(version, context, a.tokens), abs=TOLERANCE)
        assert a.logprobs == expected
        assert b.logprobs == expected
        text = [*context, *a.tokens]
        for subject in (one, two):
            assert (await subject.engine.score(text))[len(context) - 1 :] == expected
    for context, b in zip(CONTEXTS, await sample(two, temperature=1.0), strict=True):
        assert b.logprobs == pytest.approx(
            two.reference_logprobs(version, context, b.tokens), abs=TOLERANCE
        )


async def test_one_and_two_ranks_agree_with_transformers_before_and_after_updates(
    subjects: tuple[Subject, Subject],
) -> None:
    await agree(*subjects)
    for _ in range(2):
        for subject in subjects:
            await subject.apply()
        await agree(*subjects)


async def test_a_version_that_vanishes_before_the_ranks_map_it_changes_none_of_them(
    subjects: tuple[Subject, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_then_lose(manifest: Manifest) -> Segment:
        segment = open_checked(manifest)
        Path(manifest.segment).unlink()
        return segment

    one, two = subjects
    monkeypatch.setattr(services.rollout.vllm_engine, "open_checked", open_then_lose)
    for subject in subjects:
        with pytest.raises(VersionGone):
            await subject.engine.apply_weights(subject.write_version())
    monkeypatch.undo()
    await agree(one, two)
    for subject in subjects:
        await subject.apply()
    await agree(one, two)


async def test_tokens_of_one_generation_carry_the_version_of_all_ranks(
    subjects: tuple[Subject, Subject],
) -> None:
    _, two = subjects
    before = two.engine.version
    seed = await two.long_seed(300)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(two.generate(seed=seed, max_tokens=300))
        await two.until_sampling()
        after = await two.apply()
    generation = task.result()
    assert sorted(generation.versions) == generation.versions
    assert set(generation.versions) == {before, after}
    context = list(two.request().context)
    start = 0
    for version in (before, after):
        count = generation.versions.count(version)
        tokens = generation.tokens[start : start + count]
        assert generation.logprobs[start : start + count] == pytest.approx(
            two.reference_logprobs(version, context, tokens), abs=TOLERANCE
        )
        context += tokens
        start += count


async def test_the_death_of_one_rank_ends_the_engine_and_all_its_processes(
    subjects: tuple[Subject, Subject],
) -> None:
    _, two = subjects
    seed = await two.long_seed(400)
    processes = ranks(os.getpid())
    async with asyncio.timeout(DEATH_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(failure(two, seed))
        await two.until_sampling()
        os.kill(processes["VLLM::Worker_TP1"], signal.SIGKILL)
    assert "died" in str(task.result())
    await two.until(lambda: not any(map(is_alive, processes.values())))
    with pytest.raises(EngineError, match="died"):
        await two.apply()


async def failure(subject: Subject, seed: int) -> EngineError:
    with pytest.raises(EngineError) as raised:
        await subject.generate(seed=seed, max_tokens=400)
    return raised.value


def ranks(pid: int) -> dict[str, int]:
    """Pids of the worker processes of the engine cores below a process, by their titles."""
    cores = [child for child in children(pid) if "EngineCore" in title(child)]
    return {title(child): child for core in cores for child in children(core)}


def children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")


def is_alive(pid: int) -> bool:
    """A zombie is dead: only its exit status is left."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
