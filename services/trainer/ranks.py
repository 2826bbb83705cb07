"""All data-parallel ranks as one learner: rank 0 is this process, the others are its children.

A child gets its orders over its standard input, so it can never outlive the pipe, and the kernel
kills it with its parent. Tensors meet in collectives (gloo on CPUs, NCCL on GPUs) that all have
a time-out. With one rank there is no child, no collective and no sharding.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from common.config import Config
from common.errors import RunFailed
from services.trainer.batch import TrainingSequence
from services.trainer.canary import make_canary
from services.trainer.checkpoint import OPTIMIZER
from services.trainer.model import DTYPES, Policy, load_policy, weights_to_publish
from services.trainer.outlet import Outlet, whole
from services.trainer.publish import COPY_TIMEOUT_S, Copier, Publisher, Segment, plan_layout
from services.trainer.rounds import Alone, Followed, Relay, Sharing
from services.trainer.step import Learner, StepResult, nothing

COLLECTIVE_TIMEOUT_S = 300.0
"""Longer than the difference between the fastest and the slowest rank of a step."""
EXIT_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1
COPIED, FAILED = b"\x01", b"\x00"
"""What a child tells of a copy; the end of its pipe tells that it is gone."""
T = TypeVar("T")
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of a parameter."""


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
        self._order({"order": "train", "step": step, "sequences": [_packed(s) for s in sequences]})
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
        command = [sys.executable, "-m", "services.trainer.ranks", str(os.getpid())]
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
            _write(_pipe(child), setup)

    def _order(self, order: Mapping[str, Any]) -> None:
        try:
            for child in self._children:
                _write(_pipe(child), order)
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


def build_policy(config: Config, model_path: Path, *, rank: int) -> Policy:
    """Load the model onto the device of one rank."""
    torch.set_num_threads(config.training.threads)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    return load_policy(model_path).to(device)


def build_learner(
    policy: Policy,
    config: Config,
    model_path: Path,
    *,
    resume: bool,
    rank: int,
    rendezvous: Path | None,
) -> Learner:
    """Make the learner of one rank; with a rendezvous directory, shard the model over all ranks."""
    if rendezvous is not None:
        _shard(policy, policy.model.device, rank, config.training.ranks, rendezvous)
    learner = Learner(policy, config, rank=rank, ranks=config.training.ranks)
    if resume:
        restore_optimizer(learner, load_file(model_path / OPTIMIZER))
    return learner


def full_state(learner: Learner) -> dict[str, Tensor]:
    """The model's whole state dict; a collective with several ranks."""
    state: dict[str, Tensor] = learner.policy.model.state_dict(keep_vars=True)
    gathered: dict[int, Tensor] = {}
    for tensor in state.values():  # Tied weights are one parameter, and stay one tensor.
        if id(tensor) not in gathered:
            gathered[id(tensor)] = _full(tensor.detach())
    return {name: gathered[id(tensor)] for name, tensor in state.items()}


def optimizer_state(learner: Learner) -> dict[str, Tensor]:
    """`<parameter>.<moment>` of each parameter that was updated; a collective."""
    state: dict[str, Tensor] = {}
    for name, parameter in learner.policy.model.named_parameters():
        for moment, value in learner.optimizer.state.get(parameter, {}).items():
            state[f"{name}.{moment}"] = _full(value)
    return state


def restore_optimizer(learner: Learner, state: Mapping[str, Tensor]) -> None:
    """Inverse of `optimizer_state`."""
    for name, parameter in learner.policy.model.named_parameters():
        if f"{name}.step" not in state:
            continue
        learner.optimizer.state[parameter] = {
            moment: _like(parameter, state[f"{name}.{moment}"]) for moment in MOMENTS
        }


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if not value.dim() and parameter.dim():  # AdamW counts its steps on the CPU, unsharded.
        return value
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
    return value.to(parameter.device)


def _shard(policy: Policy, device: torch.device, rank: int, ranks: int, rendezvous: Path) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # All ranks are children of one process.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(rendezvous / "store"), ranks),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    mesh = init_device_mesh(device.type, (ranks,))
    layers = set(policy.model._no_split_modules or ())  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for module in policy.model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def _packed(sequence: TrainingSequence) -> list[Any]:
    arrays = (sequence.tokens, sequence.actions, sequence.behaviour, sequence.versions)
    return [*(array.tobytes() for array in arrays), sequence.advantage, sequence.prompt]


def _unpacked(packed: Sequence[Any]) -> TrainingSequence:
    tokens, actions, behaviour, versions, advantage, prompt = packed
    return TrainingSequence(
        tokens=np.frombuffer(tokens, np.int32),
        actions=np.frombuffer(actions, np.int32),
        behaviour=np.frombuffer(behaviour, np.float32),
        versions=np.frombuffer(versions, np.int32),
        advantage=advantage,
        prompt=prompt,
    )


def _pipe(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdin is not None
    return child.stdin


def _write(pipe: IO[bytes], value: Mapping[str, Any]) -> None:
    payload = msgpack.packb(value)
    pipe.write(len(payload).to_bytes(8, "little") + payload)
    pipe.flush()


def _read(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next value, or None when the writer is gone."""
    length = int.from_bytes(pipe.read(8), "little")
    payload = pipe.read(length)
    return msgpack.unpackb(payload) if length and len(payload) == length else None


class Child:
    """What a rank other than 0 does with its orders."""

    def __init__(self, learner: Learner, config: Config, copier: Copier, copied: int) -> None:
        self._learner = learner
        self._copier = copier
        self._copied = copied
        """Where a byte is written when a copy has ended."""
        self._outlet = Outlet.of(learner.policy.model)
        self._layout = plan_layout(self._outlet.shapes, DTYPES[config.model.dtype])
        self._segments: dict[str, Segment] = {}
        """Rank 0 made these few files and uses them in turn."""

    def follow(self, order: Mapping[str, Any]) -> None:
        """Do one order."""
        learner = self._learner
        match order["order"]:
            case "train":
                sequences = [_unpacked(s) for s in order["sequences"]]
                learner.train(
                    sequences,
                    order["step"],
                    before_update=self._copier.join,
                    sharing=Followed(lambda: _read(sys.stdin.buffer)),
                )
            case "publish":
                self._publish(order["segment"])
            case "weights":
                full_state(learner)
            case "optimizer":
                optimizer_state(learner)
            case unknown:
                raise AssertionError(unknown)

    def _publish(self, path: str) -> None:
        if path not in self._segments:
            self._segments[path] = Segment(Path(path), self._layout, create=False)
        learner = self._learner
        shards = self._outlet.shards(learner.policy.model, learner.rank, learner.ranks)
        self._copier.join()
        self._copier.start(self._segments[path], shards).add_done_callback(self._report)

    def _report(self, copy: "Future[None]") -> None:
        os.write(self._copied, FAILED if copy.exception() else COPIED)


def main(parent: int, copied: int) -> int:
    """Follow rank 0 until it closes the pipe or dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the call above.
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # Rank 0 decides how the run ends.
        signal.signal(number, signal.SIG_IGN)
    setup = _read(sys.stdin.buffer)
    if setup is None:
        return 0
    config = Config.model_validate_json(setup["config"])
    model_path, rank = Path(setup["model_path"]), setup["rank"]
    learner = build_learner(
        build_policy(config, model_path, rank=rank),
        config,
        model_path,
        resume=setup["resume"],
        rank=rank,
        rendezvous=Path(setup["rendezvous"]),
    )
    with ThreadPoolExecutor(1, "libra-copy") as executor:
        child = Child(learner, config, Copier(executor), copied)
        while (order := _read(sys.stdin.buffer)) is not None:
            child.follow(order)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
