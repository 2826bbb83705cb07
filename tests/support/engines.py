"""Engines under test, each with a tiny model and versions to apply."""

import asyncio
import itertools
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import (
    BucketConfig,
    Config,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TasksConfig,
    ToolServerConfig,
)
from common.errors import EngineError
from common.messages.coordinator import Manifest
from common.weights import version_id
from services.rollout.engine import Engine, FinishReason, GenerateRequest, Generation
from services.rollout.fake_engine import FakeEngine, characters
from services.rollout.torch_engine import TorchEngine
from services.rollout.vllm_engine import VllmEngine
from tests.support.models import make_tiny_model, random_state, write_segment

CONTEXT_TOKENS = 512
PATIENCE_S = 60.0
LOWERCASE = tuple(string.ascii_lowercase)


class Subject:
    """One started engine; `apply` gives it a new random version each time."""

    def __init__(
        self, kind: str, folder: Path, *, tied: bool = True, cores: Sequence[int] = (0,)
    ) -> None:
        self.kind, self.folder = kind, folder
        self.path = make_tiny_model(folder / "model", tied=tied, context_tokens=CONTEXT_TOKENS)
        self.engine = build(kind, self.path, cores)
        self.refusal: EngineError | None = None
        self.base = load_file(self.path / "model.safetensors")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
        self._references: dict[int, Any] = {}
        self._steps = itertools.count(1)
        self._names = itertools.count()

    async def start(self) -> None:
        """Start, see that the engine refuses to sample yet, and apply a first version."""
        await self.engine.start()
        try:
            await self.engine.generate(self.request())
        except EngineError as refusal:
            self.refusal = refusal
        await self.apply()

    def write_version(self) -> Manifest:
        """A version that is not applied yet."""
        version = version_id(0, next(self._steps))
        state = random_state(self.base, seed=version)
        return write_segment(self.folder / f"segment-{version}", state, version)

    async def apply(self) -> int:
        """Apply a new version."""
        manifest = self.write_version()
        await self.engine.apply_weights(manifest)
        return manifest.version

    def request(self, **changes: Any) -> GenerateRequest:
        """A generation with a fresh id."""
        fields: dict[str, Any] = {
            "request_id": f"request-{next(self._names)}",
            "context": tuple(range(40, 60)),
            "max_tokens": 24,
            "temperature": 1.0,
            "seed": 0,
        }
        return GenerateRequest(**(fields | changes))

    async def generate(self, **changes: Any) -> Generation:
        """Sample once."""
        return await self.engine.generate(self.request(**changes))

    async def long_seed(self, max_tokens: int) -> int:
        """A seed with which the current version samples no end of sequence for so long."""
        for seed in range(50):
            generation = await self.generate(seed=seed, max_tokens=max_tokens)
            if generation.finish_reason is FinishReason.LENGTH:
                return seed
        raise AssertionError("every seed ends early")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Look again and again; engines have no event for what `load` shows."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until_sampling(self) -> None:
        """Until some request got another token."""
        before = self.engine.load().decode_tokens
        await self.until(lambda: self.engine.load().decode_tokens > before)

    def decode(self, tokens: Sequence[int]) -> str:
        """As the engine decodes them."""
        return characters(tokens) if self.kind == "fake" else self.tokenizer.decode(tokens)

    def reference_logprobs(
        self, version: int, context: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Of `tokens` after `context`, by transformers with that version's weights."""
        model = self._reference(version)
        ids = torch.tensor([[*context, *tokens]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(context) - 1 : -1].float()
        logprobs = (logits / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    def reference_greedy(self, version: int, context: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens, one after the other, by transformers."""
        tokens = list(context)
        with torch.inference_mode():
            for _ in range(count):
                logits = self._reference(version)(torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(logits.argmax()))
        return tokens[len(context) :]

    def _reference(self, version: int) -> Any:
        if version not in self._references:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            missing = model.load_state_dict(random_state(self.base, seed=version), strict=False)
            assert set(missing.missing_keys) <= {"lm_head.weight"}
            self._references[version] = model.eval()
        return self._references[version]


def build(kind: str, path: Path, cores: Sequence[int] = (0,)) -> Engine:
    """An engine of the kind. vLLM splits the model over the cores, one rank on each."""
    config = Config(
        run=RunConfig(name="test", max_steps=1),
        model=ModelConfig(path=str(path), context_tokens=CONTEXT_TOKENS),
        tasks=TasksConfig(path="tasks.jsonl"),
        rollout=RolloutConfig(start_timeout_s=240.0),
        buckets=[BucketConfig(name="only")],
        tools=[ToolServerConfig(name="none", target="none")],
    )
    bucket = BucketConfig(name="only", slots=16, kv_tokens=8192, tensor_parallel=len(cores))
    if kind == "fake":
        return FakeEngine(
            token_s=0.001, slots=16, kv_tokens=8192, context_tokens_max=CONTEXT_TOKENS
        )
    if kind == "torch":
        return TorchEngine(config, bucket, [])
    return VllmEngine(config, bucket, cores)
