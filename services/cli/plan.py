"""Which processes a job needs, with what environment, and what an exit means. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from signal import SIGKILL

from common.config import BucketConfig, Config

KILLED_MAX = 5
"""Restarts after a signal, in a row. More means that it cannot live here."""
FAILED_MAX = 2
"""Restarts after a failure of its own, in a row."""
SETTLED_S = 300.0
"""A process that lived so long starts a new row."""
STOP_ORDER = ("trainer", "replica", "rollout", "tools", "scheduler", "coordinator")
"""Who reports to whom: the trainer checkpoints first, and every worker hands back what it holds
while the scheduler still listens."""
GRACE_S = {
    "trainer": 30.0,
    "replica": 10.0,
    "rollout": 30.0,
    "tools": 5.0,
    "scheduler": 5.0,
    "coordinator": 5.0,
}
"""From SIGTERM to SIGKILL."""
MODULES = {"replica": "services.trainer.replica_main"}
"""Of the roles that have no package of their own."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the mesh."""

    role: str
    name: str
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def module(self) -> str:
        """What `python -m` runs."""
        return MODULES.get(self.role, f"services.{self.role}")

    @property
    def label(self) -> str:
        """Names the process among all of a run: a replica is called as its slot is."""
        return f"{self.name}.replica" if self.role == "replica" else self.name


class AfterExit(Enum):
    """What to do when a process has ended."""

    RESTART = "restart"
    FINISHED = "finished"
    """The job is done."""
    GIVE_UP = "give_up"
    """The job cannot go on."""


def processes(config: Config) -> list[ProcessSpec]:
    """All processes of a job, in the order in which they are started."""
    threads = (("OMP_NUM_THREADS", "1"),)
    specs = [ProcessSpec("coordinator", "coordinator", threads)]
    specs.append(ProcessSpec("scheduler", "scheduler", threads))
    specs.extend(ProcessSpec("tools", server.name, threads) for server in config.tools)
    specs.extend(
        ProcessSpec("rollout", f"{bucket.name}-{index}", threads)
        for bucket in config.buckets
        for index in range(bucket.workers)
    )
    specs.extend(
        ProcessSpec("replica", f"{bucket.name}-{index}", _trainer_environment(config))
        for bucket in config.buckets
        if bucket.hybrid
        for index in range(bucket.workers)
    )
    specs.append(ProcessSpec("trainer", "trainer", _trainer_environment(config)))
    return specs


def common_environment(inherited: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """What every process gets: no downloads, no thread pools that spin against each other.

    Temporary files go to a place of the run's own: not every library removes its sockets.
    """
    return {
        **inherited,
        "TMPDIR": str(scratch),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def spread_cores(config: Config, cores: Sequence[int]) -> Config:
    """Give each rank of each rollout worker a core where the configuration names none.

    Ranks of one worker work in step, so they never share a core with each other while there are
    others. Ranks that outnumber the cores share those that serve the fewest, cores named in the
    configuration counted: threads that spin against each other cost more than waiting does.
    """
    ranks_on = Counter(dict.fromkeys(cores, 0))
    ranks_on.update(core for b in config.buckets for cpus in b.cpus for core in cpus)
    buckets: list[BucketConfig] = []
    for bucket in config.buckets:
        cpus = bucket.cpus or [
            _cores_of_worker(bucket.tensor_parallel, cores, ranks_on) for _ in range(bucket.workers)
        ]
        buckets.append(bucket.model_copy(update={"cpus": cpus}))
    return config.model_copy(update={"buckets": buckets})


def _cores_of_worker(ranks: int, cores: Sequence[int], ranks_on: Counter[int]) -> list[int]:
    """One core for each rank of a worker; what they serve is counted in `ranks_on`."""
    taken: list[int] = []
    for _ in range(ranks):
        core = min(cores, key=lambda core: (taken.count(core), ranks_on[core], core))
        taken.append(core)
        ranks_on[core] += 1
    return taken


def after_exit(role: str, code: int, in_a_row: int) -> AfterExit:
    """Decide what an exit means.

    A signal or a crash is started again. A trainer that ends with 0 has finished the job. A
    configuration error (2) never gets better, nor does a typed failure (1) of the scheduler or
    the trainer, which say so when the job cannot go on.
    """
    if role == "trainer" and code == 0:
        return AfterExit.FINISHED
    if code == 2 or (code == 1 and role in ("trainer", "scheduler")):
        return AfterExit.GIVE_UP
    allowed = KILLED_MAX if code < 0 else FAILED_MAX
    return AfterExit.RESTART if in_a_row < allowed else AfterExit.GIVE_UP


def describe_end(code: int, restarts: int, within_s: float, detail: str) -> str:
    """Say how a process ended for good, how often it was started again before, and what to do.

    Args:
        code: its exit code, -N for signal N.
        restarts: since it last ran for long.
        within_s: from the first of these starts to this end.
        detail: its last words, if any. Those of a killed one are not about its end.
    """
    starts = "restart" if restarts == 1 else "restarts"
    again = f", {restarts} {starts} within {within_s:.0f} s did not help" if restarts else ""
    if code >= 0:
        return (detail or f"ended with exit code {code}") + again
    remedy = "mend what its log shows"
    if code == -SIGKILL:
        remedy = (
            "the kernel sends that when memory runs out (look into dmesg): "
            "give the machine more memory, or the job less to do at a time"
        )
    said = f" (it last said: {detail})" if detail else ""
    return f"was ended by signal {-code}{again}; {remedy}, then go on with --resume{said}"


def _trainer_environment(config: Config) -> tuple[tuple[str, str], ...]:
    return (
        ("OMP_NUM_THREADS", str(config.training.threads)),
        # Freed memory stays with the process: fresh pages cost a training step up to 1.6 times.
        ("MALLOC_MMAP_MAX_", "0"),
        ("MALLOC_TRIM_THRESHOLD_", "100000000000"),
    )
