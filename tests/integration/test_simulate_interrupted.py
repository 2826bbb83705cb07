"""`libra simulate` is interrupted: it ends at once and leaves no process and no semaphore."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.simulator.runs import RunSpec, play_all, seeds_of
from tests.support.jobs import poll_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SIMULATE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in the background.
import services.cli.simulate
from services.cli.main import main
print(1, flush=True)
main()
"""
LONG = ("simulate", "--policy", "libra", "--steps", "100000", "--seeds", "4")
UNDER_WAY_S = 1.0
"""Of processor time after the imports: the first run has begun by then."""
IMPORT_S = 3.0
"""Of processor time, at most, until a child imported what it needs."""
START_S = 60.0


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_children(pid: int) -> list[int]:
    """Those that are past their imports."""
    return [child for child in children(pid) if processor_s(child) > IMPORT_S + UNDER_WAY_S]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("whole_group", [False, True])
def test_ctrl_c_ends_a_simulation_at_once_and_leaves_nothing(
    processes: int, *, whole_group: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SIMULATE, *LONG, "--processes", str(processes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            begun_s = processor_s(process.pid)
            if processes == 1:
                poll_until(lambda: processor_s(process.pid) > begun_s + UNDER_WAY_S, START_S)
            else:  # The runs' and the one that watches semaphores.
                poll_until(lambda: len(busy_children(process.pid)) == processes, START_S)
            left = children(process.pid)
            send = os.killpg if whole_group else os.kill
            send(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "leaked" not in errors  # Says who watches semaphores, of each that nobody removed.
    poll_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 5)


def test_an_error_between_two_runs_ends_the_others() -> None:
    def fail(spec: RunSpec) -> None:
        raise OSError(spec.seed)

    short = RunSpec("search-r1", "least_load", steps=1, groups_per_step=2)
    specs = [short, *seeds_of(RunSpec("search-r1", "libra", steps=100_000), ["libra"], 3)]
    with pytest.raises(OSError, match="0"):
        play_all(specs, processes=2, on_done=fail)
    assert multiprocessing.active_children() == []
