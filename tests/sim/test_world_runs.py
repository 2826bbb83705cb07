"""The simulated world: what must hold of every run, whatever the policy. The world itself checks
with assertions that KV caches never overflow, that nothing is trained twice or too stale, and that
what is trained is what the scripts say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import RunFailed
from services.scheduler.routing.policies import POLICIES
from services.simulator.world import ORACLE, Fault
from tests.support.sim_world import play, world

TREE = Path(__file__).parents[2]
ALL = [*POLICIES, ORACLE]


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_policy_trains_every_trajectory_once(policy: str, staleness: int) -> None:
    run = play(policy, max_staleness_steps=staleness)
    assert run.steps == 4
    assert run.trajectories == 4 * 4 * 4
    assert run.staleness_max <= staleness


@pytest.mark.parametrize("seed", range(3))
def test_all_policies_meet_the_same_trajectories(seed: int) -> None:
    runs = [play(policy, seed=seed) for policy in ("libra", "least_load", "mlfq")]
    assert len({run.turns for run in runs}) == 1
    assert len({round(run.trained_tokens_per_s * run.makespan_s) for run in runs}) == 1


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    assert play(seed=1).trace == play(seed=1).trace
    assert play(seed=1).trace != play(seed=2).trace


@pytest.mark.slow
def test_the_hash_seed_of_the_process_changes_nothing() -> None:
    code = "from tests.support.sim_world import play; print(play(seed=3).trace)"
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=TREE,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(TREE)},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for hash_seed in range(3)
    }
    assert traces == {f"{play(seed=3).trace}\n"}


def test_moved_trajectories_go_on_at_their_next_turn() -> None:
    run = play("mlfq", steps=6)
    assert run.moves > 0
    assert run.trajectories == 6 * 4 * 4
    assert 0 < run.moves_kv <= run.moves


@pytest.mark.parametrize("policy", ["libra", "least_load", "mlfq"])
@pytest.mark.parametrize("worker", ["short-0", "long-0"])
def test_a_drained_worker_holds_nothing_at_the_end(policy: str, worker: str) -> None:
    small = world(policy, steps=6, faults=(Fault(40.0, worker, "drain"),))
    run = small.run()
    drained = next(w for w in small.workers if w.plan.name == worker)
    assert drained.dead
    assert not drained.held
    assert run.trajectories == 6 * 4 * 4


@pytest.mark.parametrize("policy", ["libra", "least_load", "mlfq"])
def test_what_a_killed_worker_held_ends_elsewhere(policy: str) -> None:
    small = world(policy, steps=6, faults=(Fault(41.3, "medium-0", "kill"),))
    run = small.run()
    assert run.trajectories == 6 * 4 * 4
    assert run.makespan_s > play(policy, steps=1).makespan_s


def test_every_worker_draining_at_once_is_said_to_hang() -> None:
    names = ("short-0", "short-1", "medium-0", "long-0")
    small = world(faults=tuple(Fault(5.0, name, "drain") for name in names))
    with pytest.raises(RunFailed, match="can never be complete"):
        small.run()
