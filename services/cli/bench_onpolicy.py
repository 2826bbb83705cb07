"""Is the policy that sampled the policy that is trained? Engine against trainer, token by token."""

# Partially annotated libraries.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.config import (
    BucketConfig,
    Config,
    ModelConfig,
    RunConfig,
    TasksConfig,
    ToolServerConfig,
)
from common.errors import ConfigError
from common.weights import version_id
from services.cli.bench import BenchReport, Check, at_most
from services.coordinator.manifest import build_manifest
from services.rollout.engine import Engine, GenerateRequest, Generation
from services.rollout.engines import make_engine
from services.trainer.batch import TrainingSequence
from services.trainer.model import Policy, load_policy, micro_batch, weights_to_publish

RATIO_LIMIT = 1e-3
"""Of |ratio - 1|. What float32 leaves is about 1e-5; a forgotten temperature or a stale matrix
is above 0.1."""
TEMPERATURES = (0.5, 1.0, 1.3)
VERSIONS = 3
"""The first and two updates."""
TRAJECTORIES = 16
PROMPT_TOKENS = 48
SAMPLED_TOKENS = 32
CONTEXT_TOKENS = 128
SPEED_BATCHES = (16, 32)
RUN = "bench-onpolicy"
WEIGHT_SCALE = 0.15
"""Of the random weights: large enough that temperature and version change the distribution."""


@dataclass
class Measured:
    """One engine with one model."""

    ratio_error: float = 0.0
    tokens: int = 0
    start_s: float = 0.0
    apply_s: list[float] = field(default_factory=list[float])
    tokens_per_s: dict[str, float] = field(default_factory=dict[str, float])
    by_case: dict[str, float] = field(default_factory=dict[str, float])


def bench_onpolicy(*, engines: list[str]) -> BenchReport:
    """Sample with each engine and score with the trainer's own code, after each update.

    Both in float32, with tied and untied embeddings. Takes about a minute for each start of vLLM.
    """
    if unknown := set(engines) - {"torch", "vllm"}:
        raise ConfigError(f"no engine is called {', '.join(sorted(unknown))}; use torch or vllm")
    figures: dict[str, Any] = {}
    checks: list[Check] = []
    for engine in engines:
        for tied in (True, False):
            name = f"{engine}/{'tied' if tied else 'untied'}"
            with tempfile.TemporaryDirectory(prefix="libra-bench-", dir=memory_folder()) as folder:
                measured = asyncio.run(_measure(engine, Path(folder), tied=tied))
            figures[name] = _figures(measured)
            checks.append(at_most(f"{name}: ratio", measured.ratio_error, "|r-1|", RATIO_LIMIT))
    return BenchReport("onpolicy", figures, checks)


def memory_folder() -> str | None:
    """Where segments live in production, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


async def _measure(kind: str, folder: Path, *, tied: bool) -> Measured:
    path = random_model(folder / "model", tied=tied)
    config = _config(path, kind)
    engine = make_engine(config, config.buckets[0], 0, RUN)
    measured = Measured()
    started_s = time.perf_counter()
    try:
        await engine.start()
        measured.start_s = time.perf_counter() - started_s
        policy = load_policy(path)
        for number in range(VERSIONS):
            await _apply(engine, policy, folder / "segment", number, measured)
            for temperature in TEMPERATURES:
                await _compare(engine, policy, number, temperature, measured)
        for batch in SPEED_BATCHES:
            measured.tokens_per_s[str(batch)] = await _speed(engine, batch)
    finally:
        await engine.aclose()
    return measured


async def _apply(
    engine: Engine, policy: Policy, segment: Path, number: int, measured: Measured
) -> None:
    """Publish what the trainer holds, as the trainer and the coordinator would."""
    if number:
        _perturb(policy.model, seed=number)
    state = weights_to_publish(policy.model, dict(policy.model.state_dict()))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, segment)
    manifest = build_manifest(version_id(0, number), str(segment))
    began_s = time.perf_counter()
    await engine.apply_weights(manifest)
    measured.apply_s.append(time.perf_counter() - began_s)


async def _compare(
    engine: Engine, policy: Policy, number: int, temperature: float, measured: Measured
) -> None:
    requests = list(_requests(f"{number}-{temperature}", TRAJECTORIES, temperature))
    generations = await _generate(engine, requests)
    batch = micro_batch(
        [_sequence(r, g) for r, g in zip(requests, generations, strict=True)], torch.device("cpu")
    )
    with torch.no_grad():
        trained: list[float] = policy(batch, temperature).tolist()
    sampled = [logprob for generation in generations for logprob in generation.logprobs]
    worst = max(ratio_error(a, b) for a, b in zip(trained, sampled, strict=True))
    measured.by_case[f"version {number}, temperature {temperature:g}"] = worst
    measured.ratio_error = max(measured.ratio_error, worst)
    measured.tokens += len(sampled)


def ratio_error(trainer_logprob: float, engine_logprob: float) -> float:
    """How far the importance ratio is from 1."""
    return abs(math.expm1(trainer_logprob - engine_logprob))


async def _speed(engine: Engine, batch: int) -> float:
    began_s = time.perf_counter()
    generations = await _generate(engine, list(_requests(f"speed-{batch}", batch, 1.0)))
    return sum(len(g.tokens) for g in generations) / (time.perf_counter() - began_s)


async def _generate(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(engine.generate(request)) for request in requests]
    return [task.result() for task in started]


def _requests(name: str, count: int, temperature: float) -> Iterator[GenerateRequest]:
    """Contexts of different lengths, so that padding and batching have something to get wrong."""
    rng = np.random.default_rng(0)
    for index in range(count):
        length = PROMPT_TOKENS - index
        yield GenerateRequest(
            request_id=f"{name}-{index}",
            context=rng.integers(1, 257, length).tolist(),
            max_tokens=SAMPLED_TOKENS,
            temperature=temperature,
            seed=index,
        )


def _sequence(request: GenerateRequest, generation: Generation) -> TrainingSequence:
    context = len(request.context)
    tokens = np.array([*request.context, *generation.tokens], np.int32)
    return TrainingSequence(
        tokens=tokens,
        actions=np.arange(context, len(tokens), dtype=np.int32),
        behaviour=np.array(generation.logprobs, np.float32),
        versions=np.array(generation.versions, np.int32),
        advantage=0.0,
        prompt=context,
    )


def random_model(path: Path, *, tied: bool) -> Path:
    """A small Llama with random weights and a byte tokenizer."""
    end = "<|end|>"
    vocabulary = {end: 0, **{c: i + 1 for i, c in enumerate(sorted(ByteLevel.alphabet()))}}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end
    ).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    _perturb(model, seed=0)
    model.save_pretrained(path)
    return path


def _perturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre + WEIGHT_SCALE * noise)


def _config(path: Path, engine: str) -> Config:
    core = min(os.sched_getaffinity(0))  # One: threads that spin against other work are slow.
    fields = {"name": "bench", "engine": engine, "kv_tokens": 8192, "cpus": [[core]]}
    bucket = BucketConfig.model_validate(fields)
    return Config(
        run=RunConfig(name=RUN, max_steps=1),
        model=ModelConfig(path=str(path), context_tokens=CONTEXT_TOKENS),
        tasks=TasksConfig(path="none"),
        buckets=[bucket],
        tools=[ToolServerConfig(name="none", target="none")],
    )


def _figures(measured: Measured) -> dict[str, Any]:
    return {
        "ratio_error_max": measured.ratio_error,
        "tokens": measured.tokens,
        "start_s": measured.start_s,
        "apply_s": min(measured.apply_s),
        "tokens_per_s": measured.tokens_per_s,
        "ratio_error": measured.by_case,
    }
