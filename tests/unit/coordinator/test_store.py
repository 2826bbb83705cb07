"""What other hosts are given: chunks of segments, or differences to the version before."""

import contextlib
import json
import random
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.delta import decode_into
from common.errors import VersionGone
from common.messages.coordinator import Manifest
from common.segment import element_bytes
from common.stream import Chunk, ChunkSource, Encoding
from services.coordinator.manifest import build_manifest
from services.coordinator.store import VersionStore

Values = array
ELEMENTS = 3 << 20
"""Of two bytes each: one whole chunk of 4 MiB, and a half one."""


class Server:
    """Remembers what it serves."""

    def __init__(self) -> None:
        self.address = "stream://here"
        self.offered: dict[str, ChunkSource] = {}

    def offer(self, digest: str, source: ChunkSource) -> None:
        self.offered[digest] = source

    def withdraw(self, digest: str) -> None:
        del self.offered[digest]

    def arrived(self) -> None:
        raise AssertionError("the coordinator has every chunk from the start")


class Store(VersionStore):
    """With the server beside it."""

    def __init__(self, directory: Path) -> None:
        self.server = Server()
        super().__init__(self.server, directory, "run")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path)) as store:
        yield store


@pytest.fixture(scope="module")
def weights() -> Values:
    return array("H", random.Random(1).randbytes(2 * ELEMENTS))


def publish(path: Path, version: int, values: Values) -> Manifest:
    data = values.tobytes()
    entry = {"dtype": "BF16", "shape": [len(values)], "data_offsets": [0, len(data)]}
    table = json.dumps({"w": entry}).encode()
    table += b" " * (-(len(table) + 8) % 64)
    path.write_bytes(len(table).to_bytes(8, "little") + table + data)
    return build_manifest(version, str(path))


def publish_step(store: Store, directory: Path, weights: Values) -> tuple[Manifest, Manifest]:
    """Two versions, one optimizer step apart, both offered."""
    one = publish(directory / "w0", 1, weights)
    two = publish(directory / "w1", 2, stepped(weights, 0.01))
    store.offer(one, None)
    store.offer(two, one)
    return one, two


def stepped(values: Values, share: float, seed: int = 0) -> Values:
    """After an optimizer step: some elements differ by one unit in the last place."""
    rng, changed = random.Random(seed), array("H", values)
    for index in rng.sample(range(len(values)), int(share * len(values))):
        changed[index] ^= 1
    return changed


def whole(source: ChunkSource, manifest: Manifest, base: bytes = b"", digest: str = "") -> bytes:
    """Everything that a receiver gets, put together."""
    content = bytearray(manifest.length)
    for number in range(len(manifest.chunks)):
        place = slice(number * manifest.chunk_bytes, (number + 1) * manifest.chunk_bytes)
        chunk = source.chunk(number, digest)
        assert chunk is not None
        if chunk.encoding is Encoding.FULL:
            content[place] = chunk.payload
        else:
            decode_into(chunk, memoryview(base)[place], memoryview(content)[place])
    return bytes(content)


def encodings(source: ChunkSource, digest: str) -> list[Encoding]:
    chunks: list[Chunk | None] = [source.chunk(number, digest) for number in (0, 1)]
    return [chunk.encoding for chunk in chunks if chunk is not None]


def test_versions_are_given_in_full_or_as_differences_and_exactly(
    store: Store, tmp_path: Path, weights: Values
) -> None:
    server = store.server
    one, two = publish_step(store, tmp_path, weights)
    old, new = Path(one.segment).read_bytes(), Path(two.segment).read_bytes()
    source = server.offered[two.digest]
    assert whole(source, two) == new
    assert not list(tmp_path.glob("libra-*")), "nothing is encoded before somebody asks"
    for _ in range(2):
        assert whole(source, two, old, one.digest) == new
    assert Encoding.FULL not in encodings(source, one.digest)
    assert encodings(source, "another base") == [Encoding.FULL] * 2
    (deltas,) = tmp_path.glob("libra-run-d-*")
    assert deltas.stat().st_size < len(new) / 20
    store.close()
    assert not list(tmp_path.glob("libra-*"))
    assert server.offered == {}


def test_no_difference_is_made_from_a_segment_that_may_be_overwritten(
    store: Store, tmp_path: Path, weights: Values
) -> None:
    server = store.server
    one, two = publish_step(store, tmp_path, weights)
    source = server.offered[two.digest]
    source.chunk(0, one.digest)
    store.keep([two], None)
    assert list(server.offered) == [two.digest]
    # What was encoded in time is right for ever.
    first, second = encodings(source, one.digest)
    assert first is not Encoding.FULL
    assert second is Encoding.FULL


def test_a_base_is_kept_as_long_as_it_is_asked_for(
    store: Store, tmp_path: Path, weights: Values
) -> None:
    server = store.server
    one, two = publish_step(store, tmp_path, weights)
    store.keep([two], one)
    assert list(server.offered) == [two.digest]
    assert Encoding.FULL not in encodings(server.offered[two.digest], one.digest)


def test_equal_weights_in_another_segment_are_read_from_that_one(
    store: Store, tmp_path: Path, weights: Values
) -> None:
    server = store.server
    one = publish(tmp_path / "w0", 1, weights)
    again = publish(tmp_path / "w1", 2, weights)
    assert again.digest == one.digest
    store.offer(one, None)
    first = server.offered[one.digest]
    store.offer(again, one)
    assert server.offered[one.digest] is not first
    store.keep([again], None)
    assert whole(server.offered[one.digest], again) == Path(again.segment).read_bytes()


def test_a_version_of_another_shape_is_no_base(
    store: Store, tmp_path: Path, weights: Values
) -> None:
    server = store.server
    one = publish(tmp_path / "w0", 1, weights[: ELEMENTS // 2])
    two = publish(tmp_path / "w1", 2, weights)
    store.offer(one, None)
    store.offer(two, one)
    assert encodings(server.offered[two.digest], one.digest) == [Encoding.FULL] * 2


def test_a_segment_that_is_gone_is_not_offered(tmp_path: Path, weights: Values) -> None:
    one = publish(tmp_path / "w0", 1, weights[:64])
    Path(one.segment).unlink()
    with pytest.raises(VersionGone):
        VersionStore(Server(), tmp_path, "run").offer(one, None)


def test_what_a_killed_coordinator_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    names = ["libra-run-d-abc", "libra-run-w0", "libra-run-m-abc", "libra-run2-d-abc"]
    for name in names:
        (tmp_path / name).touch()
    VersionStore(Server(), tmp_path, "run").sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_the_item_size_is_that_of_most_bytes(tmp_path: Path, weights: Values) -> None:
    assert element_bytes(publish(tmp_path / "w0", 1, weights[:64])) == 2
