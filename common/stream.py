"""Bulk bytes between hosts: what a source offers, and how a receiver asks for it.

A receiver asks for pieces, so nobody is sent what it has no room for. Two transports keep these
protocols, under the same contract tests: `common.transport.stream` (ZeroMQ, in threads of its own)
and `common.transport.sim_stream` (a seeded network on a virtual clock).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from common.messages.blob import Blob

PIECE_BYTES = 512 << 10
"""Of one answer: small enough that no thread is busy with one for a millisecond."""
PIECES_OUTSTANDING = 8
"""One chunk of 4 MiB in flight: with the one that is being checked a receiver holds two at most."""
CHUNK_BYTES = PIECE_BYTES * PIECES_OUTSTANDING


class Encoding(IntEnum):
    """How a chunk travels."""

    FULL = 0
    """As it is."""
    GAPS = 1
    """Distances between changed elements, and the changes."""
    XOR = 2
    """Exclusive or with the base, byte planes apart."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk on its way."""

    encoding: Encoding
    payload: memoryview | bytes


class ChunkSource(Protocol):
    """Whoever has the bytes of one digest. Called on the server's thread."""

    def chunk(self, number: int, base: str) -> Chunk | None:
        """One chunk, as a difference to `base` (a digest, or empty) if that is cheaper.

        Returns:
            None while it is not here yet: whoever asks waits.
        """
        ...


class StreamServer(Protocol):
    """Answers receivers on other hosts. Every method may be called from any thread."""

    address: str

    def offer(self, digest: str, source: ChunkSource) -> None:
        """Serve this content from now on; replaces an earlier source of it."""
        ...

    def withdraw(self, digest: str) -> None:
        """Serve it no more; who waits for it is told. Unknown ones are fine."""
        ...

    def arrived(self) -> None:
        """A chunk that may be waited for is here now."""
        ...


@dataclass(frozen=True, slots=True)
class Base:
    """An older, complete copy on this host."""

    digest: str
    view: memoryview


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a transfer took."""

    chunks: int
    received_bytes: int
    """On the wire, wrong ones included."""
    deltas: int
    """Chunks that came as a difference."""
    wrong: int
    """Chunks that were asked for again."""


def ignore(_number: int) -> None:
    """For who does not follow the progress."""


class Streamer(Protocol):
    """Brings blobs from other hosts."""

    async def fetch(  # noqa: PLR0913  All of it differs from call to call.
        self,
        blob: Blob,
        into: memoryview,
        have: bytearray,
        sources: Sequence[str],
        *,
        chunks: Sequence[int] | None = None,
        base: Base | None = None,
        timeout_s: float,
        on_chunk: Callable[[int], None] = ignore,
    ) -> Fetched:
        """Receive chunks until all that are wanted are here and right.

        Args:
            blob: what; its hashes decide what is right.
            into: writable, `blob.length` bytes.
            have: a byte for each chunk, 1 where it is here already; set as chunks arrive, so that
                a transfer that broke goes on from there.
            sources: addresses of stream servers, best first.
            chunks: numbers of the wanted ones; None for all.
            base: lets sources send differences to it.
            timeout_s: for everything.
            on_chunk: called with each number, maybe on another thread.

        Raises:
            StreamBroken: no source gave a chunk in time.
            ShardCorrupt: every source that answered gave wrong bytes, several times.
        """
        ...
