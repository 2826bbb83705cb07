"""Whole jobs as real processes, small enough for a test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from tests.support.models import make_tiny_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "A:{{ message['content'] }}<|end|>{% else %}U:{{ message['content'] }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
START_S = 120.0
"""Two busy cores start five Python processes, three of which import torch."""


def make_job(directory: Path, *, tasks: int = 40, max_steps: int = 4, engine: str = "fake") -> Path:
    """Write a model, tasks and a configuration; return the configuration's path."""
    model = make_tiny_model(directory / "model", tied=True, context_tokens=256)
    template = directory / "model" / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE)
    rows = [
        {"task_id": f"t{n:03}", "environment": "vowels", "question": f"say {n}"}
        for n in range(tasks)
    ]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = Path(__file__).parent / "servers" / "vowels.py"
    path = directory / "job.toml"
    path.write_text(
        f"""
[run]
name = "job"
directory = "{directory / "runs"}"
max_steps = {max_steps}

[model]
path = "{model}"
context_tokens = 256

[tasks]
path = "{directory / "tasks.jsonl"}"

[sampling]
turns_max = 2
turn_tokens_max = 16
trajectory_tokens_max = 32

[rollout]
tool_format = "tags"

[[buckets]]
name = "short"
engine = "{engine}"
slots = 8
kv_tokens = 4096

[[buckets]]
name = "long"
engine = "{engine}"
slots = 8
kv_tokens = 4096

[training]
groups_per_step = 2
group_size = 4
learning_rate = 1e-4
checkpoint_every_steps = 2

[[tools]]
name = "vowels"
target = "{server}"
"""
    )
    return path


class Job:
    """A running `libra run`."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.config = config
        self.scratch = config.parent / "tmp"
        self.scratch.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "run", str(config), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.scratch)},
        )
        self.output = ""

    @property
    def run_dir(self) -> Path:
        return self.config.parent / "runs" / "job"

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for the end and keep what was printed."""
        self.output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode

    def summary(self) -> dict[str, Any]:
        """The last line on stdout, which must equal `summary.json`."""
        last = json.loads(self.output.splitlines()[-1])
        assert last == json.loads((self.run_dir / "summary.json").read_text())
        return last

    def steps(self) -> int:
        """Steps written so far."""
        metrics = self.run_dir / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_for_steps(self, count: int, timeout_s: float = START_S) -> None:
        """Return once `count` steps are in the metrics."""
        self.wait_until(lambda: self.steps() >= count, f"{count} steps", timeout_s)

    def wait_until(self, reached: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait for something that the running job does."""

        def look() -> bool:
            assert self.process.poll() is None, f"ended before {what}: {self.wait()} {self.output}"
            return reached()

        poll_until(look, timeout_s)

    def processes(self) -> dict[str, int]:
        """Pids of this job's processes by name, launcher excluded."""
        return processes_of(str(self.run_dir))

    def kill(self, name: str) -> None:
        """SIGKILL one process by its name."""
        os.kill(self.processes()[name], signal.SIGKILL)


def poll_until(reached: Callable[[], bool], timeout_s: float) -> None:
    """Look at other processes, which cannot wake a test, until they have done something."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)


@contextlib.contextmanager
def running(config: Path, *arguments: str) -> Generator[Job]:
    """Run a job and make sure that nothing of it outlives the block."""
    job = Job(config, *arguments)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()
        for pid in job.processes().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(run_dir: str) -> dict[str, int]:
    """Service processes whose command line names this run directory."""
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "--run-dir" in arguments and run_dir in arguments:
                replica = "services.trainer.replica_main" in arguments
                name = arguments[arguments.index("--name") + 1] + ".replica" * replica
                found[name] = int(entry.name)
    return found
