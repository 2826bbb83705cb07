"""`libra run` with real processes: ends well, survives kills, leaves nothing behind."""

import json
import os
import signal
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from tests.support.jobs import Job, make_job, poll_until, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def adds_up(summary: dict[str, object]) -> bool:
    """Every admitted trajectory is trained, excluded or dropped with a reason, or in flight."""
    trajectories = summary["trajectories"]
    assert isinstance(trajectories, dict)
    excluded = sum(trajectories["excluded"].values())  # Their groups are trained without them.
    dropped = sum(trajectories["dropped"].values())
    return trajectories["admitted"] == (
        trajectories["trained"] + excluded + dropped + trajectories["in_flight"]
    )


def trained_tasks(job: Job) -> Counter[tuple[str, int]]:
    """How often each (task, epoch) was trained, by the ledger."""
    with sqlite3.connect(job.run_dir / "ledger.sqlite") as ledger:
        rows = ledger.execute(
            "SELECT task_id, epoch FROM groups WHERE state = 'trained'"
        ).fetchall()
    return Counter(rows)


def leftovers(job: Job) -> list[str]:
    run_ids = {
        json.loads(line).get("peer", "").split("/")[0]
        for line in (job.run_dir / "logs" / "coordinator.log").read_text().splitlines()
        if line.startswith("{")
    } - {""}
    return [str(p) for run_id in run_ids for p in Path("/dev/shm").glob(f"libra-{run_id}-*")]


def test_a_job_runs_to_its_end_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with running(make_job(tmp_path, max_steps=3)) as job:
        assert job.wait() == 0, job.output
        summary = job.summary()
        assert summary["steps"] == 3
        assert adds_up(summary)
        assert job.processes() == {}
        assert leftovers(job) == []
        assert (job.run_dir / "reward.png").exists()
        assert list(job.scratch.iterdir()) == []


def test_a_job_survives_the_death_of_every_kind_of_process(tmp_path: Path) -> None:
    with running(make_job(tmp_path, max_steps=12)) as job:
        for steps, name in enumerate(
            ("short-0", "vowels", "coordinator", "scheduler", "trainer"), start=1
        ):
            job.wait_for_steps(steps)
            job.kill(name)
        assert job.wait(200) == 0, job.output
        summary = job.summary()
        assert summary["steps"] == 12
        assert adds_up(summary)
        assert max(trained_tasks(job).values()) == 1
        assert job.processes() == {}
        assert leftovers(job) == []


def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with running(make_job(tmp_path, max_steps=100, tasks=300)) as job:
        job.wait_for_steps(1)
        job.process.kill()
        job.process.communicate()
        poll_until(lambda: job.processes() == {}, 30)
        assert leftovers(job) == []


def test_ctrl_c_saves_a_checkpoint_and_resume_goes_on_from_it(tmp_path: Path) -> None:
    config = make_job(tmp_path, max_steps=6)
    with running(config) as job:
        job.wait_for_steps(2)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130, job.output
        assert adds_up(job.summary())
        assert job.processes() == {}
    with running(config, "--resume") as job:
        assert job.wait() == 0, job.output
        summary = job.summary()
        assert summary["steps"] == 6
        assert max(trained_tasks(job).values()) == 1
        assert len(trained_tasks(job)) == 6 * 2


def test_ctrl_c_before_anything_has_begun_is_no_failure(tmp_path: Path) -> None:
    with running(make_job(tmp_path)) as job:
        job.wait_until((job.run_dir / "coordinator.json").exists, "a coordinator", 60)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130, job.output
        assert "Traceback" not in job.output
        assert job.summary()["steps"] == 0
        assert job.processes() == {}


def test_a_failure_at_the_start_is_said_as_it_is(tmp_path: Path) -> None:
    config = make_job(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with running(config) as job:
        assert job.wait() in (1, 2)
        assert "cannot be loaded" in job.output
        assert "Traceback" not in job.output
        assert job.processes() == {}


@pytest.mark.parametrize("name", ["trainer", "scheduler"])
def test_a_process_that_somebody_stops_is_started_again(tmp_path: Path, name: str) -> None:
    with running(make_job(tmp_path, max_steps=6)) as job:
        job.wait_for_steps(2)
        os.kill(job.processes()[name], signal.SIGTERM)
        assert job.wait() == 0, job.output
        assert job.summary()["steps"] == 6
        assert max(trained_tasks(job).values()) == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.group_sise=4", "group_size"),
        ("training.group_size=1", "group"),
        ("model.path=nowhere", "nowhere"),
        ("tools.vowels.target=no/such/server.py", "no/such/server.py"),
        ("tasks.path=missing.jsonl", "missing.jsonl"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    tmp_path: Path, override: str, expected: str
) -> None:
    with running(make_job(tmp_path), override) as job:
        assert job.wait(60) == 2
        assert expected in job.output
        assert "Traceback" not in job.output
        assert not job.run_dir.exists()
