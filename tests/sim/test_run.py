"""The mesh as a whole, on the simulated network."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from common.clock import run_sim
from common.transport.sim import Faults, SimNetwork
from tests.support.sim import until
from tests.support.sim_job import PATIENCE_S, SimJob

HASH_SEEDS = ("0", "1", "2")


def test_a_job_trains_every_group_once_within_the_staleness_bound(tmp_path: Path) -> None:
    job = SimJob(SimNetwork(1), tmp_path)
    run_sim(job.play())
    assert len(job.trainer.groups) == job.max_steps * 4
    assert set(job.trainer.groups.values()) == {1}
    assert job.trainer.staleness_max <= 1
    assert job.tools.calls, "the tool was called"


@pytest.mark.parametrize("seed", range(5))
def test_a_lossy_network_costs_time_and_nothing_else(seed: int, tmp_path: Path) -> None:
    faults = Faults(loss=0.03, duplicate=0.05, reorder=0.1, delay_s=(0.001, 0.05))
    job = SimJob(SimNetwork(seed, faults), tmp_path, max_steps=3)
    run_sim(job.play())
    assert len(job.trainer.groups) == job.max_steps * 4
    assert set(job.trainer.groups.values()) == {1}
    assert job.trainer.staleness_max <= 1


@pytest.mark.parametrize("victim", ["short-0", "calculator", "coordinator", "scheduler"])
@pytest.mark.parametrize("seed", range(3))
def test_a_job_survives_the_death_of_a_process(seed: int, victim: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job.running() as start:
            runtimes = {}
            for name in ("coordinator", "scheduler", "calculator", "short-0", "long-0", "trainer"):
                runtimes[name] = await start(name)
            await until(lambda: len(job.trainer.trained) >= 1 + seed, PATIENCE_S)
            job.network.kill(runtimes[victim].mesh.identity)
            await asyncio.sleep(0.5)
            await start(victim, incarnation=2)
            await until(lambda: job.trainer.reason is not None, PATIENCE_S)

    job = SimJob(SimNetwork(seed), tmp_path)
    run_sim(scenario())
    assert len(job.trainer.groups) == job.max_steps * 4
    assert set(job.trainer.groups.values()) == {1}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_under_any_hash_seed(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, logging, structlog\n"
        "structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))\n"
        "from common.clock import run_sim\n"
        "from common.transport.sim import SimNetwork, Faults\n"
        "from tests.support.sim_job import SimJob\n"
        "network = SimNetwork(5, Faults(loss=0.02, duplicate=0.05))\n"
        "run_sim(SimJob(network, pathlib.Path(sys.argv[1]), max_steps=3).play())\n"
        "print(network.digest())\n"
    )
    digests = set[str]()
    for hash_seed in HASH_SEEDS:
        directory = tmp_path / hash_seed  # What the first has learned must not help the next.
        directory.mkdir()
        result = subprocess.run(
            [sys.executable, "-c", script, str(directory)],
            env={"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        digests.add(result.stdout.strip())
    assert len(digests) == 1
