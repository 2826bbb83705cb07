from pathlib import Path

import pytest

from common.config import Config
from common.errors import ConfigError
from common.membership import MEMORY
from services.cli.plot import plot_reward, smooth
from services.cli.rundir import open_run_directory
from services.scheduler.summary import surviving_rows


def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo", "directory": str(tmp_path), "max_steps": 1},
            "model": {"path": "m", "context_tokens": 64},
            "tasks": {"path": "t"},
            "buckets": [{"name": "short"}],
            "tools": [{"name": "t", "target": "t"}],
        }
    )


def test_a_second_run_of_the_same_name_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    first = open_run_directory(config(tmp_path), resume=False)
    second = open_run_directory(config(tmp_path), resume=False)
    assert (first.path.name, second.path.name) == ("demo", "demo-2")
    assert first.run_id != second.run_id
    first.close()
    second.close()


def test_a_resume_takes_the_newest_directory_with_a_new_run_id(tmp_path: Path) -> None:
    first = open_run_directory(config(tmp_path), resume=False)
    first.close()
    again = open_run_directory(config(tmp_path), resume=True)
    assert again.path == first.path
    assert again.run_id != first.run_id
    again.close()


def test_a_held_directory_is_refused(tmp_path: Path) -> None:
    held = open_run_directory(config(tmp_path), resume=False)
    with pytest.raises(ConfigError, match="another libra run"):
        open_run_directory(config(tmp_path), resume=True)
    held.close()


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        open_run_directory(config(tmp_path), resume=True)


def test_closing_removes_this_runs_segments_and_no_others(tmp_path: Path) -> None:
    directory = open_run_directory(config(tmp_path), resume=False)
    mine = MEMORY / f"libra-{directory.run_id}-w0"
    other = MEMORY / f"libra-{directory.run_id}x-w0"
    mine.write_bytes(b"x")
    other.write_bytes(b"x")
    try:
        directory.close()
        assert not mine.exists()
        assert other.exists()
    finally:
        other.unlink()


def test_a_step_that_was_repeated_after_a_resume_is_drawn_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n'
        '{"step": 2, "reward/mean": 0.3}\n'
    )
    assert [row["reward/mean"] for row in surviving_rows(tmp_path / "metrics.jsonl")] == [0.1, 0.3]
    picture = plot_reward(tmp_path)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_steps_has_no_picture(tmp_path: Path) -> None:
    assert plot_reward(tmp_path) is None
    assert smooth([1.0, 3.0], width=2) == [1.0, 2.0]
