"""One weight version as a mapped file: a valid safetensors file on a memory file system."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.digests import digest_of, hash_chunk
from common.errors import ShardCorrupt, VersionGone
from common.messages.coordinator import Manifest, TensorSpec

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""By the dtype's name in safetensors."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor inside a mapped segment."""

    spec: TensorSpec
    content: memoryview
    """Its bytes; they stay readable as long as something refers to them."""


class MappedSegment:
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
        expected = self.manifest.chunks
        if len(expected) != -(-self.manifest.length // self.manifest.chunk_bytes):
            raise ShardCorrupt(self.manifest.version, "number of chunks")
        for number, digest in enumerate(expected):
            if hash_chunk(self.chunk(number)) != digest:
                raise ShardCorrupt(self.manifest.version, f"chunk {number}")
        return digest_of(self.manifest.tensors, expected)

    def chunk(self, number: int) -> memoryview:
        """A view of one chunk; shorter at the end."""
        size = self.manifest.chunk_bytes
        return memoryview(self._content)[number * size : (number + 1) * size]

    def header(self) -> bytes:
        """What precedes the first tensor."""
        end = min((spec.offset for spec in self.manifest.tensors), default=self.manifest.length)
        return self._content[:end]

    def mapped_tensors(self) -> Iterator[MappedTensor]:
        """Every tensor, in the order of the manifest."""
        view = memoryview(self._content)
        for spec in self.manifest.tensors:
            yield MappedTensor(spec, view[spec.offset : spec.offset + spec.length])


def element_bytes(manifest: Manifest) -> int:
    """Bytes of the elements that fill most of a segment: what differences are made of."""
    lengths: dict[int, int] = {}
    for spec in manifest.tensors:
        size = ELEMENT_BYTES.get(spec.dtype, 1)
        lengths[size] = lengths.get(size, 0) + spec.length
    return max(sorted(lengths), key=lambda size: lengths[size], default=4)
