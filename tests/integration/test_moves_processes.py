"""Workers killed and drained in mid-run, as real processes: their trajectories go on elsewhere."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import Job, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[2]
DEMO_TASKS = REPOSITORY / "configs" / "demo" / "tasks.jsonl"
CONFIG = """
[run]
name = "job"
directory = "{directory}/runs"
max_steps = 6

[model]
path = "{repository}/assets/tiny-agent"
context_tokens = 512

[tasks]
path = "{directory}/tasks.jsonl"

[sampling]
turns_max = 3
turn_tokens_max = 32
trajectory_tokens_max = 96

[rollout]
tool_format = "tags"

[[buckets]]
name = "short"
engine = "torch"
slots = 24
kv_tokens = 16384

[[buckets]]
name = "long"
engine = "torch"
slots = 24
kv_tokens = 16384

[scheduler]
placement = "round_robin"
lease_s = 3.0

[training]
groups_per_step = 4
group_size = 4
zero_variance = "keep"

[[tools]]
name = "calculator"
target = "{repository}/tests/support/servers/slow_calculator.py"
"""


def make_config(directory: Path) -> Path:
    tasks = [line for line in DEMO_TASKS.read_text().splitlines() if '"calculator"' in line]
    (directory / "tasks.jsonl").write_text("\n".join(tasks[:60]))
    path = directory / "job.toml"
    path.write_text(CONFIG.format(directory=directory, repository=REPOSITORY))
    return path


def rows(job: Job, sql: str) -> list[tuple]:
    path = job.run_dir / "ledger.sqlite"
    if not path.exists():
        return []
    ledger = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return ledger.execute(sql).fetchall()
    except sqlite3.OperationalError:  # The tables are not made yet.
        return []
    finally:
        ledger.close()


def why(job: Job, trajectory_id: str) -> dict:
    command = [sys.executable, "-m", "services.cli", "why", trajectory_id, "--json", "--run"]
    told = subprocess.run(
        [*command, str(job.run_dir)], capture_output=True, text=True, check=True, timeout=30
    )
    return json.loads(told.stdout)


def end(job: Job, worker: str, how: signal.Signals, *, turns: int, held: int) -> None:
    """Send a signal once the worker holds so many trajectories that have made so many turns."""
    ready = f"state = 'running' AND turns = {turns} AND worker LIKE '%/{worker}/%'"
    sql = f"SELECT trajectory_id FROM trajectories WHERE {ready}"
    job.wait_until(lambda: len(rows(job, sql)) >= held, f"{held} on {worker}", 90)
    os.kill(job.processes()[worker], how)


def chapters(job: Job, kind: str, *reasons: str) -> list[tuple[str, str, str]]:
    wanted = ", ".join(f"'{reason}'" for reason in reasons)
    return rows(
        job,
        "SELECT d.trajectory_id, d.source, d.target FROM decisions d JOIN trajectories t"
        f" USING (trajectory_id) WHERE d.kind = '{kind}' AND d.reason IN ({wanted}) AND d.turn > 0"
        " AND t.state = 'finished'",
    )


def test_trajectories_of_a_killed_and_of_a_drained_worker_go_on_elsewhere(tmp_path: Path) -> None:
    with running(make_config(tmp_path)) as job:
        end(job, "short-0", signal.SIGKILL, turns=1, held=2)
        job.wait_for_steps(1)
        end(job, "long-0", signal.SIGTERM, turns=0, held=4)  # Some of them call the tool.
        assert job.wait() == 0, job.output
        assert job.summary()["steps"] == 6
        assert job.summary()["trajectories"]["excluded"] == {}

        # Its membership and its trajectories' leases end at about the same time.
        lost = chapters(job, "lost", "worker_gone", "lease_expired")
        assert lost
        story = why(job, lost[0][0])
        kinds = [chapter["kind"] for chapter in story["chapters"]]
        after = story["chapters"][kinds.index("lost") + 1]
        assert (after["kind"], after["turn"]) == ("placed", story["chapters"][0]["turn"] + 1)
        assert (story["losses"], kinds[-1]) == (1, "ended")
        assert story["reward"] is not None

        drained = chapters(job, "moved", "draining") + chapters(job, "returned", "draining")
        assert drained
        assert why(job, drained[0][0])["losses"] == 0
        broken = rows(
            job,
            "SELECT trajectory_id FROM trajectories t LEFT JOIN turns u USING (trajectory_id)"
            " WHERE t.state = 'finished' GROUP BY 1 HAVING COUNT(*) <> t.turns"
            " OR SUM(length(u.action_tokens)) / 4 <> t.action_tokens",
        )
        assert broken == []
