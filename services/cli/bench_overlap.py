"""The mesh against a loop without one: trained tokens per second of the same job.

Both sides run the same model, tasks, tools, batch and engine, in turn, A B A B, on the same cores.
The mesh has the job's workers, one core each, and a trainer beside them; the single loop has one
engine and the trainer, never at the same time, with one thread and with one per core: the better
of the two counts. Start-up is left out on both sides: the first steps of a run are not counted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.errors import RunFailed
from services.cli.bench import BenchReport, at_least

WARMUP_STEPS = 3
"""Start-up, the first batch (which nothing overlaps with) and the fill of the pipeline."""
RUN_TIMEOUT_S = 900.0
LAST_LINES = 15


def bench_overlap(*, config: Path, steps: int, rounds: int) -> BenchReport:
    """Run both sides `rounds` times and compare the medians.

    Raises:
        RunFailed: a side did not finish; says its last lines.
    """
    mesh: list[dict[str, float]] = []
    single: list[dict[str, float]] = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="libra-overlap-") as directory:
            mesh.append(_mesh(config, steps, Path(directory), number))
        by_threads = [_single(config, steps, threads) for threads in sorted({1, _cores()})]
        single.append(max(by_threads, key=lambda figures: figures["tokens_per_s"]))
    pairs = [m["tokens_per_s"] / s["tokens_per_s"] for m, s in zip(mesh, single, strict=True)]
    figures = {
        "cores": _cores(),
        "steps_counted": steps - WARMUP_STEPS,
        "mesh": mesh,
        "single": single,
        "ratio_by_round": pairs,
    }
    ratio = statistics.median(pairs)
    check = at_least("trained tokens per second, mesh / single loop", ratio, "ratio", 1.0)
    return BenchReport("overlap", figures, [check])


def _mesh(config: Path, steps: int, directory: Path, number: int) -> dict[str, float]:
    overrides = [
        f"run.directory={directory}",
        f"run.name=overlap-{number}",
        f"run.max_steps={steps}",
        "training.zero_variance=keep",
    ]
    command = [sys.executable, "-m", "services.cli", "run", str(config), *overrides]
    _run(command, {})
    metrics = directory / f"overlap-{number}" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return rate([(row["tokens/trained"], row["time/step"]) for row in rows])


def _single(config: Path, steps: int, threads: int) -> dict[str, float]:
    command = [
        *(sys.executable, "-m", "services.cli.single_loop", str(config), str(steps)),
        *("training.zero_variance=keep", f"training.threads={threads}"),
    ]
    malloc = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
    output = _run(command, malloc | {"OMP_NUM_THREADS": str(threads)})
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in output.splitlines() if line.startswith('{"step"')
    ]
    return rate([(row["tokens"], row["time/step"]) for row in rows]) | {"threads": threads}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def rate(steps: list[tuple[float, float]]) -> dict[str, float]:
    """Tokens per second over (tokens, seconds) of the steps after the warm-up."""
    counted = steps[WARMUP_STEPS:]
    tokens = sum(step[0] for step in counted)
    seconds = sum(step[1] for step in counted)
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(counted),
        "tokens_per_step": tokens / len(counted),
    }


def _run(command: list[str], environment: dict[str, str]) -> str:
    result = subprocess.run(  # noqa: S603  (our own modules)
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-LAST_LINES:])
        raise RunFailed(f"{' '.join(command)} ended with {result.returncode}:\n{tail}")
    return result.stdout
