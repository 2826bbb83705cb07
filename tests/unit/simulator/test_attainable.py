"""What the randomness of a workload leaves to be known."""

import math
from statistics import fmean

import pytest

from services.simulator.attainable import attainable_accuracy
from services.simulator.workload_presets import SEARCH_R1
from services.simulator.workloads import ParametricWorkload

BOUNDS = (4_000, 12_000)


@pytest.mark.slow
def test_an_outcome_that_decides_more_lets_more_be_routed_right() -> None:
    weak, strong = (
        attainable_accuracy(
            ParametricWorkload(SEARCH_R1, seed=1, strength=strength), BOUNDS, range(12)
        )
        for strength in (0.02, 0.6)
    )
    assert 0.6 < weak < strong - 0.03 < 0.9


def test_a_single_bucket_is_always_right() -> None:
    assert attainable_accuracy(ParametricWorkload(SEARCH_R1, seed=1), (), range(1)) == 1.0


@pytest.mark.slow
def test_ends_that_are_as_likely_are_as_long_on_average() -> None:
    workload = ParametricWorkload(SEARCH_R1, seed=1)
    ends = [end for index in range(24) for end in workload.endings(index, 0, draws=8)]
    real = fmean(math.log(context) for context, _ in ends)
    drawn = fmean(math.log(one) for _, others in ends for one in others)
    assert drawn == pytest.approx(real, abs=0.06)


def test_ends_are_drawn_at_each_tool_return_and_never_change() -> None:
    workload = ParametricWorkload(SEARCH_R1, seed=1)
    ends = list(workload.endings(0, 0, draws=3))
    assert len(ends) == sum(len(member.turns) - 1 for member in workload.group(0, 0))
    assert ends == list(ParametricWorkload(SEARCH_R1, seed=1).endings(0, 0, draws=3))
