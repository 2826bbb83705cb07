"""What an engine that can move KV caches must do, on two engines with equal weights."""

import itertools
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from common.config import BucketConfig, Config, ModelConfig
from common.messages.coordinator import Manifest
from services.rollout.engine import GenerateRequest, Generation, KvState
from services.rollout.fake_engine import FakeEngine
from services.rollout.torch_engine import TorchEngine
from tests.support.models import make_tiny_model, random_state, write_segment
from tests.support.rollout import rollout_config

CONTEXT = tuple(range(40, 100))
OBSERVATION = tuple(range(100, 120))
TOLERANCE = 1e-5
SLOTS = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Engines:
    """Two of a kind, with empty caches at the start of each test."""

    source: Any
    target: Any
    versions: dict[int, Manifest]
    names: "itertools.count[int]" = field(default_factory=itertools.count)

    async def apply(self, version: int) -> None:
        for engine in (self.source, self.target):
            await engine.apply_weights(self.versions[version])

    async def generate(self, engine: Any, context: Sequence[int], **changes: Any) -> Generation:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "seed": 3}
        name = f"request-{next(self.names)}"
        return await engine.generate(GenerateRequest(name, tuple(context), **(options | changes)))

    async def move(self, context: Sequence[int]) -> KvState:
        state = await self.source.export_kv(context)
        assert state is not None
        assert len(context) - 1 <= len(state.context) <= len(context)
        assert await self.target.import_kv(state)
        return state


@pytest_asyncio.fixture(params=["fake", "float32", "bfloat16"])
async def engines(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engines]:
    made = build(request.param, tmp_path)
    try:
        for engine in (made.source, made.target):
            await engine.start()
        await made.apply(1)
        yield made
    finally:
        for engine in (made.source, made.target):
            await engine.aclose()


def build(kind: str, folder: Path) -> Engines:
    dtype = "float32" if kind == "fake" else kind
    path = make_tiny_model(folder / "model", tied=False, context_tokens=512)
    base = load_file(path / "model.safetensors")
    versions = {
        version: write_segment(
            folder / f"segment-{version}",
            {name: t.to(DTYPES[dtype]) for name, t in random_state(base, seed=version).items()},
            version,
        )
        for version in (1, 2)
    }
    if kind == "fake":
        return Engines(FakeEngine(slots=SLOTS), FakeEngine(slots=SLOTS), versions)
    config = engine_config(path, dtype)
    bucket = BucketConfig(name="short", slots=SLOTS)
    return Engines(TorchEngine(config, bucket, []), TorchEngine(config, bucket, []), versions)


def engine_config(path: Path, dtype: str) -> Config:
    shape = {"path": str(path), "dtype": dtype, "context_tokens": 512}
    return rollout_config().model_copy(update={"model": ModelConfig.model_validate(shape)})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_moved_context_goes_on_as_if_it_had_stayed(
    engines: Engines, temperature: float
) -> None:
    first = await engines.generate(engines.source, CONTEXT, temperature=temperature)
    seen = (*CONTEXT, *first.tokens)
    await engines.move(seen)
    context = (*seen, *OBSERVATION)
    before = engines.source.prefill_tokens, engines.target.prefill_tokens
    stayed = await engines.generate(engines.source, context, temperature=temperature)
    moved = await engines.generate(engines.target, context, temperature=temperature)
    assert moved.tokens == stayed.tokens
    assert moved.versions == stayed.versions
    assert moved.logprobs == pytest.approx(stayed.logprobs, abs=TOLERANCE)
    computed = engines.source.prefill_tokens - before[0], engines.target.prefill_tokens - before[1]
    assert computed == (len(OBSERVATION), len(OBSERVATION))


async def test_a_context_that_was_never_computed_or_was_lost_is_not_exported(
    engines: Engines,
) -> None:
    assert await engines.source.export_kv(CONTEXT) is None
    await engines.generate(engines.source, CONTEXT)
    assert await engines.source.export_kv((*CONTEXT, 50, 50)) is None
    assert await engines.source.export_kv(CONTEXT) is not None
    await engines.apply(2)
    assert await engines.source.export_kv(CONTEXT) is None


async def test_another_version_is_not_taken(engines: Engines) -> None:
    await engines.generate(engines.source, CONTEXT)
    state = await engines.source.export_kv(CONTEXT)
    assert state
    await engines.target.apply_weights(engines.versions[2])
    assert not await engines.target.import_kv(state)


async def test_a_swap_after_the_move_computes_again(engines: Engines) -> None:
    await engines.generate(engines.source, CONTEXT)
    await engines.move(CONTEXT)
    await engines.apply(2)
    fresh = await engines.generate(engines.source, CONTEXT)
    moved = await engines.generate(engines.target, CONTEXT)
    assert moved.tokens == fresh.tokens
    assert set(moved.versions) == {2}
    assert moved.logprobs == pytest.approx(fresh.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("payload", [b"", b"garbage", bytes(4096)])
async def test_bytes_that_are_no_cache_are_not_taken(engines: Engines, payload: bytes) -> None:
    assert not await engines.target.import_kv(KvState(CONTEXT, 1, payload))
    assert (await engines.generate(engines.target, CONTEXT)).tokens


async def test_a_cache_of_another_length_is_not_taken(engines: Engines) -> None:
    if isinstance(engines.source, FakeEngine):
        pytest.skip("a fake cache has no length")
    await engines.generate(engines.source, CONTEXT)
    state = await engines.source.export_kv(CONTEXT)
    assert state
    for context in ((), CONTEXT[:-5], (*CONTEXT, 50), (*state.context[:-1], 1 << 20)):
        assert not await engines.target.import_kv(KvState(context, 1, state.payload))


async def test_a_full_engine_takes_a_cache_while_it_decodes(engines: Engines) -> None:
    await engines.generate(engines.source, CONTEXT)
    async with TaskGroup() as tasks:
        for number in range(SLOTS):
            context = [50 + number] * 30
            tasks.create_task(engines.generate(engines.target, context, max_tokens=100))
        await engines.move(CONTEXT)
    before = engines.target.prefill_tokens
    await engines.generate(engines.target, (*CONTEXT, 50))
    assert engines.target.prefill_tokens - before <= 1


async def test_contexts_are_kept_while_others_come_and_go(engines: Engines) -> None:
    """As many as there are slots, each as long as its trajectory waits for a tool."""
    contexts = [tuple(range(30 + n, 90 + n)) for n in range(SLOTS)]
    for turn in range(3):
        before = engines.source.prefill_tokens
        for index, context in enumerate(contexts):
            sampled = await engines.generate(engines.source, context, max_tokens=5)
            contexts[index] = (*context, *sampled.tokens, *OBSERVATION)
        computed = engines.source.prefill_tokens - before
        if turn:
            assert computed == SLOTS * len(OBSERVATION)


async def test_a_sibling_with_the_same_prompt_does_not_take_a_kept_context(
    engines: Engines,
) -> None:
    first = await engines.generate(engines.source, CONTEXT)
    seen = (*CONTEXT, *first.tokens)
    await engines.generate(engines.source, (*CONTEXT[:40], *range(150, 170)))
    before = engines.source.prefill_tokens
    await engines.generate(engines.source, (*seen, *OBSERVATION))
    assert engines.source.prefill_tokens - before == len(OBSERVATION)
