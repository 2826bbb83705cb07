"""Differences between two versions of the same bytes, chunk by chunk. Lossless for any bytes. Pure.

An optimizer step at a small learning rate leaves most bfloat16 weights as they were and moves the
others by one unit in the last place. Two encodings use that, and the smaller result travels:

    GAPS  head, then four parts: distances between changed elements as bytes, those that are longer
          than a byte as uint32, the changes (modulo the element's range, zigzag) by byte planes,
          and what follows the last whole element
    XOR   head, then the byte planes of the exclusive or, one part each, and the same end

Each part is a zstd frame of its own, because their statistics differ.
"""

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

from common.errors import LibraError
from common.stream import Chunk, Encoding

FULL_SHARE = 0.25
"""A difference that is longer than this share of the chunk is not worth its work."""
CHANGED_SHARE_MAX = 0.2
"""With more changed elements gaps are never the shorter encoding."""
LEVEL = 1
"""Of zstd: higher ones cost more than the bytes they save."""
LONG_GAP = 255
_HEAD = struct.Struct("<BII")
"""Element size, changed elements, long gaps."""
_PART = struct.Struct("<I")

Bytes = NDArray[np.uint8]
Elements = NDArray[np.unsignedinteger]


class DeltaUnreadable(LibraError):
    """The bytes are no difference that `encode` made."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a delta: {reason}")
        self.reason = reason


def encode(base: memoryview | bytes, new: memoryview | bytes, itemsize: int) -> Chunk:
    """Say what turns `base` into `new`, in the fewest bytes of what is tried.

    Args:
        base: what the receiver has; as long as `new`.
        new: what it shall have.
        itemsize: bytes of an element: 1, 2 or 4.
    """
    assert len(base) == len(new)
    assert itemsize in (1, 2, 4)
    full = Chunk(Encoding.FULL, new)
    old_items, items = _elements(base, itemsize), _elements(new, itemsize)
    end = bytes(new[items.nbytes :])
    changed = np.flatnonzero(old_items != items)
    if changed.size <= CHANGED_SHARE_MAX * items.size:
        gaps = _encode_gaps(changed, old_items, items, end)
        if len(gaps) <= FULL_SHARE * len(new) / 4:  # XOR is hardly ever shorter then.
            return Chunk(Encoding.GAPS, gaps)
    else:
        gaps = None
    xor = _encode_xor(old_items, items, end)
    encoding, payload = (
        (Encoding.GAPS, gaps) if gaps is not None and len(gaps) <= len(xor) else (Encoding.XOR, xor)
    )
    return Chunk(encoding, payload) if len(payload) <= FULL_SHARE * len(new) else full


def decode_into(chunk: Chunk, base: memoryview | bytes, out: memoryview) -> None:
    """Write what `encode` was given as `new`.

    Args:
        chunk: from `encode`; bytes of any origin are safe.
        base: the same as then.
        out: writable, as long as `base`. Undefined afterwards if this raises.

    Raises:
        DeltaUnreadable: the bytes are malformed. Others may decode to nonsense: check the hash.
    """
    payload = memoryview(chunk.payload)
    if chunk.encoding is Encoding.FULL:
        if len(payload) != len(out):
            raise DeltaUnreadable("length")
        out[:] = payload
        return
    if len(base) != len(out) or len(payload) < _HEAD.size:
        raise DeltaUnreadable("length")
    itemsize, count, long_count = _HEAD.unpack_from(payload)
    if itemsize not in (1, 2, 4):
        raise DeltaUnreadable("element size")
    old_items = _elements(base, itemsize)
    parts = _Parts(payload)
    if chunk.encoding is Encoding.GAPS:
        items = _decode_gaps(parts, old_items, count, long_count)
    else:
        items = old_items ^ _join(parts, old_items.size, old_items.dtype)
    out[: items.nbytes] = items.view(np.uint8).data
    out[items.nbytes :] = parts.next(len(out) - items.nbytes).data
    if parts.left:
        raise DeltaUnreadable("bytes after the end")


def _encode_gaps(
    changed: NDArray[np.intp], old_items: Elements, items: Elements, end: bytes
) -> bytes:
    gaps = (np.diff(changed, prepend=-1) - 1).astype(np.uint32)
    short = np.minimum(gaps, LONG_GAP).astype(np.uint8)
    long = gaps[gaps >= LONG_GAP]
    moved = items[changed] - old_items[changed]
    parts = [short.tobytes(), long.tobytes(), *_planes(_zigzag(moved)), end]
    return _assemble(items.itemsize, changed.size, long.size, parts)


def _encode_xor(old_items: Elements, items: Elements, end: bytes) -> bytes:
    return _assemble(items.itemsize, 0, 0, [*_planes(old_items ^ items), end])


def _assemble(itemsize: int, count: int, long_count: int, parts: list[bytes]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    pieces = [_HEAD.pack(itemsize, count, long_count)]
    for part in parts:
        packed = compressor.compress(part) if part else b""
        pieces += [_PART.pack(len(packed)), packed]
    return b"".join(pieces)


class _Parts:
    """The parts of a payload, in order."""

    def __init__(self, payload: memoryview) -> None:
        self._payload, self._at = payload, _HEAD.size
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._payload) - self._at

    def next(self, expected: int) -> Bytes:
        """Unpack the next part, which must have so many bytes."""
        if self.left < _PART.size:
            raise DeltaUnreadable("it ends early")
        (length,) = _PART.unpack_from(self._payload, self._at)
        start = self._at + _PART.size
        self._at = start + length
        if self.left < 0:
            raise DeltaUnreadable("it ends early")
        packed = self._payload[start : self._at]
        part = self._unpack(packed, expected) if length else b""
        if len(part) != expected:
            raise DeltaUnreadable("length of a part")
        return np.frombuffer(part, np.uint8)

    def _unpack(self, packed: memoryview, expected: int) -> bytes:
        try:
            # A frame that says it is longer must not take the memory.
            if zstandard.frame_content_size(packed) != expected:
                raise DeltaUnreadable("length of a part")
            return self._decompressor.decompress(packed)
        except zstandard.ZstdError as error:
            raise DeltaUnreadable(str(error)) from error


def _decode_gaps(parts: _Parts, old_items: Elements, count: int, long_count: int) -> Elements:
    if count > old_items.size or long_count > count:
        raise DeltaUnreadable("more changes than elements")
    gaps = parts.next(count).astype(np.int64)
    long = parts.next(4 * long_count).view(np.uint32)
    is_long = gaps == LONG_GAP
    if np.count_nonzero(is_long) != long_count:
        raise DeltaUnreadable("number of long gaps")
    gaps[is_long] = long
    places = np.cumsum(gaps + 1) - 1
    if count and places[-1] >= old_items.size:
        raise DeltaUnreadable("a change past the end")
    items = old_items.copy()
    items[places] += _unzigzag(_join(parts, count, old_items.dtype))
    return items


def _elements(content: memoryview | bytes, itemsize: int) -> Elements:
    """The whole elements."""
    count = len(content) // itemsize
    return np.frombuffer(content, f"<u{itemsize}", count)


def _planes(items: Elements) -> list[bytes]:
    """All lowest bytes, then all second ones, and so on."""
    table = items.view(np.uint8).reshape(-1, items.itemsize)
    return [table[:, plane].tobytes() for plane in range(items.itemsize)]


def _join(parts: _Parts, count: int, dtype: "np.dtype[np.unsignedinteger]") -> Elements:
    table = np.empty((count, dtype.itemsize), np.uint8)
    for plane in range(dtype.itemsize):
        table[:, plane] = parts.next(count)
    return table.reshape(-1).view(dtype)


def _zigzag(moved: Elements) -> Elements:
    """Small steps either way become small numbers: 0, -1, 1, -2 to 0, 1, 2, 3."""
    negative = moved >> np.array(8 * moved.itemsize - 1, moved.dtype)
    return (moved << np.array(1, moved.dtype)) ^ (np.array(0, moved.dtype) - negative)


def _unzigzag(folded: Elements) -> Elements:
    one = np.array(1, folded.dtype)
    return (folded >> one) ^ (np.array(0, folded.dtype) - (folded & one))
