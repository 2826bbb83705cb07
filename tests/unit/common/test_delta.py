"""What `common.delta` promises: exact for any bytes, small for steps, safe for garbage."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.delta import DeltaUnreadable, decode_into, encode
from common.stream import Chunk, Encoding

SIZES = st.sampled_from([1, 2, 4])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two byte strings of equal length, alike or not."""
    old = draw(st.binary(max_size=600)) * draw(st.integers(1, 40))
    if draw(st.booleans()):
        return old, draw(st.binary(min_size=len(old), max_size=len(old)))
    new = bytearray(old)
    for place in draw(st.lists(st.integers(0, max(len(old) - 1, 0)), max_size=30)):
        if new:
            new[place] ^= draw(st.integers(1, 255))
    return old, bytes(new)


def decoded(chunk: Chunk, base: bytes) -> bytes:
    out = bytearray(len(base))
    decode_into(chunk, base, memoryview(out))
    return bytes(out)


def bf16_step(share: float, count: int = 200_000) -> tuple[bytes, bytes]:
    """Elements of which a share moves by one unit in the last place."""
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, count, dtype=np.uint16)
    moved = random.random(count) < share
    new = old + moved * random.choice(np.array([1, 65535], np.uint16), count)
    return old.tobytes(), new.astype(np.uint16).tobytes()


@given(pairs(), SIZES)
def test_a_difference_gives_back_the_bytes(pair: tuple[bytes, bytes], itemsize: int) -> None:
    old, new = pair
    chunk = encode(old, new, itemsize)
    assert decoded(chunk, old) == new
    assert len(chunk.payload) <= len(new)


@pytest.mark.parametrize(("share", "ratio"), [(0.011, 70), (0.074, 14)])
def test_a_step_of_a_small_rate_is_a_small_difference(share: float, ratio: float) -> None:
    old, new = bf16_step(share)
    chunk = encode(old, new, 2)
    assert chunk.encoding is Encoding.GAPS
    assert len(new) / len(chunk.payload) > ratio
    assert decoded(chunk, old) == new


def test_a_low_byte_that_changes_everywhere_goes_by_planes() -> None:
    old = np.arange(100_000, dtype=np.uint32)
    new = old ^ np.uint32(1)
    chunk = encode(old.tobytes(), new.tobytes(), 4)
    assert chunk.encoding is Encoding.XOR
    assert decoded(chunk, old.tobytes()) == new.tobytes()


def test_noise_travels_as_it_is() -> None:
    old, new = np.random.default_rng(1).bytes(5000), np.random.default_rng(2).bytes(5000)
    assert encode(old, new, 2).encoding is Encoding.FULL


def test_changes_far_apart_are_found_again() -> None:
    old = bytes(200_000)
    new = bytearray(old)
    new[0] = new[70_000] = new[199_999] = 1
    assert decoded(encode(old, bytes(new), 2), old) == new


@given(st.binary(max_size=200), st.sampled_from(list(Encoding)), st.integers(0, 50))
def test_garbage_is_refused_or_decodes_to_something(
    payload: bytes, encoding: Encoding, length: int
) -> None:
    with contextlib.suppress(DeltaUnreadable):
        decoded(Chunk(encoding, payload), bytes(length))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_decodes_to_something(place: int, flip: int) -> None:
    old, new = bf16_step(0.05, 2000)
    chunk = encode(old, new, 2)
    damaged = bytearray(chunk.payload)
    damaged[place % len(damaged)] ^= flip
    with contextlib.suppress(DeltaUnreadable):
        decoded(Chunk(chunk.encoding, bytes(damaged)), old)
