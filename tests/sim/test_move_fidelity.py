"""A trajectory is the same whether it moved or not: real workers and torch engines, real time."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.config import BucketConfig, Config, ModelConfig
from common.messages.coordinator import Manifest
from common.messages.scheduler import TurnFinished
from common.trajectory import token_count, unpack_tokens
from services.rollout.parsers import PARSERS
from services.rollout.tokenizer import HuggingFaceTokenizer
from services.rollout.torch_engine import TorchEngine
from tests.support.jobs import CHAT_TEMPLATE
from tests.support.models import char_tokenizer, make_tiny_model, random_state, write_segment
from tests.support.moving import AlwaysCalls, Workers, moving_config

TURNS = 4
VERSION = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOVED_EXACTLY = 1e-5
COMPUTED_AGAIN = 1e-4
BOUNDARIES = range(TURNS - 1)
"""Turns after which the trajectory can move."""


@dataclass(frozen=True)
class Played:
    """One trajectory, and what its engines computed for it."""

    turns: list[TurnFinished]
    prefill_tokens: list[int]

    @property
    def structure(self) -> list[tuple[bytes, bytes, bytes, bytes]]:
        """Tokens, in their roles, and who sampled them."""
        return [
            (t.prompt_tokens, t.action_tokens, t.observation_tokens, t.action_versions)
            for t in self.turns
        ]

    @property
    def logprobs(self) -> torch.Tensor:
        """Of all sampled tokens."""
        return torch.frombuffer(
            bytearray(b"".join(turn.action_logprobs for turn in self.turns)), dtype=torch.float32
        )

    @property
    def moves(self) -> list[tuple[int, str, str]]:
        """Turn, path and reason."""
        return [(t.turn, t.move.path, t.move.reason) for t in self.turns if t.move]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, tied=True, context_tokens=1024)


@pytest.fixture(autouse=True)
def _any_text_calls_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, "tags", AlwaysCalls())


def engine_config(model: Path, dtype: str, temperature: float) -> Config:
    config = moving_config(turns_max=TURNS, turn_tokens_max=12)
    sampling = config.sampling.model_copy(update={"temperature": temperature})
    shape = ModelConfig.model_validate({"path": str(model), "dtype": dtype, "context_tokens": 1024})
    return config.model_copy(update={"model": shape, "sampling": sampling})


@dataclass
class Player:
    """Plays one trajectory after the other, each on two engines with empty caches."""

    workers: Workers
    engines: list[TorchEngine]
    manifest: Manifest
    played: int = 0

    async def play(self, *boundaries: int, source: str | None = None) -> Played:
        """Move to the other worker after these turns; `source` replaces whom it asks."""
        self.played += 1
        for engine in self.engines:
            await engine.apply_weights(self.manifest)
        before = [engine.prefill_tokens for engine in self.engines]

        def plan(turn: TurnFinished) -> str | None:
            moves = sum(boundary <= turn.turn for boundary in boundaries)
            return f"short-{moves % 2}" if turn.turn in boundaries else None

        self.workers.scheduler.plan = plan
        self.workers.scheduler.source = lambda peer: peer if source is None else source
        turns = await self.workers.play(f"t{self.played}")
        after = [engine.prefill_tokens for engine in self.engines]
        return Played(turns, [b - a for a, b in zip(before, after, strict=True)])


@contextlib.asynccontextmanager
async def playing(config: Config) -> AsyncGenerator[Player]:
    """Two workers with equal weights."""
    model, dtype = Path(config.model.path), config.model.dtype
    state = random_state(load_file(model / "model.safetensors"), seed=1)
    cast = {name: tensor.to(DTYPES[dtype]) for name, tensor in state.items()}
    manifest = write_segment(model / f"segment-{dtype}", cast, VERSION)
    bucket = BucketConfig(name="short", slots=4)
    engines = [TorchEngine(config, bucket, []) for _ in range(2)]
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = HuggingFaceTokenizer(tokenizer)
    try:
        for engine in engines:
            await engine.start()
            await engine.apply_weights(manifest)
        async with Workers(list(engines), config=config, tokenizer=chat).running() as workers:
            yield Player(workers, engines, manifest)
    finally:
        for engine in engines:
            await engine.aclose()


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.0), ("bfloat16", 1.0)])
async def test_a_move_with_the_cache_changes_nothing_at_any_turn(
    model: Path, dtype: str, temperature: float
) -> None:
    async with playing(engine_config(model, dtype, temperature)) as player:
        stayed = await player.play()
        assert stayed.moves == []
        assert len(stayed.turns) == TURNS
        for boundaries in [(0,), (1,), (2,), tuple(BOUNDARIES)]:
            moved = await player.play(*boundaries)
            assert moved.moves == [(boundary + 1, "kv", "") for boundary in boundaries]
            assert moved.structure == stayed.structure
            assert torch.allclose(moved.logprobs, stayed.logprobs, atol=MOVED_EXACTLY, rtol=0)
            # Not one token is computed twice: what the target computes, the source does not.
            assert sum(moved.prefill_tokens) == sum(stayed.prefill_tokens)


async def test_a_move_that_computes_again_samples_the_same(model: Path) -> None:
    async with playing(engine_config(model, "float32", 0.0)) as player:
        stayed = await player.play()
        for boundary in BOUNDARIES:
            moved = await player.play(boundary, source="")
            assert moved.moves == [(boundary + 1, "recompute", "no_source")]
            assert moved.structure == stayed.structure
            assert torch.allclose(moved.logprobs, stayed.logprobs, atol=COMPUTED_AGAIN, rtol=0)
            context = sum(map(tokens_of, moved.turns[: boundary + 1]))
            report = moved.turns[boundary + 1].move
            assert report
            assert report.tokens == context
            assert moved.prefill_tokens[1] >= context - 1


async def test_a_turn_goes_on_from_what_the_last_one_left_in_the_engine(model: Path) -> None:
    async with playing(engine_config(model, "float32", 0.0)) as player:
        stayed = await player.play()
    context = token_count(stayed.turns[0].prompt_tokens) - 1
    later = sum(token_count(turn.observation_tokens) for turn in stayed.turns[:-1])
    assert stayed.prefill_tokens == [context + later, 0]
    assert {v for t in stayed.turns for v in unpack_tokens(t.action_versions)} == {VERSION}


def tokens_of(turn: TurnFinished) -> int:
    parts = (turn.prompt_tokens, turn.action_tokens, turn.observation_tokens)
    return sum(map(token_count, parts))
