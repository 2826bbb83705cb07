from hypothesis import given
from hypothesis import strategies as st

from common.trajectory import StopReason
from services.rollout.limits import Limits, Progress, next_budget, why_cut

LIMITS = Limits(turns_max=3, turn_tokens_max=10, trajectory_tokens_max=25, context_tokens_max=100)


def at(turns: int = 0, sampled: int = 0, context: int = 20) -> Progress:
    return Progress(turns=turns, sampled_tokens=sampled, context_tokens=context)


def test_each_turn_may_use_its_own_limit_in_full() -> None:
    assert next_budget(LIMITS, at(0, 0)) == 10
    assert next_budget(LIMITS, at(1, 10)) == 10


def test_the_last_tokens_of_a_trajectory_bound_a_turn() -> None:
    assert next_budget(LIMITS, at(2, 20)) == 5
    assert next_budget(LIMITS, at(2, 25)) is StopReason.TOKENS_MAX


def test_turns_are_counted() -> None:
    assert next_budget(LIMITS, at(3, 9)) is StopReason.TURNS_MAX


def test_the_context_bounds_a_turn() -> None:
    assert next_budget(LIMITS, at(1, 5, context=97)) == 3
    assert next_budget(LIMITS, at(1, 5, context=100)) is StopReason.CONTEXT_OVERFLOW
    assert next_budget(LIMITS, at(1, 5, context=400)) is StopReason.CONTEXT_OVERFLOW


def test_a_cut_turn_names_the_limit_that_cut_it() -> None:
    assert why_cut(LIMITS, at(0, 0)) is StopReason.TOKENS_MAX
    assert why_cut(LIMITS, at(2, 20)) is StopReason.TOKENS_MAX
    assert why_cut(LIMITS, at(1, 5, context=97)) is StopReason.CONTEXT_OVERFLOW


@given(st.integers(0, 5), st.integers(0, 50), st.integers(0, 200))
def test_a_budget_keeps_every_limit(turns: int, sampled: int, context: int) -> None:
    budget = next_budget(LIMITS, at(turns, sampled, context))
    if not isinstance(budget, StopReason):
        assert 0 < budget <= LIMITS.turn_tokens_max
        assert sampled + budget <= LIMITS.trajectory_tokens_max
        assert context + budget <= LIMITS.context_tokens_max
        assert turns < LIMITS.turns_max
