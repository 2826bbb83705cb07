"""Versions of a few small chunks, for everything that moves bytes and reads none."""

import xxhash

from common.digests import hash_pieces
from common.messages.coordinator import Manifest, TensorSpec

CHUNK = 4096


def manifest_of(version: int, content: bytes, segment: str = "/nowhere/w0") -> Manifest:
    """Of bytes that are one tensor."""
    return Manifest(
        version=version,
        segment=segment,
        length=len(content),
        chunk_bytes=CHUNK,
        chunks=hash_pieces([memoryview(content)], CHUNK),
        digest=xxhash.xxh3_128_hexdigest(content),
        tensors=[TensorSpec(name="w", dtype="BF16", shape=[1], offset=0, length=len(content))],
    )
