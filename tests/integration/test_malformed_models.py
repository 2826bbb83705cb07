"""Model files that are JSON, but not what transformers expects: refused in one line each."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.cli.check import check_job
from tests.support.jobs import make_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def refused(job: Path, copy: Path, name: str, content: str) -> None:
    shutil.copytree(job.parent / "model", copy)
    (copy / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        check_job(job, [f"model.path={copy}"])
    assert all("model.path" in problem for problem in error.value.problems)
    assert "\n" not in error.value.problems[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[" * 100_000),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"a":' * 5000),
        ("tokenizer_config.json", "5"),
        ("chat_template.jinja", "{{ 1 / 0 }}"),
        ("chat_template.jinja", "{{ messages[0] + 1 }}"),
        ("chat_template.jinja", "{% for"),
    ],
)
def test_a_malformed_file_is_a_problem_of_the_model(
    job: Path, tmp_path: Path, name: str, content: str
) -> None:
    refused(job, tmp_path / "copy", name, content)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"architectures": 5}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer_config.json", {"eos_token": {"a": [1]}}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
    ],
)
def test_a_key_of_the_wrong_type_is_a_problem_of_the_model(
    job: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    content = json.loads((job.parent / "model" / name).read_text())
    refused(job, tmp_path / "copy", name, json.dumps(content | changes))
