"""What `Transfer` asks for and what it believes, without any network."""

from typing import Any

import pytest
import xxhash

from common.errors import StreamBroken
from common.messages.blob import Blob
from common.stream import PIECE_BYTES, PIECES_OUTSTANDING, Base, Encoding, ignore
from common.stream_receive import Answer, Ask, Status, Transfer

CHUNK = 2 * PIECE_BYTES


def transfer(
    chunks: int = 8, sources: tuple[str, ...] = ("a",), rate: int = 0, base: str = ""
) -> Transfer:
    """Of zeros, from time 0."""
    digest = xxhash.xxh3_64_intdigest(bytes(CHUNK))
    length = chunks * CHUNK
    blob = Blob(path="", length=length, chunk_bytes=CHUNK, chunks=[digest] * chunks, digest="zeros")
    return Transfer(
        blob=blob,
        into=memoryview(bytearray(length)),
        have=bytearray(chunks),
        sources=sources,
        wanted=range(chunks),
        base=Base(base, memoryview(bytes(length))) if base else None,
        began=0.0,
        timeout_s=30.0,
        bytes_per_s_max=rate,
        on_chunk=ignore,
    )


def full(ask: Ask) -> Answer:
    return Answer(ask.ticket, Status.DATA, Encoding.FULL, CHUNK, ask.length)


def test_no_more_than_one_chunk_of_four_mib_is_outstanding() -> None:
    receiving = transfer()
    asks = receiving.asks(0.0)
    assert len(asks) == PIECES_OUTSTANDING
    assert sum(ask.length for ask in asks) == 4 << 20
    assert receiving.asks(0.0) == []


@pytest.mark.parametrize(
    "lie",
    [
        {"total": CHUNK - 1},
        {"total": 0},
        {"total": 1 << 40},
        {"length": PIECE_BYTES - 1},
        {"length": -1},
        {"encoding": Encoding.XOR},
        {"ticket": 99},
    ],
)
def test_an_answer_that_cannot_be_right_has_no_place(lie: dict[str, Any]) -> None:
    receiving = transfer()
    (ask, *_) = receiving.asks(0.0)
    right = full(ask)
    assert receiving.lands(right) is not None
    fields = {name: getattr(right, name) for name in Answer.__slots__} | lie
    assert receiving.lands(Answer(**fields)) is None


def test_a_late_answer_of_an_earlier_source_is_ignored() -> None:
    receiving = transfer(sources=("a", "b"))
    (ask, *_) = receiving.asks(0.0)
    receiving.lost("gone", 1.0)
    assert receiving.source == "b"
    assert receiving.lands(full(ask)) is None


def test_with_a_base_the_first_piece_tells_how_much_there_is() -> None:
    receiving = transfer(base="old")
    asks = receiving.asks(0.0)
    assert [ask.number for ask in asks] == list(range(8))
    assert {ask.offset for ask in asks} == {0}
    assert receiving.lands(full(asks[0])) is not None
    receiving.landed(full(asks[0]), 0.0, placed=True)
    (rest,) = receiving.asks(0.0)
    assert (rest.number, rest.offset) == (0, PIECE_BYTES)


def test_a_rate_spaces_the_questions() -> None:
    receiving = transfer(rate=PIECE_BYTES)
    assert len(receiving.asks(0.0)) == 1
    assert receiving.wake_at() == 1.0
    assert len(receiving.asks(0.5)) == 0
    assert len(receiving.asks(1.0)) == 1


def test_a_source_that_says_wait_is_not_silent() -> None:
    receiving = transfer()
    (ask, *_) = receiving.asks(0.0)
    receiving.landed(Answer(ask.ticket, Status.WAIT, Encoding.FULL, 0, 0), 4.0, placed=False)
    receiving.expire(8.0)
    with pytest.raises(StreamBroken, match="silent"):
        receiving.expire(9.1)


def test_reassurance_does_not_move_the_deadline() -> None:
    receiving = transfer()
    for now in range(29):
        (ask, *_) = receiving.asks(float(now)) or [Ask(1, 0, "", 0, 0)]
        receiving.landed(
            Answer(ask.ticket, Status.WAIT, Encoding.FULL, 0, 0), float(now), placed=False
        )
    with pytest.raises(StreamBroken, match="not complete within 30 s"):
        receiving.expire(30.0)
