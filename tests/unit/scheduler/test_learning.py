"""What a policy has learned, across restarts of its scheduler."""

from pathlib import Path

import pytest

from common.config import SchedulerConfig
from common.trajectory import ToolStatus
from services.scheduler.learning import FILE, keep, policy_of, restore
from services.scheduler.routing.outcomes import Payload, ToolOutcome
from services.scheduler.routing.policy import Policy
from services.scheduler.routing.route import Route
from tests.support.sim import sim_config

LIBRA = sim_config(scheduler=SchedulerConfig(placement="libra"))


def teach(policy: Policy, trajectories: int = 20) -> None:
    for number in range(trajectories):
        route = Route(f"g{number}.0", f"g{number}", f"t{number}", prompt_tokens=10)
        policy.begin(route)
        outcome = ToolOutcome("search", ToolStatus.OK, Payload.SMALL, 5, 0.1)
        route.returned(outcome, action_tokens=50 + number, observation_tokens=5)
        route.action_tokens += 30
        policy.end(route, finished=True)


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    policy = policy_of(LIBRA)
    teach(policy)
    keep(policy.dump(), tmp_path)
    again = restore(LIBRA, tmp_path)
    assert again.dump() == policy.dump() != policy_of(LIBRA).dump()


def test_a_first_start_has_nothing_to_restore(tmp_path: Path) -> None:
    assert restore(LIBRA, tmp_path).dump() == policy_of(LIBRA).dump()


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_file_is_a_fresh_start(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE).write_bytes(damage)
    assert restore(LIBRA, tmp_path).dump() == policy_of(LIBRA).dump()


def test_a_torn_file_is_a_fresh_start(tmp_path: Path) -> None:
    policy = policy_of(LIBRA)
    teach(policy)
    keep(policy.dump(), tmp_path)
    whole = (tmp_path / FILE).read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / FILE).write_bytes(whole[:length])
        assert restore(LIBRA, tmp_path).dump() == policy_of(LIBRA).dump()


def test_the_memory_of_another_policy_is_a_fresh_start(tmp_path: Path) -> None:
    policy = policy_of(LIBRA)
    teach(policy)
    keep(policy.dump(), tmp_path)
    other = sim_config(scheduler=SchedulerConfig(placement="cmlfq"))
    assert restore(other, tmp_path).dump() == policy_of(other).dump()


def test_a_policy_that_learns_nothing_keeps_nothing_and_a_full_disk_stops_nothing(
    tmp_path: Path,
) -> None:
    keep(policy_of(sim_config(scheduler=SchedulerConfig(placement="round_robin"))).dump(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    keep(b"learned", tmp_path / "gone")
