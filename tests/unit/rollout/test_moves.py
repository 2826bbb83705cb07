import pytest

from services.rollout.engine import EngineLoad
from services.rollout.moves import Arrival, Company, Miss, company


def load(busy_s: float, running_s: float, used_s: float, running: int = 0) -> EngineLoad:
    return EngineLoad(
        kv_tokens_used=70,
        kv_tokens_free=0,
        running=running,
        waiting=0,
        decode_tokens=0,
        busy_s=busy_s,
        running_s=running_s,
        kv_tokens_used_s=used_s,
    )


def test_a_cache_that_came_costs_its_transfer() -> None:
    report = Arrival(None, 0.5).report(context_tokens=100, queue_s=9.0)
    assert (report.path, report.tokens, report.seconds, report.reason) == ("kv", 100, 0.5, "")


@pytest.mark.parametrize("miss", Miss)
def test_a_cache_that_did_not_come_costs_the_prefill_too(miss: Miss) -> None:
    report = Arrival(miss, 0.5).report(context_tokens=100, queue_s=9.0)
    assert (report.path, report.seconds, report.reason) == ("recompute", 9.5, miss.value)


def test_company_is_the_mean_over_the_turn() -> None:
    before, after = load(10.0, 20.0, 1000.0), load(14.0, 32.0, 1800.0)
    assert company(before, after) == Company(running=3, kv_tokens_used=200)


def test_a_turn_that_took_no_time_was_never_alone_less_than_one() -> None:
    same = load(10.0, 20.0, 1000.0)
    assert company(same, same) == Company(running=1, kv_tokens_used=70)
    assert company(same, load(20.0, 20.0, 1000.0)).running == 1
