"""What a receiver asks for next, and what becomes of what it gets. No sockets, no clock.

One `Transfer` is one call of `Streamer.fetch`. Its owner sends what `asks` names to `source`, puts
what arrives where `lands` says, and tells `landed`; then it looks whether the transfer is `done`,
whether `source` is another one now, and when to look again at the latest.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from common.delta import DeltaUnreadable, decode_into
from common.digests import hash_chunk
from common.errors import ShardCorrupt, StreamBroken
from common.messages.blob import Blob
from common.stream import PIECE_BYTES, PIECES_OUTSTANDING, Base, Chunk, Encoding, Fetched
from common.weights import NO_VERSION

TRIES_MAX = 3
"""Wrong answers for one chunk until a source is given up."""
SILENCE_S_MAX = 5.0
"""After which the next source is asked. A server that only has to wait says so every second."""


class Status(IntEnum):
    """What an answer is."""

    DATA = 0
    WAIT = 1
    """It is on its way to the source."""
    GONE = 2
    """The source has it no more, or never had."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One piece that is wanted."""

    ticket: int
    number: int
    base: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Goes before a piece."""

    ticket: int
    status: Status
    encoding: Encoding
    total: int
    """Bytes of the whole chunk as it travels."""
    length: int
    """Bytes of the piece."""


@dataclass(slots=True)
class _Arriving:
    """A chunk of which not all pieces are here."""

    base: str
    unasked: deque[tuple[int, int]]
    outstanding: int = 0
    encoding: Encoding | None = None
    payload: bytearray | None = None
    """Where a difference is gathered; a full chunk goes straight to its place."""
    wrong: bool = False


@dataclass
class Transfer:
    """The state of one fetch."""

    blob: Blob
    into: memoryview
    have: bytearray
    sources: Sequence[str]
    wanted: Sequence[int]
    base: Base | None
    began: float
    timeout_s: float
    bytes_per_s_max: int
    on_chunk: Callable[[int], None]
    received_bytes: int = 0
    chunks: int = 0
    deltas: int = 0
    wrong: int = 0
    _current: int = 0
    _tickets: int = 0
    _heard: float = 0.0
    _free_at: float = 0.0
    """When the rate lets the next piece be asked for."""
    _waiting: deque[int] = field(default_factory=deque[int])
    _arriving: dict[int, _Arriving] = field(default_factory=dict[int, _Arriving])
    _asked: dict[int, Ask] = field(default_factory=dict[int, Ask])
    _tries: dict[int, int] = field(default_factory=dict[int, int])
    _without_base: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        count = len(self.blob.chunks)
        assert len(self.into) == self.blob.length, (len(self.into), self.blob.length)
        assert len(self.have) == count == -(-self.blob.length // self.blob.chunk_bytes)
        assert self.sources, "nobody to ask"
        if self.base is not None and len(self.base.view) != self.blob.length:
            self.base = None
        self._waiting.extend(number for number in self.wanted if not self.have[number])
        self._heard = self._free_at = self.began
        silence_s = self.timeout_s / (len(self.sources) + 1)
        self._silence_s = min(SILENCE_S_MAX, silence_s)

    @property
    def done(self) -> bool:
        """Whether everything wanted is here."""
        return not self._waiting and not self._arriving

    @property
    def source(self) -> str:
        """Whom to ask now."""
        return self.sources[self._current]

    @property
    def fetched(self) -> Fetched:
        """What it took so far."""
        return Fetched(self.chunks, self.received_bytes, self.deltas, self.wrong)

    def asks(self, now: float) -> list[Ask]:
        """The pieces to ask `source` for now."""
        asks: list[Ask] = []
        while len(self._asked) < PIECES_OUTSTANDING and now >= self._free_at:
            piece = self._next_piece()
            if piece is None:
                break
            number, (offset, length) = piece
            if not self._asked:
                self._heard = now  # Silence counts from the first question.
            self._tickets += 1
            ask = Ask(self._tickets, number, self._arriving[number].base, offset, length)
            self._asked[ask.ticket] = ask
            self._arriving[number].outstanding += 1
            asks.append(ask)
            if self.bytes_per_s_max:
                self._free_at = max(self._free_at, now) + length / self.bytes_per_s_max
        return asks

    def wake_at(self) -> float:
        """When to call `expire` (and `asks`) at the latest."""
        at = self.began + self.timeout_s
        if self._asked:
            at = min(at, self._heard + self._silence_s)
        more = self._waiting or any(arriving.unasked for arriving in self._arriving.values())
        if more and len(self._asked) < PIECES_OUTSTANDING:
            at = min(at, self._free_at)
        return at

    def lands(self, answer: Answer) -> memoryview | None:
        """Where a piece goes; None when it is not wanted (any more) or cannot be right."""
        ask = self._asked.get(answer.ticket)
        if ask is None or answer.status is not Status.DATA:
            return None
        arriving, size = self._arriving[ask.number], self._size(ask.number)
        expected = min(ask.length, max(answer.total - ask.offset, 0))
        same = arriving.encoding in (None, answer.encoding)
        if not same or answer.length != expected or not 0 < answer.total <= size:
            return None
        if answer.encoding is Encoding.FULL:
            room = self._view(self.into, ask.number)
        else:
            if arriving.payload is None:
                arriving.payload = bytearray(answer.total)
            room = memoryview(arriving.payload)
        known = answer.encoding is Encoding.FULL or arriving.base
        if not known or len(room) != answer.total:
            return None
        return room[ask.offset : ask.offset + answer.length]

    def landed(self, answer: Answer, now: float, *, placed: bool) -> None:
        """Count an answer; check the chunk with its last piece.

        Args:
            answer: as it came.
            now: the time.
            placed: whether the piece went where `lands` said; False for anything else.

        Raises:
            StreamBroken, ShardCorrupt: it was the last source's last chance.
        """
        ask = self._asked.get(answer.ticket)
        if ask is None:
            return
        self._heard = now
        match answer.status:
            case Status.WAIT:
                return
            case Status.GONE:
                self._next_source("it has it no more", now)
                return
            case Status.DATA:
                pass
        del self._asked[answer.ticket]
        self.received_bytes += answer.length
        if self.bytes_per_s_max and answer.length < ask.length:  # A difference weighs less.
            self._free_at -= (ask.length - answer.length) / self.bytes_per_s_max
        arriving = self._arriving[ask.number]
        arriving.outstanding -= 1
        if not placed:
            arriving.wrong = True
            arriving.unasked.clear()
        elif arriving.encoding is None:
            self._plan_rest(arriving, answer, ask)
        if not arriving.outstanding and not arriving.unasked:
            self._complete(ask.number, arriving, now)

    def lost(self, reason: str, now: float) -> None:
        """The connection to `source` is gone.

        Raises:
            StreamBroken: it was the last one.
        """
        self._next_source(reason, now)

    def expire(self, now: float) -> None:
        """Give up on what is overdue.

        Raises:
            StreamBroken: the time is up, or the last source is silent.
        """
        if self.done:
            return
        if now >= self.began + self.timeout_s:
            raise self._broken(f"not complete within {self.timeout_s:g} s")
        if self._asked and now >= self._heard + self._silence_s:
            self._next_source(f"silent for {self._silence_s:.3g} s", now)

    def _next_piece(self) -> tuple[int, tuple[int, int]] | None:
        for number, arriving in self._arriving.items():
            if arriving.unasked:
                return number, arriving.unasked.popleft()
        if not self._waiting:
            return None
        number = self._waiting.popleft()
        size = self._size(number)
        base = self.base.digest if self.base and number not in self._without_base else ""
        # How long a difference is, its first piece tells.
        starts = [0] if base else range(0, size, PIECE_BYTES)
        pieces = deque((start, min(PIECE_BYTES, size - start)) for start in starts)
        self._arriving[number] = _Arriving(base, pieces)
        return number, pieces.popleft()

    def _plan_rest(self, arriving: _Arriving, answer: Answer, ask: Ask) -> None:
        """The first piece says how the chunk travels."""
        arriving.encoding = answer.encoding
        if arriving.base and ask.offset == 0:
            starts = range(answer.length, answer.total, PIECE_BYTES)
            arriving.unasked.extend((s, min(PIECE_BYTES, answer.total - s)) for s in starts)

    def _complete(self, number: int, arriving: _Arriving, now: float) -> None:
        del self._arriving[number]
        if not arriving.wrong and self._decoded(number, arriving) and self._right(number):
            self.have[number] = 1
            self.chunks += 1
            self.deltas += arriving.encoding is not Encoding.FULL
            self.on_chunk(number)
            return
        self.wrong += 1
        self._waiting.appendleft(number)
        self._without_base.add(number)  # A damaged base gives wrong bytes for ever.
        self._tries[number] = self._tries.get(number, 0) + 1
        if self._tries[number] >= TRIES_MAX:
            if self._current + 1 == len(self.sources):
                where = f"chunk {number} of {self.blob.digest[:16]} from {self.source}"
                raise ShardCorrupt(NO_VERSION, where)
            self._next_source(f"wrong bytes {TRIES_MAX} times", now)

    def _decoded(self, number: int, arriving: _Arriving) -> bool:
        if arriving.encoding is Encoding.FULL:
            return True
        assert self.base is not None
        assert arriving.encoding is not None
        assert arriving.payload is not None
        chunk = Chunk(arriving.encoding, memoryview(arriving.payload))
        try:
            decode_into(chunk, self._view(self.base.view, number), self._view(self.into, number))
        except DeltaUnreadable:
            return False
        return True

    def _right(self, number: int) -> bool:
        return hash_chunk(self._view(self.into, number)) == self.blob.chunks[number]

    def _view(self, whole: memoryview, number: int) -> memoryview:
        size = self.blob.chunk_bytes
        return whole[number * size : (number + 1) * size]

    def _size(self, number: int) -> int:
        start = number * self.blob.chunk_bytes
        return min(self.blob.chunk_bytes, self.blob.length - start)

    def _next_source(self, reason: str, now: float) -> None:
        if self._current + 1 == len(self.sources):
            raise self._broken(reason)
        self._current += 1
        self._waiting.extendleft(reversed(self._arriving))
        self._arriving.clear()
        self._asked.clear()
        self._tries.clear()
        self._heard = now

    def _broken(self, reason: str) -> StreamBroken:
        first = min([*self._arriving, *self._waiting])
        return StreamBroken(self.source, self.blob.digest, first, reason)
