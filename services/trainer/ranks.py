"""All data-parallel ranks as one learner: rank 0 is this process, the others are its children.

A child gets its orders over its standard input, so it can never outlive the pipe, and the kernel
kills it with its parent. Tensors meet in collectives (gloo on CPUs, NCCL on GPUs) that all have
a time-out. With one rank there is no child, no collective and no sharding.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from common.config import Config
from common.errors import RunFailed
from services.trainer.batch import TrainingSequence
from services.trainer.canary import make_canary
from services.trainer.learners import build_learner, build_policy, full_state, optimizer_state
from services.trainer.model import weights_to_publish
from services.trainer.orders import COPIED, FAILED, packed, write
from services.trainer.outlet import Outlet, whole
from services.trainer.publish import COPY_TIMEOUT_S, Publisher, Segment
from services.trainer.rounds import Alone, Relay, Sharing
from services.trainer.step import StepResult, nothing

EXIT_TIMEOUT_S = 10.0
T = TypeVar("T")


class Ranks:
    """The learner as rank 0 sees it. All methods are called from one thread that outlives it."""

    def __init__(self, config: Config, model_path: Path, *, resume: bool) -> None:
        """Load the model, and with `resume` the optimizer's state beside it, on every rank."""
        self.config = config
        self._children: list[subprocess.Popen[bytes]] = []
        self._copied: list[int] = []
        """Of each child, where it writes a byte for each copy that has ended."""
        self._rendezvous: Path | None = None
        world = config.training.ranks
        if world > 1:
            self._rendezvous = Path(tempfile.mkdtemp(prefix="libra-ranks-"))
            self._spawn(world, model_path, resume=resume)
        policy = build_policy(config, model_path, rank=0)
        self._canary = make_canary(policy.model)
        self.learner = build_learner(
            policy, config, model_path, resume=resume, rank=0, rendezvous=self._rendezvous
        )
        self.outlet = Outlet.of(self.model)

    @property
    def model(self) -> Any:
        """The Hugging Face model, for names and configuration only."""
        return self.learner.policy.model

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        step: int,
        *,
        before_update: Callable[[], None] = nothing,
        between: Callable[[], None] = nothing,
        sharing: Sharing | None = None,
    ) -> StepResult:
        """See `Learner.train`. A step of several ranks is never abandoned half-way."""
        if self._children:
            sharing = Relay(sharing or Alone(len(self._children) + 1), self._order)
        self._order({"order": "train", "step": step, "sequences": [packed(s) for s in sequences]})
        return self._guarded(
            lambda: self.learner.train(
                sequences,
                step,
                before_update=before_update,
                between=nothing if self._children else between,
                sharing=sharing,
            )
        )

    def weights(self) -> dict[str, Tensor]:
        """Full weights under their published names. With one rank these are the live ones."""
        self._order({"order": "weights"})
        return self._guarded(lambda: weights_to_publish(self.model, full_state(self.learner)))

    def publish(self, publisher: Publisher, segment: Segment) -> "Future[list[float]]":
        """Start to copy the weights, on every rank.

        The future is done when the segment is complete. It gives the version's canary, empty
        where that could not be computed, and raises `RunFailed` when a rank could not copy.
        """
        if self.outlet.names is None:
            return self._publish_gathered(publisher, segment)
        self._order({"order": "publish", "segment": str(segment.path)})
        shards = self.outlet.shards(self.model, 0, self.config.training.ranks)
        copied = publisher.start(segment, shards)

        def complete() -> list[float]:
            copied.result(COPY_TIMEOUT_S)
            self._await_copies()
            if self._canary is None:
                return []
            return self._canary.logprobs(self.outlet.by_own_names(segment.views))

        return publisher.then(complete)

    def _publish_gathered(self, publisher: Publisher, segment: Segment) -> "Future[list[float]]":
        """For architectures whose published tensors are made of several ranks' rows."""
        copied = publisher.start(segment, whole(self.weights()))

        def complete() -> list[float]:
            copied.result(COPY_TIMEOUT_S)
            return []

        return publisher.then(complete)

    def _await_copies(self) -> None:
        """Wait for the children's copies, in the copy thread."""
        deadline = time.monotonic() + COPY_TIMEOUT_S
        for rank, pipe in enumerate(self._copied, start=1):
            remaining_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([pipe], [], [], remaining_s)
            if not ready:
                raise RunFailed(f"trainer rank {rank} did not copy its weights in time")
            word = os.read(pipe, 1)
            if word == FAILED:
                raise RunFailed(f"trainer rank {rank} could not copy its weights")
            if word != COPIED:
                raise RunFailed(self._obituary())

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's full state by parameter name."""
        self._order({"order": "optimizer"})
        return self._guarded(lambda: optimizer_state(self.learner))

    def close(self) -> None:
        """End the children. Idempotent."""
        children, self._children = self._children, []
        for child in children:
            with contextlib.suppress(BrokenPipeError):  # An order that it never read.
                _pipe(child).close()
        for child in children:
            try:
                child.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(EXIT_TIMEOUT_S)
        if self._rendezvous is not None:
            if dist.is_initialized():
                dist.destroy_process_group()
            shutil.rmtree(self._rendezvous, ignore_errors=True)
        while self._copied:
            os.close(self._copied.pop())

    def _spawn(self, world: int, model_path: Path, *, resume: bool) -> None:
        command = [sys.executable, "-m", "services.trainer.follower", str(os.getpid())]
        for _ in range(1, world):
            reading, writing = os.pipe()
            self._copied.append(reading)
            child = subprocess.Popen(  # noqa: S603  (our own module)
                [*command, str(writing)], stdin=subprocess.PIPE, pass_fds=(writing,)
            )
            os.close(writing)
            self._children.append(child)
        for rank, child in enumerate(self._children, start=1):
            setup = {
                "config": self.config.model_dump_json(),
                "model_path": str(model_path),
                "resume": resume,
                "rank": rank,
                "rendezvous": str(self._rendezvous),
            }
            write(_pipe(child), setup)

    def _order(self, order: Mapping[str, Any]) -> None:
        try:
            for child in self._children:
                write(_pipe(child), order)
        except BrokenPipeError as error:
            raise RunFailed(self._obituary()) from error

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except RuntimeError as error:
            if any(child.poll() is not None for child in self._children):
                raise RunFailed(self._obituary()) from error
            raise

    def _obituary(self) -> str:
        codes = {rank: child.poll() for rank, child in enumerate(self._children, start=1)}
        dead = ", ".join(
            f"{rank} (code {code})" for rank, code in codes.items() if code is not None
        )
        return f"trainer rank {dead or '?'} ended; its last words are in the trainer's log"


def _pipe(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdin is not None
    return child.stdin
