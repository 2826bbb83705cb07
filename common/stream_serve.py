"""What a source answers, and who waits there. No sockets, no clock; shared by both transports."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import structlog

from common.codec import pack, unpack
from common.errors import LibraError, ProtocolError
from common.stream import PIECE_BYTES, Chunk, ChunkSource, Encoding
from common.stream_receive import Answer, Ask, Status

log = structlog.get_logger()

PARKED_MAX = 4096
"""Questions that wait for a chunk: those of some hundred receivers. The oldest are forgotten."""
KEPT_CHUNKS = 2
"""Encoded chunks that are kept while their pieces are asked for."""
UNKNOWN_WAIT_S = 2.0
"""Receivers of a chain start together: one may ask before the one it asks has begun."""
REASSURE_S = 1.0
"""How often somebody who waits is told that the source is alive."""

Reply = tuple[str, Answer, memoryview | bytes]
"""Whom to tell, what, and the piece."""


@dataclass(slots=True)
class _Parked:
    receiver: str
    digest: str
    ask: Ask
    since: float
    told: float


@dataclass
class Desk:
    """Offers of one server, and the questions that cannot be answered yet."""

    sources: dict[str, ChunkSource] = field(default_factory=dict[str, ChunkSource])
    _parked: deque[_Parked] = field(default_factory=lambda: deque[_Parked](maxlen=PARKED_MAX))
    _kept: dict[tuple[str, int, str], Chunk] = field(
        default_factory=dict[tuple[str, int, str], Chunk]
    )

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits."""
        return bool(self._parked)

    def offer(self, digest: str, source: ChunkSource) -> None:
        """Serve it from now on."""
        self.withdraw(digest)
        self.sources[digest] = source

    def withdraw(self, digest: str) -> None:
        """Serve it no more. `look` tells who waits."""
        self.sources.pop(digest, None)
        for key in [key for key in self._kept if key[0] == digest]:
            del self._kept[key]

    def ask(self, receiver: str, digest: str, ask: Ask, now: float) -> list[Reply]:
        """Answer a question, or keep it."""
        if reply := self._answer(receiver, digest, ask):
            return [reply]
        self._parked.append(_Parked(receiver, digest, ask, now, now))
        return []

    def look(self, now: float) -> list[Reply]:
        """Answer what can be answered by now, and reassure the others."""
        replies: list[Reply] = []
        for _ in range(len(self._parked)):
            parked = self._parked.popleft()
            reply = self._answer(parked.receiver, parked.digest, parked.ask)
            if reply is None and parked.digest not in self.sources:
                if now >= parked.since + UNKNOWN_WAIT_S:
                    reply = _nothing(parked.receiver, parked.ask, Status.GONE)
            elif reply is None and now >= parked.told + REASSURE_S:
                parked.told = now
                replies.append(_nothing(parked.receiver, parked.ask, Status.WAIT))
            if reply is None:
                self._parked.append(parked)
            else:
                replies.append(reply)
        return replies

    def forget(self, receiver: str) -> None:
        """It is gone."""
        kept = [parked for parked in self._parked if parked.receiver != receiver]
        self._parked.clear()
        self._parked.extend(kept)

    def _answer(self, receiver: str, digest: str, ask: Ask) -> Reply | None:
        source = self.sources.get(digest)
        if source is None:
            return None
        try:
            chunk = self._chunk(source, digest, ask)
        except (LibraError, OSError, ValueError) as error:
            log.warning("stream.source_failed", digest=digest[:16], detail=str(error))
            self.withdraw(digest)
            return _nothing(receiver, ask, Status.GONE)
        if chunk is None:
            return None
        piece = memoryview(chunk.payload)[ask.offset : ask.offset + min(ask.length, PIECE_BYTES)]
        answer = Answer(ask.ticket, Status.DATA, chunk.encoding, len(chunk.payload), len(piece))
        return receiver, answer, piece

    def _chunk(self, source: ChunkSource, digest: str, ask: Ask) -> Chunk | None:
        key = (digest, ask.number, ask.base)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        chunk = source.chunk(ask.number, ask.base)
        if chunk is not None and chunk.encoding is not Encoding.FULL:
            self._kept[key] = chunk
            while len(self._kept) > KEPT_CHUNKS:
                self._kept.pop(next(iter(self._kept)))
        return chunk


def _nothing(receiver: str, ask: Ask, status: Status) -> Reply:
    return receiver, Answer(ask.ticket, status, Encoding.FULL, 0, 0), b""


def pack_ask(digest: str, ask: Ask) -> bytes:
    """As a frame."""
    return pack([digest, ask.ticket, ask.number, ask.base, ask.offset, ask.length])


def unpack_ask(peer: str, frame: bytes) -> tuple[str, Ask]:
    """Read a frame.

    Raises:
        ProtocolError: it is no question.
    """
    items = _items(peer, frame, (str, int, int, str, int, int))
    digest, ticket, number, base, offset, length = items
    if min(ticket, number, offset, length) < 0:
        raise ProtocolError(peer, "a negative number")
    return digest, Ask(ticket, number, base, offset, length)


def pack_answer(answer: Answer) -> bytes:
    """As a frame; the piece is the next one."""
    return pack([answer.ticket, answer.status, answer.encoding, answer.total, answer.length])


def unpack_answer(peer: str, frame: bytes) -> Answer:
    """Read a frame.

    Raises:
        ProtocolError: it is no answer.
    """
    ticket, status, encoding, total, length = _items(peer, frame, (int,) * 5)
    try:
        return Answer(ticket, Status(status), Encoding(encoding), total, length)
    except ValueError as error:
        raise ProtocolError(peer, str(error)) from error


def _items(peer: str, frame: bytes, types: tuple[type, ...]) -> list[Any]:
    items = unpack(peer, frame)
    if not isinstance(items, list) or tuple(map(type, cast("list[Any]", items))) != types:
        raise ProtocolError(peer, "not a message of a stream")
    return cast("list[Any]", items)
