"""Reads a weight version: maps its segment, checks every chunk, and names its tensors."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import xxhash

from common.errors import ShardCorrupt, VersionGone
from common.messages.coordinator import Manifest

if TYPE_CHECKING:
    import torch

SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Segment:
    """One mapped segment file. It stays readable when the file is unlinked meanwhile."""

    def __init__(self, manifest: Manifest, content: mmap.mmap) -> None:
        self.manifest, self._content = manifest, content

    @classmethod
    def open(cls, manifest: Manifest) -> Self:
        """Map the file privately: nothing that is done to the views reaches it.

        Raises:
            VersionGone: the file does not exist any more.
            ShardCorrupt: it is not as long as the manifest says.
        """
        try:
            with Path(manifest.segment).open("rb") as file:
                length = file.seek(0, 2)
                if length != manifest.length:
                    raise ShardCorrupt(manifest.version, f"length {length}")
                return cls(manifest, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except FileNotFoundError as error:
            raise VersionGone(manifest.version) from error

    def check(self) -> None:
        """Compare every chunk with its hash. Runs at memory speed: call it in a thread.

        Raises:
            ShardCorrupt: the first chunk that differs.
        """
        size = self.manifest.chunk_bytes
        expected = self.manifest.chunks
        if len(expected) != -(-self.manifest.length // size):
            raise ShardCorrupt(self.manifest.version, "number of chunks")
        with memoryview(self._content) as view:
            for number, digest in enumerate(expected):
                chunk = view[number * size : (number + 1) * size]
                if xxhash.xxh3_64_intdigest(chunk) != digest:
                    raise ShardCorrupt(self.manifest.version, f"chunk {number}")

    def tensors(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Each tensor as a view of the mapping, which the views keep alive."""
        import torch

        for spec in self.manifest.tensors:
            dtype = getattr(torch, SAFETENSORS_DTYPES[spec.dtype])
            flat = torch.frombuffer(  # pyright: ignore[reportUnknownMemberType]
                self._content,
                dtype=dtype,
                count=spec.length // dtype.itemsize,
                offset=spec.offset,
            )
            yield spec.name, flat.view(spec.shape)


def open_checked(manifest: Manifest) -> Segment:
    """Map a segment and check all of it, before anything is done with its bytes."""
    segment = Segment.open(manifest)
    segment.check()
    return segment


def copy_checked(manifest: Manifest) -> "dict[str, torch.Tensor]":
    """Copy all tensors of a segment, and check it after that.

    A writer that comes too early is found out: what was copied was still right afterwards.
    """
    segment = Segment.open(manifest)
    copies = {name: tensor.clone() for name, tensor in segment.tensors()}
    segment.check()
    return copies
