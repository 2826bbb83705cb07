import pytest

from common.messages.coordinator import SlotStatus
from services.cli.bench_migrate import alone_s, report
from services.cli.bench_migrate_run import Outcome, Step
from services.cli.bench_migrate_stage import (
    BESIDE,
    CONDITIONS,
    QUIET,
    STREAMING,
    SWITCHING,
    prepared_batch,
)

PACKS = 10


def step(condition: str, train_s: float, *, number: int = 0, **metrics: float) -> Step:
    given = {"time/train": train_s, "time/publish_loop": 0.0, "tokens/trained": 4096.0}
    renamed = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Step(condition, number, given | renamed)


def outcome(slower: dict[str, float], *, drift: float = 0.0) -> Outcome:
    """Steps of a second, times what a condition is given; later rounds are slower by `drift`."""
    steps = [
        step(condition, slower.get(condition, 1.0) * (1 + drift * number), number=number)
        for number in range(3)
        for condition in CONDITIONS
        for _ in range(5)
    ]
    return Outcome(steps, packs=PACKS)


def missed(seen: Outcome) -> set[str]:
    return {check.name for check in report(seen, 2).checks if not check.ok}


def test_what_replicas_ran_is_put_back_and_waiting_for_them_is_taken_out() -> None:
    helped = step(SWITCHING, 0.7, replicas__micro_batches=4.0, time__wait_replicas=0.1)
    assert alone_s(helped, 0.1) == pytest.approx(1.0)


def test_steps_that_are_alike_pass() -> None:
    assert missed(outcome({})) == set()


def test_a_machine_that_becomes_slower_meets_all_conditions_alike() -> None:
    assert missed(outcome({}, drift=0.2)) == set()


def test_a_condition_with_longer_steps_is_named() -> None:
    assert missed(outcome({SWITCHING: 1.02})) == {"switching: median"}
    assert missed(outcome({STREAMING: 1.1})) == {"streaming: median", "streaming: p99"}


def test_what_a_busy_neighbour_costs_anyway_is_shown() -> None:
    seen = report(outcome({BESIDE: 1.1}), 2)
    assert all(check.ok for check in seen.checks)
    assert seen.figures["beside / quiet"]["median"] == pytest.approx(1.1)


def test_time_on_the_loop_is_a_share_of_the_step() -> None:
    seen = outcome({})
    slow = [step(STREAMING, 0.99, number=s.round, time__publish_loop=0.01) for s in seen.steps]
    kept = [s for s in seen.steps if s.condition != STREAMING]
    assert missed(Outcome(kept + slow, packs=PACKS)) == {"streaming: on the loop"}


def test_the_time_of_a_switch_is_given_by_phase_and_as_a_share_of_a_step() -> None:
    def switched(side: str, load_s: float) -> SlotStatus:
        return SlotStatus(
            slot="s",
            side=side,
            phase="active",
            phase_s=0.0,
            fence=1,
            switches=1,
            drain_s=0.1,
            release_s=0.1,
            load_s=load_s,
        )

    seen = outcome({})
    seen.switches = [switched("train", 0.3), switched("rollout", 0.8)]
    figures = report(seen, 2).figures["switch"]
    assert figures["to_train"]["share_of_a_step"] == pytest.approx(0.5)
    assert figures["to_rollout"]["load_s"] == 0.8


def test_every_prepared_batch_is_the_same() -> None:
    assert prepared_batch() == prepared_batch()
    assert QUIET in CONDITIONS
