"""What a replica computes with: weights without an optimizer, and the core's own loss code.

Everything runs in one thread, in the order in which it is asked for; asking blocks no event loop.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.errors import ShardCorrupt
from common.messages.blob import Blob
from common.messages.coordinator import Manifest
from common.messages.trainer import PackData, SequenceData, WorkOffer
from common.segment import MappedSegment
from common.stream import StreamServer
from common.weights import NO_VERSION
from services.trainer.batch import TrainingSequence
from services.trainer.gradients import GradientFile, GradientLayout
from services.trainer.model import DTYPES, Policy, load_policy
from services.trainer.outlet import Outlet
from services.trainer.packing import Pack
from services.trainer.pieces import Pieces, Totals
from services.trainer.publish import SAFETENSORS_NAMES

T = TypeVar("T")
BUFFERS = 2
"""One that the core reads, one to write."""
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Computed:
    """The gradient sum of some micro-batches."""

    blob: Blob
    dtype: str
    layout: str
    sums: list[float]
    """As `pieces.Totals.report`."""
    tokens: int
    buffer: int
    """Which buffer it lies in, for `discard`."""


class ReplicaEngine:
    """A policy whose gradient can be asked for."""

    def __init__(self, config: Config, stem: Path, server: StreamServer | None = None) -> None:
        """Load the policy; blocks for as long as that takes.

        Args:
            config: the job.
            stem: gradient files are this path and a number.
            server: offers gradients to a trainer on another host.

        Raises:
            ConfigError: the model cannot be used.
        """
        self._config, self._stem, self._server = config, stem, server
        torch.set_num_threads(config.training.threads)
        path = Path(config.model.path)
        policy = load_policy(path)
        self._pieces = Pieces(policy, config)
        self._layout = GradientLayout.of(policy)
        self._outlet = Outlet.of(policy.model)
        self._dtype = SAFETENSORS_NAMES[DTYPES[config.training.gradient_dtype]]
        self._totals = Totals(self._pieces.device)
        self._files: list[GradientFile] = []
        self._offered: dict[int, str] = {}
        """Digest of what each buffer holds."""
        self._next = 0
        self._residual: Tensor | None = None
        """What rounding took away from sums so far, and the next one gives back."""
        self._thread = ThreadPoolExecutor(1, "libra-replica")
        self.version = NO_VERSION
        """Whose weights the policy has; none after a failed `apply`."""
        self.digest = ""
        """Of that version."""

    @property
    def policy(self) -> Policy:
        """For its parameters."""
        return self._pieces.policy

    @property
    def sources(self) -> list[str]:
        """Where gradients can be streamed from."""
        return [self._server.address] if self._server is not None else []

    def close(self) -> None:
        """End the thread and leave no file behind."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._drop_files()

    async def wake(self) -> None:
        """Take the device."""
        await self._run(self._wake)

    async def release(self) -> None:
        """Free the device and all memory but the weights."""
        await self._run(self._release)

    async def apply(self, manifest: Manifest) -> None:
        """Take the weights of a version; what was accumulated is forgotten.

        Raises:
            WeightError: the segment is gone or does not match its manifest.
        """
        await self._run(lambda: self._apply(manifest))

    async def accumulate(self, offer: WorkOffer, pack: PackData) -> None:
        """Add the gradient of one micro-batch of an offer."""
        await self._run(lambda: self._accumulate(offer, pack))

    async def forget(self) -> None:
        """Forget what was accumulated."""
        await self._run(self._forget)

    async def finish(self) -> Computed:
        """Write down what was accumulated, and begin anew."""
        return await self._run(self._finish)

    async def discard(self, computed: Computed) -> None:
        """The sum was not counted, and somebody may still read it."""
        await self._run(lambda: self._discard(computed))

    async def _run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work)

    # ── in the thread ────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        if torch.cuda.is_available():
            self.policy.to(torch.device("cuda"))
        self._totals = Totals(self._pieces.device)

    def _release(self) -> None:
        self._forget()
        self._drop_files()
        self._residual = None
        if torch.cuda.is_available():
            self.policy.to(torch.device("cpu"))
            torch.cuda.empty_cache()

    def _drop_files(self) -> None:
        for buffer in range(len(self._files)):
            self._withdraw(buffer)
        for file in self._files:
            file.discard()
        self._files = []

    @torch.no_grad()
    def _apply(self, manifest: Manifest) -> None:
        if (self.version, self.digest) == (manifest.version, manifest.digest):
            return  # Whoever asked before gave up waiting.
        self._forget()
        self.version = NO_VERSION
        segment = MappedSegment.open(manifest)
        if self._outlet.names is None:
            self._load_whole(manifest)
        else:
            self._copy(segment, self._outlet.names)
        # Checked afterwards: a writer that came too early is found out.
        digest = segment.check()
        self.version, self.digest = manifest.version, digest

    def _copy(self, segment: MappedSegment, names: Mapping[str, str]) -> None:
        version = segment.manifest.version
        state: dict[str, Tensor] = self.policy.model.state_dict()
        views = dict(_tensors(segment))
        if views.keys() != names.keys():
            raise ShardCorrupt(version, "its tensor table")
        for published, own in names.items():
            if state[own].shape != views[published].shape:
                raise ShardCorrupt(version, published)
            state[own].copy_(views[published])

    def _load_whole(self, manifest: Manifest) -> None:
        """For architectures that publish other tensors than they compute with."""
        with tempfile.TemporaryDirectory(prefix="libra-replica-") as made:
            directory = Path(made)
            model = Path(self._config.model.path).resolve()
            (directory / "config.json").symlink_to(model / "config.json")
            (directory / "model.safetensors").symlink_to(manifest.segment)
            loaded = load_policy(directory)
        self.policy.load_state_dict(loaded.state_dict())

    def _accumulate(self, offer: WorkOffer, pack: PackData) -> None:
        sequences = [_unpacked(sequence) for sequence in offer.sequences]
        weights = [sequence.weight for sequence in offer.sequences]
        packed = Pack(tuple(pack.members), pack.shared)
        self._pieces.accumulate(self._pieces.lay_out(packed, sequences, weights), self._totals)

    def _forget(self) -> None:
        self.policy.zero_grad()
        self._totals = Totals(self._pieces.device)

    def _finish(self) -> Computed:
        if not self._files:
            paths = [self._stem.with_name(f"{self._stem.name}-{n}") for n in range(BUFFERS)]
            self._files = [GradientFile(path, self._layout, self._dtype) for path in paths]
        if self._dtype != "F32" and self._residual is None:
            self._residual = torch.zeros(self._layout.count)
        buffer, self._next = self._next, (self._next + 1) % BUFFERS
        self._withdraw(buffer)
        blob = self._files[buffer].write(self.policy, self._residual)
        if self._server is not None:
            self._server.offer(blob.digest, self._files[buffer].chunks(blob))
            self._offered[buffer] = blob.digest
        sums = self._totals.report()
        self._forget()
        return Computed(blob, self._dtype, self._layout.digest, sums, int(sums[1]), buffer)

    def _withdraw(self, buffer: int) -> None:
        digest = self._offered.pop(buffer, None)
        if self._server is not None and digest is not None:
            self._server.withdraw(digest)

    def _discard(self, computed: Computed) -> None:
        if self._files:
            self._withdraw(computed.buffer)
            self._files[computed.buffer].discard()
        if self._residual is not None:  # Most of it belongs to the sum that did not count.
            self._residual.zero_()


def _tensors(segment: MappedSegment) -> Iterator[tuple[str, Tensor]]:
    for tensor in segment.mapped_tensors():
        spec = tensor.spec
        dtype = TORCH_DTYPES[spec.dtype]
        flat = (
            torch.frombuffer(tensor.content, dtype=dtype)
            if spec.length
            else torch.empty(0, dtype=dtype)
        )
        yield spec.name, flat.view(spec.shape)


def _unpacked(sequence: SequenceData) -> TrainingSequence:
    actions = np.frombuffer(sequence.actions, np.int32)
    return TrainingSequence(
        tokens=np.frombuffer(sequence.tokens, np.int32),
        actions=actions,
        behaviour=np.frombuffer(sequence.behaviour, np.float32),
        versions=np.zeros(len(actions), np.int32),
        advantage=sequence.advantage,
        prompt=sequence.prompt,
    )
