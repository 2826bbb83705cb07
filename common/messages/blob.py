"""Bulk bytes by reference: a file on a memory file system, or chunks of it over a stream."""

from common.messages.base import Message


class Blob(Message):
    """A file that never changes while somebody may read it."""

    path: str
    """Where it lies on the host of its owner."""
    length: int
    """Bytes."""
    chunk_bytes: int
    chunks: list[int]
    """xxh3-64 of each chunk."""
    digest: str
    """Names the content."""
