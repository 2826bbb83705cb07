from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import ShardCorrupt, VersionGone
from common.messages.coordinator import Manifest
from services.rollout.segment import Segment, copy_checked, open_checked
from tests.support.models import write_segment

STATE = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.zeros(1, dtype=torch.float16),
}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_segment(tmp_path / "segment", STATE, 7)


def test_tensors_come_back_with_name_shape_and_dtype(manifest: Manifest) -> None:
    tensors = dict(open_checked(manifest).tensors())
    assert tensors.keys() == STATE.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in STATE.items())
    assert all(tensors[name].dtype == tensor.dtype for name, tensor in STATE.items())


def test_views_outlive_the_segment_and_its_file(manifest: Manifest) -> None:
    tensors = dict(open_checked(manifest).tensors())
    Path(manifest.segment).unlink()
    assert torch.equal(tensors["a"], STATE["a"])


def test_writing_to_a_view_does_not_reach_the_file(manifest: Manifest) -> None:
    before = Path(manifest.segment).read_bytes()
    for _, tensor in open_checked(manifest).tensors():
        tensor.zero_()
    assert Path(manifest.segment).read_bytes() == before


def test_a_changed_byte_is_found_in_its_chunk(manifest: Manifest) -> None:
    content = bytearray(Path(manifest.segment).read_bytes())
    content[-1] ^= 1
    Path(manifest.segment).write_bytes(content)
    with pytest.raises(ShardCorrupt, match="chunk 0"):
        open_checked(manifest)


def test_another_length_is_corrupt(manifest: Manifest) -> None:
    with Path(manifest.segment).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ShardCorrupt, match="length"):
        Segment.open(manifest)


def test_too_few_hashes_are_corrupt(manifest: Manifest) -> None:
    with pytest.raises(ShardCorrupt, match="number of chunks"):
        open_checked(manifest.model_copy(update={"chunks": []}))


def test_a_missing_file_is_a_version_gone(manifest: Manifest) -> None:
    Path(manifest.segment).unlink()
    with pytest.raises(VersionGone):
        Segment.open(manifest)


def test_copies_stay_when_the_file_is_written_again(manifest: Manifest) -> None:
    copies = copy_checked(manifest).tensors
    Path(manifest.segment).write_bytes(bytes(manifest.length))
    assert all(torch.equal(copies[name], tensor) for name, tensor in STATE.items())


def test_a_writer_that_comes_while_it_is_copied_is_found(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = Segment.tensors

    def overtaken(segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(segment)
        with Path(manifest.segment).open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")

    monkeypatch.setattr(Segment, "tensors", overtaken)
    with pytest.raises(ShardCorrupt, match="chunk 0"):
        copy_checked(manifest)
