"""A whole job with a worker on one core beside one that splits the same model over two."""

import json
import os
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from common.trajectory import unpack_tokens
from tests.support.jobs import Job, poll_until, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parent.parent.parent
BUCKETS = ("short", "long")
PATIENCE_S = 240.0
"""Both engines start at once, on cores that other tests use too."""
MISMATCH_MAX = 1e-6
"""Squares of differences of 1e-5; a version more or less is 1e-2 and above."""
CALCULATOR = 'tools=[{name="calculator", target="services.tools.builtin.calculator"}]'


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short, unlike pytest's: vLLM's sockets lie below, and their paths have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="libra-") as path:
        yield Path(path)


def make_config(directory: Path) -> tuple[Path, list[str]]:
    """The configuration that is shipped, with tasks that need no sandbox."""
    rows = (ROOT / "configs" / "demo" / "tasks.jsonl").read_text().splitlines()
    tasks = directory / "tasks.jsonl"
    tasks.write_text("\n".join(row for row in rows if '"calculator"' in row))
    config = Path(shutil.copy(ROOT / "configs" / "demo" / "tp2.toml", directory / "job.toml"))
    return config, [
        "run.name=job",
        f"run.directory={directory / 'runs'}",
        "run.max_steps=10000",
        f"tasks.path={tasks}",
        "tasks.epochs=200",
        "scheduler.max_staleness_steps=0",
        CALCULATOR,
    ]


def events(job: Job, worker: str) -> Iterator[dict[str, Any]]:
    log = job.run_dir / "logs" / f"{worker}.log"
    for line in log.read_text().splitlines() if log.exists() else ():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def versions_used(job: Job, bucket: str) -> set[int]:
    """Versions under which a worker has finished a trajectory."""
    used: set[int] = set()
    applied = -1
    for event in events(job, f"{bucket}-0"):
        if event["event"] == "version.applied":
            applied = event["policy_version"]
        elif event["event"] == "trajectory.finished" and event["reason"] == "answered":
            used.add(applied)
    return used


def versions_sampled(job: Job) -> dict[str, list[list[int]]]:
    """By bucket, the version of each token of each turn, by the ledger."""
    found: dict[str, list[list[int]]] = {bucket: [] for bucket in BUCKETS}
    with sqlite3.connect(job.run_dir / "ledger.sqlite") as ledger:
        rows = ledger.execute(
            "SELECT worker, action_versions FROM turns JOIN trajectories USING (trajectory_id)"
        ).fetchall()
    for worker, packed in rows:
        for bucket in BUCKETS:
            if f"/{bucket}-0/" in worker:
                found[bucket].append(unpack_tokens(packed))
    return found


def processes_with(scratch: Path) -> list[int]:
    """Every process that has the job's scratch directory for its temporary files."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(scratch).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_workers_with_one_and_two_ranks_sample_for_the_same_job(directory: Path) -> None:
    config, overrides = make_config(directory)
    with running(config, *overrides) as job:
        job.wait_until(
            lambda: all(len(versions_used(job, bucket)) >= 3 for bucket in BUCKETS),
            "three versions from each worker",
            PATIENCE_S,
        )
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130, job.output
        summary = job.summary()
    assert summary["trajectories"]["adds_up"]
    assert summary["trajectories"]["excluded"] == {}
    sampled = versions_sampled(job)
    for bucket in BUCKETS:
        assert all(versions == sorted(versions) for versions in sampled[bucket])
        used = {version for versions in sampled[bucket] for version in versions}
        assert len(used) >= 3
        assert used <= set(range(summary["versions_published"]))
    # Nothing is stale, so the trainer's log-probabilities are those of the ranks, to rounding.
    metrics = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row)["mismatch_kl/max"] for row in metrics) < MISMATCH_MAX
    poll_until(lambda: not processes_with(job.scratch), 30)
    assert list(job.scratch.iterdir()) == []
