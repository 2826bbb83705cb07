"""The name of a version's content: equal names mean equal bytes in every tensor."""

import json
from collections.abc import Iterable, Sequence

import xxhash
from blake3 import blake3

from common.messages.coordinator import TensorSpec


def digest_of(tensors: Sequence[TensorSpec], chunks: Sequence[int]) -> str:
    """blake3 over the tensor table and the chunk hashes, in hex."""
    table = [[t.name, t.dtype, t.shape, t.offset, t.length] for t in tensors]
    return blake3(json.dumps([table, list(chunks)]).encode()).hexdigest()


def hash_chunk(content: memoryview | bytes) -> int:
    """xxh3-64 of one chunk."""
    return xxhash.xxh3_64_intdigest(content)


def hash_pieces(pieces: Iterable[memoryview], chunk_bytes: int) -> list[int]:
    """`hash_chunk` of each chunk of what the pieces would be if they lay one after the other."""
    chunks: list[int] = []
    hasher, room = xxhash.xxh3_64(), chunk_bytes
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + room]
            hasher.update(part)
            start, room = start + len(part), room - len(part)
            if room == 0:
                chunks.append(hasher.intdigest())
                hasher, room = xxhash.xxh3_64(), chunk_bytes
    if room < chunk_bytes:
        chunks.append(hasher.intdigest())
    return chunks
