"""Weight versions on their way out: segments that are overwritten in turn by a background copy.

A segment is a valid safetensors file on a memory file system. Shapes never change, so its header
is written once and each version is copied into place, converted on the way; nothing is
serialised and the training thread does not wait for it, except before the next update of the
very weights that are being copied. Each rank copies the rows that it holds.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import json
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from services.trainer.outlet import Shard

T = TypeVar("T")

GENERATIONS = 3
"""One that workers apply, one that is announced, one to write."""
COPY_TIMEOUT_S = 120.0
"""A copy runs at memory speed; past this the machine is broken."""
ALIGNMENT = 64
"""Of the first tensor, in bytes; the format asks for 8."""
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in a segment."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """First byte, from the start of the file."""

    @property
    def length(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class Layout:
    """The static part of every segment of a run."""

    header: bytes
    slots: tuple[Slot, ...]
    length: int
    """Bytes of the whole file."""


def plan_layout(state: Mapping[str, Tensor], dtype: torch.dtype) -> Layout:
    """Lay out a safetensors file for the tensors; floating ones become `dtype`.

    Wider elements first, then by name: every tensor is aligned without gaps, which the format
    does not allow.
    """
    kinds = {name: dtype if t.is_floating_point() else t.dtype for name, t in state.items()}
    names = sorted(state, key=lambda name: (-kinds[name].itemsize, name))
    slots = [Slot(name, kinds[name], tuple(state[name].shape), 0) for name in names]
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    starts: list[int] = []
    for slot in slots:
        starts.append(end)
        end += slot.length
        table[slot.name] = {
            "dtype": SAFETENSORS_NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple(
        Slot(s.name, s.dtype, s.shape, len(header) + start)
        for s, start in zip(slots, starts, strict=True)
    )
    return Layout(header, placed, len(header) + end)


class Segment:
    """One file of `layout`, mapped for writing."""

    def __init__(self, path: Path, layout: Layout, *, create: bool = True) -> None:
        """Make the file; without `create`, map the one that rank 0 has made."""
        self.path = path
        if create:
            memory = create_mapped(path, layout.length)
            memory[: len(layout.header)] = layout.header
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), layout.length)
        self.views: dict[str, Tensor] = {slot.name: _view(memory, slot) for slot in layout.slots}
        """The tensors, whole, in the file."""

    @torch.no_grad()
    def write(self, shards: Mapping[str, Shard]) -> None:
        """Copy every shard into place."""
        for name, shard in shards.items():
            shard.of(self.views[name]).copy_(shard.rows)

    def unlink(self) -> None:
        """Remove the name; who has the file mapped keeps it."""
        self.path.unlink(missing_ok=True)


def create_mapped(path: Path, length: int) -> mmap.mmap:
    """Make a file on a memory file system and map it for writing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Taken now: a full memory file system is an error here and a SIGBUS later.
        os.posix_fallocate(descriptor, 0, length)
        return mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)


def _view(memory: mmap.mmap, slot: Slot) -> Tensor:
    count = slot.length // slot.dtype.itemsize
    if not count:
        return torch.empty(slot.shape, dtype=slot.dtype)
    flat = torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset)
    return flat.view(slot.shape)


class Copier:
    """The copies of one rank, one at a time.

    `start` and `join` are called by the training thread, the copy runs on `executor`.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._copying: Future[None] | None = None
        self.copy_s = 0.0
        """Wall seconds of the last finished copy."""
        self.join_s = 0.0
        """Seconds that the training thread waited in the last `join` that had to."""

    def start(self, segment: Segment, shards: Mapping[str, Shard]) -> Future[None]:
        """Begin to copy; the tensors must not change before `join` returns."""
        assert self._copying is None, "the copy before this one was not joined"
        beside = _beside(shards)
        self._copying = self._executor.submit(self._copy, segment, shards, beside)
        return self._copying

    def join(self) -> None:
        """Wait until the weights may change."""
        if self._copying is None:
            return
        began = time.perf_counter()
        self._copying.result(COPY_TIMEOUT_S)
        self._copying = None
        self.join_s = time.perf_counter() - began

    def _copy(
        self,
        segment: Segment,
        shards: Mapping[str, Shard],
        beside: contextlib.AbstractContextManager[object],
    ) -> None:
        began = time.perf_counter()
        with beside:
            segment.write(shards)
        self.copy_s = time.perf_counter() - began


def _beside(shards: Mapping[str, Shard]) -> contextlib.AbstractContextManager[object]:
    """On a GPU, a stream of its own that begins after what the training thread has queued."""
    device = next((shard.rows.device for shard in shards.values()), None)
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class Publisher(Copier):
    """The generations of a run, of which one at most is being written. On rank 0."""

    def __init__(
        self, directory: Path, run_id: str, dtype: torch.dtype, executor: Executor
    ) -> None:
        super().__init__(executor)
        self._stem = directory / f"libra-{run_id}-w"
        self._dtype = dtype
        self._segments: list[Segment] = []
        self.current: Segment | None = None
        """The newest complete or being written; never chosen next."""

    def prepare(self, state: Mapping[str, Tensor]) -> None:
        """Make the segments for tensors like these; they need no memory of their own.

        Raises:
            OSError: the memory file system is full, or the names are taken.
        """
        layout = plan_layout(state, self._dtype)
        for number in range(GENERATIONS):
            # A killed process of the same run left its own; nobody maps it by name any more.
            path = Path(f"{self._stem}{number}")
            path.unlink(missing_ok=True)
            self._segments.append(Segment(path, layout))

    def choose(self, in_use: Collection[str]) -> Segment | None:
        """A segment that may be overwritten, or None when all are in use."""
        fitting = [
            segment
            for segment in self._segments
            if segment is not self.current and str(segment.path) not in in_use
        ]
        return fitting[0] if fitting else None

    def start(self, segment: Segment, shards: Mapping[str, Shard]) -> Future[None]:
        """As `Copier.start`; the segment is the newest from now on."""
        self.current = segment
        return super().start(segment, shards)

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in the copy thread after the copy; `join` does not wait for it."""
        return self._executor.submit(work)

    def close(self) -> None:
        """Finish the copy and remove the segments."""
        try:
            self.join()
        finally:
            for segment in self._segments:
                segment.unlink()
