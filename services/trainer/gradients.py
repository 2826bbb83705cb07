"""Gradient sums between processes: one flat array in a file on a memory file system.

All trainable parameters in the model's order, in one of two dtypes. The replica writes it and
hashes each chunk; the core checks hashes and numbers in a helper thread before the training thread
sees it; each rank of the core adds its own rows.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import blake3
import torch
from torch import Tensor, nn

from common.digests import hash_pieces
from common.errors import LibraError
from common.messages.blob import Blob
from common.stream import CHUNK_BYTES, Chunk, Encoding, Streamer
from services.trainer.outlet import shard_of
from services.trainer.publish import create_mapped
from services.trainer.rounds import Sum

FETCH_TIMEOUT_S = 30.0
"""The core has long run the micro-batches itself when a sum takes so long."""
WIRE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class GradientUnsound(LibraError):
    """A gradient is not what its sender says, or not a number."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Place:
    """Where one parameter lies in the array, in elements."""

    shape: tuple[int, ...]
    first: int
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """Its view."""
        return flat[self.first : self.first + self.count].view(self.shape)


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """Which element of the array belongs to which parameter."""

    places: tuple[Place, ...]
    count: int
    digest: str
    """Of names and shapes: two processes with equal digests mean the same."""

    @staticmethod
    def of(policy: nn.Module) -> "GradientLayout":
        """Of all trainable parameters, tied ones once; the same on every rank."""
        places: list[Place] = []
        count, names = 0, blake3.blake3()
        for name, parameter in trainable(policy):
            shape = tuple(parameter.shape)
            places.append(Place(shape, count, parameter.numel()))
            count += parameter.numel()
            names.update(f"{name} {shape}\n".encode())
        return GradientLayout(tuple(places), count, names.hexdigest())

    def length(self, dtype: str) -> int:
        """Bytes of the array."""
        return self.count * WIRE_DTYPES[dtype].itemsize


def trainable(policy: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that have gradients, in the model's order."""
    return ((n, p) for n, p in policy.named_parameters() if p.requires_grad)


class GradientFile:
    """Where a replica writes; a new file whenever somebody may still read the old one."""

    def __init__(self, path: Path, layout: GradientLayout, dtype: str) -> None:
        self._path, self._layout, self._dtype = path, layout, dtype
        self._memory: mmap.mmap | None = None

    @torch.no_grad()
    def write(self, policy: nn.Module, residual: Tensor | None) -> Blob:
        """Write the parameters' gradients.

        Args:
            policy: its `grad`s are the sum; None counts as zero.
            residual: float32, what rounding took away before; holds afterwards what it takes away
                now. None: nothing is fed back.
        """
        memory = self._map()
        flat = torch.frombuffer(memory, dtype=WIRE_DTYPES[self._dtype])
        for (_, parameter), place in zip(trainable(policy), self._layout.places, strict=True):
            written = place.of(flat)
            if residual is not None:
                exact = place.of(residual)
                if parameter.grad is not None:
                    exact += parameter.grad.to(exact.device)
                written.copy_(exact)
                exact -= written
            elif parameter.grad is None:
                written.zero_()
            else:
                written.copy_(parameter.grad)
        hashes = hash_pieces([memoryview(memory)], CHUNK_BYTES)
        name = blake3.blake3(b"".join(h.to_bytes(8, "little") for h in hashes))
        return Blob(
            path=str(self._path),
            length=len(memory),
            chunk_bytes=CHUNK_BYTES,
            chunks=hashes,
            digest=name.hexdigest(),
        )

    def chunks(self, blob: Blob) -> "MappedChunks":
        """What was just written, for a receiver on another host."""
        assert self._memory is not None
        return MappedChunks(memoryview(self._memory), blob.chunk_bytes)

    def discard(self) -> None:
        """Never write to this file again: somebody may still read it."""
        self._path.unlink(missing_ok=True)
        self._memory = None

    def _map(self) -> mmap.mmap:
        if self._memory is None:
            self._path.unlink(missing_ok=True)  # Of a process that was killed.
            self._memory = create_mapped(self._path, self._layout.length(self._dtype))
        return self._memory


@dataclass(frozen=True, slots=True)
class MappedChunks:
    """A `ChunkSource` over memory."""

    content: memoryview
    chunk_bytes: int

    def chunk(self, number: int, base: str) -> Chunk:
        """As it is: sums of two steps have nothing in common."""
        del base
        first = number * self.chunk_bytes
        return Chunk(Encoding.FULL, self.content[first : first + self.chunk_bytes])


class ReceivedGradient:
    """An open gradient file; it stays readable when its name is removed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def open(cls, path: str) -> Self:
        """Open one of this host.

        Raises:
            FileNotFoundError: it is not on this host.
        """
        return cls(os.open(path, os.O_RDONLY))

    @property
    def path(self) -> str:
        """Where any process of this user can open it, until it is closed."""
        assert self._descriptor is not None
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def check(self, blob: Blob, dtype: str) -> None:
        """Compare hashes, and look for what is not a number. Runs at memory speed, in a thread.

        Raises:
            GradientUnsound: it is not what the blob says, or not finite.
        """
        assert self._descriptor is not None
        if os.fstat(self._descriptor).st_size != blob.length:
            raise GradientUnsound("length")
        memory = _mapped(self.path)
        if hash_pieces([memoryview(memory)], blob.chunk_bytes) != blob.chunks:
            raise GradientUnsound("digest")
        flat = torch.frombuffer(memory, dtype=WIRE_DTYPES[dtype])
        step = CHUNK_BYTES // flat.itemsize
        for part in flat.split(step):
            exact = part.float()
            # Not finite as soon as one element is not, or is beyond all measure.
            if not torch.dot(exact, exact).isfinite():
                raise GradientUnsound("not finite")

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class StreamedGradients:
    """Brings gradients from other hosts into memory without a name."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    async def __call__(self, blob: Blob, sources: list[str]) -> ReceivedGradient:
        """Stream one.

        Raises:
            StreamBroken: no source gave it in time.
        """
        descriptor = os.memfd_create("libra-gradient")
        complete = False
        try:
            os.posix_fallocate(descriptor, 0, blob.length)
            memory = mmap.mmap(descriptor, blob.length)
            have = bytearray(len(blob.chunks))
            into = memoryview(memory)
            await self._streamer.fetch(blob, into, have, sources, timeout_s=FETCH_TIMEOUT_S)
            complete = True
        finally:
            if not complete:
                os.close(descriptor)
        return ReceivedGradient(descriptor)


@torch.no_grad()
def add_gradient(
    policy: nn.Module, layout: GradientLayout, due: Sum, *, rank: int, ranks: int
) -> None:
    """Add a checked gradient sum to the parameters' gradients: of each, the rows of this rank."""
    flat = torch.frombuffer(_mapped(due.path), dtype=WIRE_DTYPES[due.dtype])
    for (_, parameter), place in zip(trainable(policy), layout.places, strict=True):
        whole = place.of(flat)
        if parameter.grad is None:
            if not whole.any():  # A parameter that is not used has no gradient, here as there.
                continue
            parameter.grad = torch.zeros_like(parameter)
        shard = shard_of(parameter.grad, rank, ranks)
        shard.rows.add_(shard.of(whole).to(shard.rows.device))


def _mapped(path: str) -> mmap.mmap:
    """The file, mapped privately: nothing that is done to it reaches the file."""
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
