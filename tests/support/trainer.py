"""Tiny policies, batches and configurations for the trainer's tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from common.config import Config
from common.messages.scheduler import GroupData, TrajectoryData, TurnData
from common.trajectory import FailureKind, StopReason, pack_logprobs, pack_tokens
from services.trainer.batch import TrainingSequence
from services.trainer.model import Policy
from tests.support.models import make_tiny_model


def trainer_config(model: Path | str = "model", **training: Any) -> Config:
    """A configuration whose training section is given; `temperature` goes to the sampling."""
    temperature = training.pop("temperature", 1.0)
    dtype = training.pop("dtype", "float32")
    return Config.model_validate(
        {
            "run": {"name": "job", "max_steps": 10},
            "model": {"path": str(model), "context_tokens": 256, "dtype": dtype},
            "tasks": {"path": "tasks.jsonl"},
            "sampling": {"temperature": temperature},
            "buckets": [{"name": "short"}],
            "training": {"learning_rate": 1e-3, **training},
            "tools": [{"name": "tool", "target": "module"}],
        }
    )


def tiny_policy(directory: Path, *, tied: bool = True) -> Policy:
    """A random Llama (tied) or Qwen2, saved to and loaded from the directory."""
    make_tiny_model(directory, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    return Policy(model.eval())


def sequence(
    seed: int, *, prompt: int = 6, turns: Sequence[tuple[int, int]] = ((4, 3), (5, 0))
) -> TrainingSequence:
    """A random sequence: a prompt, then (action tokens, observation tokens) per turn."""
    rng = np.random.default_rng(seed)
    actions: list[int] = []
    length = prompt
    end = prompt
    for sampled, observed in turns:
        actions += range(length, length + sampled)
        length += sampled + observed
        end = actions[-1] + 1 if actions else prompt
    return TrainingSequence(
        tokens=rng.integers(1, 200, end, dtype=np.int32),
        actions=np.array(actions, np.int32),
        behaviour=rng.normal(-5.0, 0.3, len(actions)).astype(np.float32),
        versions=np.zeros(len(actions), np.int32),
        advantage=float(rng.normal()),
        prompt=prompt,
    )


def sequences(count: int, *, seed: int = 0) -> list[TrainingSequence]:
    """Sequences of different lengths."""
    return [
        sequence(seed * 1000 + n, prompt=4 + n % 5, turns=((2 + n % 4, n % 3), (3, 0)))
        for n in range(count)
    ]


def siblings(count: int, *, prompt: int, seed: int = 0) -> list[TrainingSequence]:
    """Sequences of one group: the same prompt, then turns of different lengths."""
    made = [
        sequence(seed * 1000 + n, prompt=prompt, turns=((2 + n % 4, n % 3), (3, 0)))
        for n in range(count)
    ]
    for item in made[1:]:
        item.tokens[:prompt] = made[0].tokens[:prompt]
    return made


def trajectory(
    name: str,
    reward: float | None,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = (((4, 5), (6,)), ((7, 8, 9), ())),
    logprob: float = -5.0,
) -> TrajectoryData:
    """A journaled trajectory; no reward means that it failed."""
    return TrajectoryData(
        trajectory_id=name,
        prompt_tokens=pack_tokens(prompt),
        turns=[
            TurnData(
                action_tokens=pack_tokens(sampled),
                action_logprobs=pack_logprobs([logprob] * len(sampled)),
                action_versions=pack_tokens([0] * len(sampled)),
                observation_tokens=pack_tokens(observed),
                tool_status=None,
            )
            for sampled, observed in turns
        ],
        stop_reason=None if reward is None else StopReason.ANSWERED,
        reward=reward,
        failure=FailureKind.TOOL if reward is None else None,
    )


def group(name: str, rewards: Sequence[float | None], **kwargs: Any) -> GroupData:
    """A group with one trajectory per reward."""
    return GroupData(
        group_id=name,
        task_id=f"task-{name}",
        trajectories=[trajectory(f"{name}-{n}", r, **kwargs) for n, r in enumerate(rewards)],
    )
