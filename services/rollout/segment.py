"""Reads a weight version: maps its segment, checks every chunk, and names its tensors."""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Self

import xxhash

from common.digests import digest_of, hash_pieces
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

    def check(self) -> str:
        """Compare every chunk with its hash. Runs at memory speed: call it in a thread.

        Returns:
            The digest of what was found.

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
        return digest_of(self.manifest.tensors, expected)

    def header(self) -> bytes:
        """What precedes the first tensor."""
        end = min((spec.offset for spec in self.manifest.tensors), default=self.manifest.length)
        return self._content[:end]

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


@dataclass(frozen=True, slots=True)
class Copied:
    """A version in memory of its own, right to the last bit."""

    manifest: Manifest
    header: bytes
    tensors: "dict[str, torch.Tensor]"


def copy_checked(manifest: Manifest) -> Copied:
    """Copy all tensors of a segment, and check it after that.

    A writer that comes too early is found out: what was copied was still right afterwards.
    """
    segment = Segment.open(manifest)
    copies = {name: tensor.clone() for name, tensor in segment.tensors()}
    copied = Copied(manifest, segment.header(), copies)
    segment.check()
    return copied


def held_digest(manifest: Manifest, header: bytes, held: "Mapping[str, torch.Tensor]") -> str:
    """The digest that the version would have if its file were made of these tensors.

    Equal to the manifest's when they are what was published: to be asked of what a model holds
    after a swap. Runs at memory speed: call it in a thread.
    """
    specs = sorted(manifest.tensors, key=lambda spec: spec.offset)
    pieces = (_bytes_of(held[spec.name]) for spec in specs)
    chunks = hash_pieces(chain([memoryview(header)], pieces), manifest.chunk_bytes)
    return digest_of(manifest.tensors, chunks)


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy().data  # pyright: ignore[reportUnknownMemberType]
