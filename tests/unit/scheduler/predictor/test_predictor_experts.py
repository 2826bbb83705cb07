"""A second opinion while little is known, and errors of those that have not ended."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.trajectory import ToolStatus
from services.scheduler.predictor.experts import ROWS_MAX, Expert
from services.scheduler.predictor.features import COLUMNS, Progress, ToolCells
from services.scheduler.predictor.regression import bases, sampled
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.predictor.spread import Spread
from services.scheduler.predictor.unfinished import Tail
from services.scheduler.routing.outcomes import PayloadSizes, ToolOutcome
from services.scheduler.routing.route import Route

NONE = np.zeros(0)


def called(tool: str) -> ToolOutcome:
    return ToolOutcome(tool, ToolStatus.OK, PayloadSizes().class_of(40), 40, 0.0)


def play(predictor: ResidualPredictor, name: str, tools: list[str], last: int) -> None:
    route = Route(name, name, name, 100)
    predictor.begin(route)
    for tool in tools:
        route.returned(called(tool), action_tokens=50, observation_tokens=40)
        predictor.returned(route)
    route.action_tokens += last
    predictor.end(route, finished=True)


def test_without_censoring_a_tail_is_the_mean_of_what_is_larger() -> None:
    ended = np.arange(-200.0, 201.0) / 50
    assert Tail(ended, NONE, 1.0).beyond(np.array([2.0])) == pytest.approx([3.0], abs=0.05)


def test_what_lasts_long_makes_the_tail_longer() -> None:
    ended = np.linspace(-1.0, 1.0, 50)
    before = Tail(ended, NONE, 1.0).beyond(np.zeros(1))
    assert Tail(ended, np.full(50, 0.9), 1.0).beyond(np.zeros(1)) > before
    assert Tail(ended, np.full(50, 0.9), 9.0).beyond(np.zeros(1)) > before


@given(
    st.lists(st.floats(-5, 5), max_size=20),
    st.lists(st.floats(-5, 5), max_size=20),
    st.floats(0.5, 50),
    st.floats(-9, 9),
)
def test_a_tail_lies_beyond_its_bound(
    ended: list[float], lasting: list[float], weight: float, bound: float
) -> None:
    mean = Tail(np.array(ended), np.array(lasting), weight).beyond(np.array([bound]))
    assert np.isfinite(mean).all()
    assert mean[0] >= bound - 1e-9


def test_rows_tell_what_was_sampled_and_what_their_targets_are_counted_from() -> None:
    progress = Progress(ToolCells())
    points = [progress.advance(called("a"), 70 * k, 100 * k) for k in range(1, 5)]
    numbers = np.array([point.numbers for point in points], np.float32)
    cells = np.array([point.cells for point in points])
    assert sampled(numbers, cells) == pytest.approx([70, 140, 210, 280], rel=1e-4)
    assert bases(numbers, cells) == pytest.approx([point.base for point in points], rel=1e-4)
    assert cells.max() < COLUMNS


def test_the_second_opinion_counts_for_a_share_and_widens_the_spread() -> None:
    predictor = ResidualPredictor()
    for index in range(20):
        long = index % 3 == 0
        play(predictor, f"t{index}", ["grep"] * 3 + ["long" if long else "short"], 4000 * long + 40)
    predictor.settle()
    assert 0.0 < predictor._expert.share < 1.0
    assert predictor._expert.wider > 1.0


def test_the_second_opinion_ends_when_much_is_known() -> None:
    expert = Expert(ROWS_MAX)
    assert expert.share == 0.0
    assert expert.outgrown > 1e18


def test_a_blend_is_between_both_opinions() -> None:
    expert = Expert()
    expert.expected, expert.share = [3.0] * 2000, 0.5
    cells = Progress(ToolCells()).advance(called("a"), 70, 100).cells
    assert expert.blended(cells, 5.0, 1.0) == pytest.approx(4.0)
    assert expert.blended(cells, 5.0, 0.0) == 5.0


def test_larger_errors_on_what_was_not_learned_from_spread_wider() -> None:
    errors = np.linspace(-1.0, 1.0, 300)
    narrow, wide = Spread(errors, 1e6), Spread(errors, 1e6, 2.0)
    assert wide.p90 > narrow.p90
    assert wide.p50 == pytest.approx(narrow.p50, rel=0.02)
