import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.advantages import group_advantages

rewards = st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=16)


def test_advantages_are_rewards_in_standard_deviations_from_the_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [0.75 / math.sqrt(0.1875), *[-0.25 / math.sqrt(0.1875)] * 3], rel=1e-3
    )


def test_groups_that_differ_by_a_constant_have_equal_advantages_of_mean_zero() -> None:
    high, low = group_advantages([0.8, 1.0]), group_advantages([0.0, 0.2])
    assert high == pytest.approx(low)
    assert high == pytest.approx([-1.0, 1.0], rel=2e-3)


def test_a_group_of_8_with_2_failures_is_a_group_of_6() -> None:
    six = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5]
    eight = [1.0, None, 0.0, 0.0, 1.0, None, 1.0, 0.5]
    assert [a for a in group_advantages(eight) if a is not None] == group_advantages(six)
    assert [a is None for a in group_advantages(eight)] == [r is None for r in eight]


def test_without_std_advantages_are_distances_from_the_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.5], normalise_std=False) == pytest.approx([0.5, -0.5, 0])


def test_without_baseline_the_advantage_is_the_reward() -> None:
    assert group_advantages([1.0, None, 0.25], baseline="none") == [1.0, None, 0.25]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e9, -3.3])
def test_equal_rewards_have_advantages_of_exactly_zero(reward: float) -> None:
    assert group_advantages([reward] * 7) == [0.0] * 7


def test_a_singleton_has_advantage_zero() -> None:
    assert group_advantages([1.0]) == [0.0]
    assert group_advantages([None, 1.0, None]) == [None, 0.0, None]


def test_rewards_that_differ_by_rounding_have_negligible_advantages() -> None:
    advantages = group_advantages([1.0, 1.0 + 1e-9, 1.0, 1.0 - 1e-9])
    assert all(a is not None and abs(a) < 1e-3 for a in advantages)


def test_a_group_below_the_usable_minimum_counts_for_nothing() -> None:
    assert group_advantages([1.0, 0.0, None], usable_min=3) == [0.0, 0.0, None]


@given(rewards)
def test_advantages_are_bounded_and_sum_to_zero(values: list[float | None]) -> None:
    advantages = [a for a in group_advantages(values) if a is not None]
    assert all(abs(a) <= math.sqrt(max(len(advantages) - 1, 0)) + 1e-9 for a in advantages)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)


@given(rewards)
def test_failed_trajectories_change_nothing_for_the_others(values: list[float | None]) -> None:
    usable = [value for value in values if value is not None]
    kept = [a for a in group_advantages(values) if a is not None]
    assert kept == group_advantages(usable)
