"""`libra bench replicas`: does help change what is learned?

Two learners take the same steps with the same batches in float32. One is helped by replica
processes that join, leave, are stopped in the middle of a step and go on after it, or are killed
while they compute, all by a seeded schedule; the other is alone. Their weights must stay equal, and
so must the gradient of each single step, computed from the same weights.
"""

# torch is partially annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import asyncio
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.config import Config
from common.identity import new_identity
from common.mesh import Mesh
from common.messages.coordinator import Manifest
from common.service import publish_coordinator
from common.transport.zmq import ZmqTransport
from common.weights import version_id
from services.cli.bench import BenchReport, Check, at_least, at_most
from services.cli.bench_onpolicy import CONTEXT_TOKENS, memory_folder, random_model
from services.cli.bench_replicas_stage import RUN, Stage
from services.coordinator.manifest import build_manifest
from services.trainer.batch import TrainingSequence
from services.trainer.crew import Crew
from services.trainer.model import load_policy, weights_to_publish
from services.trainer.ranks import Ranks
from services.trainer.step import Learner

T = TypeVar("T")
WEIGHTS_LIMIT = 1e-5
"""Relative, after all steps."""
GRADIENT_LIMIT = 1e-6
"""Relative, of each step."""
SEQUENCES = 64
PROMPT_TOKENS, ACTION_TOKENS_MIN, ACTION_TOKENS_MAX = 24, 8, 64
MICRO_BATCH_TOKENS = 256
LEARNING_RATE = 1e-5
DEATHS_MAX = 2
"""A new process takes seconds to start."""
FULL_STEPS = 3
"""At the start, in which nobody is disturbed: enough to measure everybody's rate."""


@dataclass
class Seen:
    """What happened and how far apart the two learners are."""

    deeds: Counter[str] = field(default_factory=Counter[str])
    micro_batches: Counter[str] = field(default_factory=Counter[str])
    gradient_errors: list[float] = field(default_factory=list[float])
    weights_error: float = 0.0
    change_error: float = 0.0
    """Of what the steps have changed in the weights: the stricter view."""
    step_s: list[float] = field(default_factory=list[float])
    wait_s: float = 0.0


def bench_replicas(*, steps: int, replicas: int, ranks: int, seed: int) -> BenchReport:
    """Take `steps` steps with up to `replicas` replicas.

    Raises:
        RunFailed: a replica did not start.
    """
    logs = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    with tempfile.TemporaryDirectory(prefix="libra-bench-", dir=memory_folder()) as name:
        config = make_config(Path(name), ranks)
        try:
            seen = asyncio.run(_run(config, Path(name), steps, replicas, seed))
        finally:
            structlog.configure(**logs)
    done = seen.micro_batches
    figures: dict[str, Any] = {
        "steps": steps,
        "ranks": ranks,
        "seed": seed,
        "deeds": dict(seen.deeds),
        "micro_batches": dict(done),
        "replicas_share": done["replicas"] / max(1, done["replicas"] + done["own"]),
        "error_of_the_change": seen.change_error,
        "step_s": float(np.median(seen.step_s)),
        "wait_s": seen.wait_s,
    }
    checks: list[Check] = [
        at_most("weights", seen.weights_error, "relative", WEIGHTS_LIMIT),
        at_least("by replicas", done["replicas"], "micro-batches", 1),
    ]
    if seen.gradient_errors:
        worst = max(seen.gradient_errors)
        checks.append(at_most("gradient of a step", worst, "relative", GRADIENT_LIMIT))
    return BenchReport("replicas", figures, checks)


def make_config(folder: Path, ranks: int) -> Config:
    """A tiny random model, and steps of many micro-batches."""
    torch.set_num_threads(1)
    model = random_model(folder / "model", tied=True)
    (folder / "tasks.jsonl").touch()
    return Config.model_validate(
        {
            "run": {"name": RUN, "directory": str(folder), "max_steps": 1_000_000},
            "model": {"path": str(model), "context_tokens": CONTEXT_TOKENS},
            "tasks": {"path": str(folder / "tasks.jsonl")},
            "buckets": [{"name": "none", "engine": "torch"}],
            "training": {
                "ranks": ranks,
                "micro_batch_tokens": MICRO_BATCH_TOKENS,
                "learning_rate": LEARNING_RATE,
            },
            "tools": [{"name": "none", "target": "none"}],
        }
    )


def random_batch(seed: int) -> list[TrainingSequence]:
    """Sequences of different lengths, as if an older policy had sampled them."""
    rng = np.random.default_rng(seed)

    def sequence() -> TrainingSequence:
        count = int(rng.integers(ACTION_TOKENS_MIN, ACTION_TOKENS_MAX))
        return TrainingSequence(
            tokens=rng.integers(1, 250, PROMPT_TOKENS + count, dtype=np.int32),
            actions=np.arange(PROMPT_TOKENS, PROMPT_TOKENS + count, dtype=np.int32),
            behaviour=rng.normal(-5.5, 0.3, count).astype(np.float32),
            versions=np.zeros(count, np.int32),
            advantage=float(rng.normal()),
            prompt=PROMPT_TOKENS,
        )

    return [sequence() for _ in range(SEQUENCES)]


async def _run(config: Config, folder: Path, steps: int, replicas: int, seed: int) -> Seen:
    identity = str(new_identity(RUN, "coordinator", "coordinator"))
    with (
        ThreadPoolExecutor(1, "train") as thread,
        ThreadPoolExecutor(1, "gradients") as helper,
    ):
        async with Mesh(ZmqTransport(identity, "tcp://127.0.0.1:0")) as mesh:
            publish_coordinator(folder, mesh.address, RUN)
            stage = Stage(config, folder, mesh)
            crew = Crew(config.training.ranks, helper)
            crew.serve_on(mesh)
            try:
                for number in range(replicas):
                    stage.start(f"r{number}")
                play = Play(config, folder, stage, crew, thread, random.Random(seed))
                return await play.perform(steps)
            finally:
                stage.stop()


class Play:
    """The steps, and what befalls the replicas in them."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        stage: Stage,
        crew: Crew,
        thread: ThreadPoolExecutor,
        rng: random.Random,
    ) -> None:
        self._config, self._folder = config, folder
        self._stage, self._crew, self._thread, self._rng = stage, crew, thread, rng
        self._seen = Seen()

    async def perform(self, steps: int) -> Seen:
        """Take all steps."""
        model, stage, seen = Path(self._config.model.path), self._stage, self._seen
        single = self._config.model_copy(
            update={"training": self._config.training.model_copy(update={"ranks": 1})}
        )
        core = await self._in_thread(lambda: Ranks(self._config, model, resume=False))
        try:
            alone = await self._in_thread(lambda: Ranks(single, model, resume=False))
            probe = await self._in_thread(lambda: Learner(load_policy(model), single))
            self._crew.prepare(core.learner.layout)
            for slot in list(stage.replicas):
                await stage.until_ready(slot)
            for step in range(1, steps + 1):
                batch = random_batch(step)
                await self._step(core, probe, batch, step)
                await self._in_thread(lambda: alone.train(batch, step))  # noqa: B023
            weights, expected = await self._in_thread(core.weights), alone.weights()
            seen.weights_error = max(relative(weights[name], expected[name]) for name in expected)
            start = weights_to_publish(probe.policy.model, load_policy(model).model.state_dict())
            seen.change_error = max(
                relative(weights[name] - start[name], expected[name] - start[name])
                for name in expected
            )
        finally:
            await self._in_thread(core.close)
        return seen

    async def _step(
        self, core: Ranks, probe: Learner, batch: Sequence[TrainingSequence], step: int
    ) -> None:
        weights = await self._in_thread(lambda: _copies(core.weights()))
        version = version_id(1, step - 1)
        await self._before(self._publish(weights, version), step)
        gradients: list[Tensor] = []
        single = self._config.training.ranks == 1

        def keep() -> None:
            if single:
                gradients.append(gradient(core.learner))

        self._crew.expect(step, version)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._befall(step), name="befall")
            result = await self._in_thread(
                lambda: core.train(batch, step, before_update=keep, sharing=self._crew)
            )
            assert not result.skipped, result.skipped
            self._seen.step_s.append(loop.time() - began_s)
        self._note()
        for slot, process in self._stage.replicas.items():
            if process.stalled:
                self._stage.go_on(slot)
        if single:
            await self._in_thread(lambda: _take_weights(probe, weights))
            expected: list[Tensor] = []
            await self._in_thread(
                lambda: probe.train(
                    batch, step, before_update=lambda: expected.append(gradient(probe))
                )
            )
            self._seen.gradient_errors.append(relative(gradients[0], expected[0]))

    def _note(self) -> None:
        tally = self._crew.tally
        self._seen.micro_batches.update(
            {"own": tally.own, "replicas": tally.replicas, "again": tally.again}
        )
        self._seen.wait_s += self._crew.wait_s

    def _publish(self, weights: dict[str, Tensor], version: int) -> Manifest:
        """A file of its own for each version: nobody asks whether an old one is in use."""
        path = self._folder / f"version-{version}"
        save_file(weights, path)
        for old in self._folder.glob("version-*"):
            if old != path:
                old.unlink()
        return build_manifest(version, str(path))

    async def _before(self, manifest: Manifest, step: int) -> None:
        """Let some join, and bring the weights to all."""
        for slot, process in self._stage.replicas.items():
            if not process.awake and self._stage.ready(slot):
                if step > FULL_STEPS and self._rng.random() < 0.3:  # It joins later.
                    continue
                await self._stage.take(slot)
                self._seen.deeds["joined"] += 1
        for slot, process in self._stage.replicas.items():
            if process.awake:
                await self._stage.apply(slot, manifest)

    async def _befall(self, step: int) -> None:
        """Disturb one replica at some moment of the step."""
        awake = sorted(slot for slot, p in self._stage.replicas.items() if p.awake)
        if step <= FULL_STEPS or not awake:
            return
        slot = self._rng.choice(awake)
        deed = self._rng.choice(["leave", "stall", "die", "nothing"])
        if deed == "die" and self._seen.deeds["die"] >= DEATHS_MAX:
            deed = "stall"
        await asyncio.sleep(self._rng.random() * float(np.median(self._seen.step_s)))
        self._seen.deeds[deed] += 1
        match deed:
            case "leave":
                await self._stage.yield_slot(slot)
            case "stall":
                self._stage.stall(slot)
            case "die":
                peer = self._stage.kill(slot)
                if self._rng.random() < 0.5:  # Else nobody tells the core.
                    self._crew.lost(peer)
                self._stage.start(slot)
            case _:
                pass

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def gradient(learner: Learner) -> Tensor:
    """The gradient as it is, as one array."""
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, as a share of the norm of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def _copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


@torch.no_grad()
def _take_weights(learner: Learner, weights: dict[str, Tensor]) -> None:
    state: dict[str, Tensor] = learner.policy.model.state_dict()
    for name, tensor in weights.items():
        state[name].copy_(tensor)
