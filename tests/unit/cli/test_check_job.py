"""`libra check`: what is wrong is said with the line of the job that names it."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from services.cli.check import check_job

JOB = """\
[run]
name = "demo"
max_steps = 4
[model]
path = "no-model"
context_tokens = 512
[tasks]
path = "{folder}/task.jsonl"
[[buckets]]
name = "short"
engine = "fake"
[[tools]]
name = "python"
target = "builtin.pythn"
"""


@pytest.mark.slow
def test_a_wrong_target_and_a_missing_tasks_file_name_their_lines_and_what_was_meant(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(folder=tmp_path))
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        check_job(job, [])
    told = {text.split(": ")[1]: text for text in caught.value.problems}
    assert told["tools.0.target"].startswith(f"{job}:14: ")
    assert "(did you mean 'services.tools.builtin.python'?)" in told["tools.0.target"]
    assert told["tasks.path"].startswith(f"{job}:8: ")
    assert "(did you mean 'tasks.jsonl'?); set tasks.path" in told["tasks.path"]


@pytest.mark.slow
def test_what_an_override_named_is_blamed_on_it_and_a_bad_row_on_its_own_line(
    tmp_path: Path,
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(folder=tmp_path))
    (tmp_path / "task.jsonl").write_text("{\n")
    with pytest.raises(ConfigError) as caught:
        check_job(job, ["tools.0.target=services.tols.python"])
    told = "\n".join(caught.value.problems)
    assert "override 'tools.0.target=services.tols.python': tools.0.target: " in told
    assert "(did you mean 'services.tools'?)" in told
    assert f"\n{tmp_path}/task.jsonl:1: is not JSON" in told
