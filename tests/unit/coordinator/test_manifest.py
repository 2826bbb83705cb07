import json
from pathlib import Path

import pytest

from services.coordinator.manifest import SegmentUnreadable, build_manifest

TENSORS = {"a": ("F32", [2, 2], b"\x01" * 16), "b": ("BF16", [3], b"\x02" * 6)}


def write(path: Path, cut: int = 0) -> str:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in TENSORS.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    table = json.dumps(header).encode()
    blob = len(table).to_bytes(8, "little") + table + data
    path.write_bytes(blob[: len(blob) - cut])
    return str(path)


def test_a_manifest_names_every_tensor_and_where_its_bytes_are(tmp_path: Path) -> None:
    segment = write(tmp_path / "w0")
    manifest = build_manifest(7, segment)
    content = Path(segment).read_bytes()
    assert [tensor.name for tensor in manifest.tensors] == ["a", "b"]
    for tensor in manifest.tensors:
        dtype, shape, data = TENSORS[tensor.name]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert content[tensor.offset : tensor.offset + tensor.length] == data
    assert manifest.length == len(content)


def test_the_digest_names_the_content_not_the_file(tmp_path: Path) -> None:
    one = build_manifest(1, write(tmp_path / "w0"))
    two = build_manifest(2, write(tmp_path / "w1"))
    assert one.digest == two.digest
    changed = Path(write(tmp_path / "w2"))
    blob = bytearray(changed.read_bytes())
    blob[-1] ^= 1
    changed.write_bytes(blob)
    assert build_manifest(3, str(changed)).digest != one.digest


@pytest.mark.parametrize("cut", [1, 6, 200])
def test_half_a_segment_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(SegmentUnreadable):
        build_manifest(1, write(tmp_path / "w0", cut=cut))


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SegmentUnreadable, match="nowhere"):
        build_manifest(1, str(tmp_path / "nowhere"))
