"""Engines against transformers where the contract tests do not reach: untied embeddings, KV
caches that move, and an engine core that dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from common.errors import EngineError
from common.weights import version_id
from tests.support.engines import Subject, build
from tests.support.models import write_segment

TOLERANCE = 1e-3
TEMPERATURES = (0.5, 1.0, 1.3)


@pytest_asyncio.fixture
async def torch_subject(tmp_path: Path) -> AsyncIterator[Subject]:
    subject = Subject("torch", tmp_path, tied=False)
    await subject.start()
    yield subject
    await subject.engine.aclose()


async def agrees_with_transformers(subject: Subject) -> None:
    context = subject.request().context
    for temperature in TEMPERATURES:
        for seed in range(4):
            generation = await subject.generate(temperature=temperature, seed=seed)
            expected = subject.reference_logprobs(
                subject.engine.version, context, generation.tokens, temperature
            )
            assert generation.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_torch_agrees_with_transformers_untied_after_updates(torch_subject: Subject) -> None:
    for _ in range(3):
        await agrees_with_transformers(torch_subject)
        await torch_subject.apply()


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
async def test_vllm_agrees_with_transformers_untied_and_its_death_is_an_error(
    tmp_path: Path,
) -> None:
    """Two claims in one test, since a start costs half a minute."""
    subject = Subject("vllm", tmp_path, tied=False)
    try:
        await subject.start()
        for _ in range(3):
            await agrees_with_transformers(subject)
            await subject.apply()
        seed = await subject.long_seed(200)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(failure(subject, seed))
            await subject.until_sampling()
            core = next(pid for pid in children(os.getpid()) if "EngineCore" in title(pid))
            below = children(core)
            os.kill(core, signal.SIGKILL)
        assert "died" in str(task.result())
        await subject.until(lambda: not any(map(alive, [core, *below])))
        with pytest.raises(EngineError, match="died"):
            await subject.generate()
    finally:
        await subject.engine.aclose()


async def failure(subject: Subject, seed: int) -> EngineError:
    with pytest.raises(EngineError) as raised:
        await subject.generate(seed=seed, max_tokens=200)
    return raised.value


def children(pid: int) -> list[int]:
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def title(pid: int) -> str:
    """What vLLM calls the process."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def alive(pid: int) -> bool:
    """A zombie is dead: only its exit status is left."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_a_kv_cache_moves_to_another_torch_engine(
    torch_subject: Subject, tmp_path: Path
) -> None:
    other = build("torch", torch_subject.path)
    manifest = write_segment(tmp_path / "shared", torch_subject.base, version_id(0, 99))
    await other.start()
    try:
        await other.apply_weights(manifest)
        await torch_subject.engine.apply_weights(manifest)
        generation = await torch_subject.generate(temperature=0)
        context = [*torch_subject.request().context, *generation.tokens]
        state = await torch_subject.engine.export_kv(context)
        assert state is not None
        assert len(state.context) == len(context) - 1
        await other.generate(torch_subject.request(context=[3, 4, 5]))
        assert await other.import_kv(state)
        exported = await other.export_kv(context)
        assert exported is not None
        assert exported.payload == state.payload
        here, there = (
            await torch_subject.generate(context=context),
            await other.generate(torch_subject.request(context=context)),
        )
        assert there.tokens == here.tokens
        assert there.logprobs == pytest.approx(here.logprobs, abs=TOLERANCE)
    finally:
        await other.aclose()


async def test_a_kv_cache_of_another_version_is_not_taken(torch_subject: Subject) -> None:
    await torch_subject.generate()
    state = await torch_subject.engine.export_kv(torch_subject.request().context)
    assert state is not None
    await torch_subject.apply()
    assert not await torch_subject.engine.import_kv(state)
    assert await torch_subject.engine.export_kv(torch_subject.request().context) is None


async def test_a_version_of_another_model_is_refused_whole(torch_subject: Subject) -> None:
    before = await torch_subject.generate()
    name = "model.norm.weight"
    for state in (
        {n: t for n, t in torch_subject.base.items() if n != name},
        torch_subject.base | {name: torch_subject.base[name][:8]},
        torch_subject.base | {"surprise": torch_subject.base[name]},
    ):
        manifest = write_segment(torch_subject.folder / "other", state, version_id(0, 99))
        with pytest.raises(EngineError):
            await torch_subject.engine.apply_weights(manifest)
    after = await torch_subject.generate()
    assert (after.tokens, after.versions) == (before.tokens, before.versions)
