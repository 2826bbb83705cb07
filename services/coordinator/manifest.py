"""Describes a segment: a safetensors file, hashed chunk by chunk. Needs no torch."""

import json
import mmap
from pathlib import Path
from typing import Any

from common.digests import digest_of, hash_pieces
from common.errors import LibraError
from common.messages.coordinator import Manifest, TensorSpec
from common.stream import CHUNK_BYTES

HEADER_BYTES_MAX = 64 << 20
LENGTH_BYTES = 8


class SegmentUnreadable(LibraError):
    """The file is not a complete safetensors file."""

    def __init__(self, segment: str, reason: str) -> None:
        super().__init__(f"segment {segment}: {reason}")
        self.segment, self.reason = segment, reason


def build_manifest(version: int, segment: str) -> Manifest:
    """Read the tensor table of a segment and hash its bytes. CPU-bound: run it in a thread.

    Raises:
        SegmentUnreadable: missing, truncated, or not safetensors.
    """
    try:
        with (
            Path(segment).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            tensors = read_table(segment, view)
            chunks = hash_pieces([view], CHUNK_BYTES)
            length = len(view)
    except (OSError, ValueError) as error:
        raise SegmentUnreadable(segment, str(error)) from error
    return Manifest(
        version=version,
        segment=segment,
        length=length,
        chunk_bytes=CHUNK_BYTES,
        chunks=chunks,
        digest=digest_of(tensors, chunks),
        tensors=tensors,
    )


def read_table(segment: str, view: memoryview) -> list[TensorSpec]:
    """Parse the safetensors header: 8 bytes of length, JSON, then the data.

    Raises:
        SegmentUnreadable: the header is malformed or names bytes past the end.
    """
    header_length = int.from_bytes(view[:LENGTH_BYTES], "little")
    if not 2 <= header_length <= min(HEADER_BYTES_MAX, len(view) - LENGTH_BYTES):
        raise SegmentUnreadable(segment, f"header of {header_length} bytes")
    start = LENGTH_BYTES + header_length
    header: dict[str, Any] = json.loads(bytes(view[LENGTH_BYTES:start]))
    header.pop("__metadata__", None)
    tensors = [_spec(name, entry, start) for name, entry in sorted(header.items())]
    for tensor in tensors:
        if tensor.offset + tensor.length > len(view):
            raise SegmentUnreadable(segment, f"{tensor.name} ends past the end of the file")
    return tensors


def _spec(name: str, entry: dict[str, Any], start: int) -> TensorSpec:
    begin, end = entry["data_offsets"]
    return TensorSpec(
        name=name,
        dtype=entry["dtype"],
        shape=list(entry["shape"]),
        offset=start + begin,
        length=end - begin,
    )
