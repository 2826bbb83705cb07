"""What `libra scale` says before it asks anybody, and of what it is told."""

import json
from pathlib import Path

import pytest

from common.config import BucketConfig
from common.errors import ConfigError
from common.messages.coordinator import SlotStatus
from services.cli.progress import describe_slot
from services.cli.scale import Place, Wanted, check, find_place, holds, summary
from tests.support.sim import sim_config

FLEX = BucketConfig(name="flex", workers=3, hybrid=True)


def slot(name: str, side: str, phase: str = "active") -> SlotStatus:
    return SlotStatus(
        slot=name,
        side=side,
        phase=phase,
        phase_s=2.4,
        fence=1,
        switches=0,
        drain_s=0.0,
        release_s=0.0,
        load_s=0.0,
    )


def wanted(train: int, rollout: int) -> Wanted:
    return Wanted(train, rollout, hold_s=1.0, timeout_s=1.0)


def test_a_run_without_hybrid_slots_has_nothing_to_scale() -> None:
    with pytest.raises(ConfigError, match="no bucket of this run has hybrid = true"):
        check(sim_config(), None)


@pytest.mark.parametrize("split", [(1, 1), (4, 0), (4, -1)])
def test_the_two_numbers_must_add_up_to_the_slots(split: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"the run has 3 hybrid slots; .* add up to 3"):
        check(sim_config(buckets=[BucketConfig(name="short"), FLEX]), wanted(*split))


def test_somebody_must_roll_out() -> None:
    check(sim_config(buckets=[BucketConfig(name="short"), FLEX]), wanted(3, 0))
    check(sim_config(buckets=[FLEX]), wanted(2, 1))
    with pytest.raises(ConfigError, match="nobody would roll out; leave one"):
        check(sim_config(buckets=[FLEX]), wanted(3, 0))


def test_a_run_that_never_began_has_no_coordinator(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(ConfigError, match="no coordinator has listened there"):
        find_place(tmp_path)


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        find_place(tmp_path / "nothing")


def test_a_split_holds_when_every_slot_is_active_on_its_side() -> None:
    assert holds([slot("a", "train"), slot("b", "rollout")], 1)
    assert not holds([slot("a", "train", "loading"), slot("b", "rollout")], 1)
    assert not holds([slot("a", "rollout"), slot("b", "rollout")], 1)
    assert not holds([], 0)


def test_a_slot_on_its_way_says_how_far_it_is() -> None:
    assert describe_slot(slot("flex-0", "train")) == "flex-0 train"
    assert describe_slot(slot("flex-0", "train", "loading")) == "flex-0 train (loading 2 s)"


def test_programs_are_told_the_same(tmp_path: Path) -> None:
    place = Place(tmp_path, sim_config(), "tcp://x:1", "run-1")
    told = summary(place, wanted(1, 0), [slot("a", "train")], 3.14159)
    assert told["done"]
    assert (told["train"], told["rollout"], told["took_s"]) == (1, 0, 3.142)
    assert json.loads(json.dumps(told))["slots"][0]["slot"] == "a"
    assert "done" not in summary(place, None, [slot("a", "train")], 0.0)
