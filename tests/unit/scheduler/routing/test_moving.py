import pytest

from services.scheduler.routing.moving import FETCH_LOST, MoveCosts
from services.scheduler.routing.policy import MoveMeasure
from services.scheduler.routing.speeds import guess

PREFILL_S = guess(1).prefill_token_s


def told(*moves: tuple[str, int, float]) -> MoveCosts:
    costs = MoveCosts()
    for path, tokens, seconds in moves:
        costs.move_measured(MoveMeasure("short", "long", path, tokens, seconds))
    return costs


def test_without_any_measurement_short_contexts_are_computed_again_and_long_ones_sent() -> None:
    costs = MoveCosts()
    assert costs.cheaper("short", "long", 500, PREFILL_S).path == "recompute"
    assert costs.cheaper("short", "long", 10_000, PREFILL_S).path == "kv"


def test_the_transfer_is_taken_when_it_was_the_quicker_one() -> None:
    costs = told(*[("kv", 5000, 0.25), ("recompute", 5000, 0.5)] * 20)
    way = costs.cheaper("short", "long", 5000, 1e-4)
    assert way.path == "kv"
    assert way.seconds == pytest.approx(0.25, rel=0.1)


def test_the_recompute_is_taken_when_it_was_the_quicker_one() -> None:
    costs = told(*[("kv", 5000, 1.0), ("recompute", 5000, 0.2)] * 20)
    way = costs.cheaper("short", "long", 5000, 4e-5)
    assert way.path == "recompute"
    assert way.seconds == pytest.approx(0.2, rel=0.1)


def test_pairs_of_buckets_are_learned_apart() -> None:
    costs = told(*[("kv", 5000, 9.0)] * 20)
    assert costs.cheaper("short", "long", 5000, PREFILL_S).path == "recompute"
    assert costs.cheaper("medium", "long", 5000, PREFILL_S).path == "kv"


def test_transfers_that_never_work_are_given_up_and_tried_again_later() -> None:
    costs = MoveCosts()
    failed = MoveMeasure("short", "long", "recompute", 10_000, 2.0, "no_export")
    for _ in range(8):
        costs.move_measured(failed)
    assert costs.cheaper("short", "long", 10_000, PREFILL_S).path == "recompute"
    for _ in range(100):
        costs.move_measured(failed)
        if costs.cheaper("short", "long", 10_000, PREFILL_S).path == "kv":
            return
    pytest.fail("never tried again")


def test_the_time_of_a_lost_transfer_is_not_taken_for_a_recompute() -> None:
    costs, never = told(("recompute", 500, 0.01)), told(("recompute", 500, 0.01))
    for reason in FETCH_LOST:
        costs.move_measured(MoveMeasure("short", "long", "recompute", 500, 5.2, reason))
    way = costs.cheaper("short", "long", 500, PREFILL_S)
    assert way.path == "recompute"
    assert way.seconds == never.cheaper("short", "long", 500, PREFILL_S).seconds


def test_costs_survive_dump_and_load() -> None:
    costs, loaded = told(("kv", 5000, 0.25), ("recompute", 100, 0.5)), MoveCosts()
    loaded.load(costs.dump())
    for tokens in (100, 5000, 20_000):
        assert loaded.cheaper("short", "long", tokens, PREFILL_S) == costs.cheaper(
            "short", "long", tokens, PREFILL_S
        )


def test_senseless_measurements_change_nothing() -> None:
    assert not told(("kv", 0, 1.0), ("recompute", 10, -1.0)).dump()
