from math import expm1

import numpy as np
import pytest

from common.trajectory import ToolStatus
from services.scheduler.predictor.features import (
    CELLS,
    COLUMNS,
    NUMBERS,
    START,
    TURN_MAX,
    Progress,
    ToolCells,
    turn_cell,
)
from services.scheduler.predictor.regression import Sums
from services.scheduler.predictor.rows import Ended, Rows, packed
from services.scheduler.predictor.spread import LEVELS, Spread
from services.scheduler.routing.outcomes import Payload, ToolOutcome


def rows(targets: list[float], clock: float) -> Rows:
    made = Rows()
    for target in targets:
        ended = Ended(1, expm1(target + START.base), clock, 0)
        made.append(packed(START), (0.0, 0.0, 0.0), ended)
    return made


def test_cells_stay_in_their_columns_whatever_comes() -> None:
    tools = ToolCells()
    progress = Progress(tools)
    sampled = context = 0
    for turn in range(TURN_MAX + 20):
        status = list(ToolStatus)[turn % len(ToolStatus)]
        sampled += 10 ** (turn % 7)
        context += 10 ** (turn % 9)
        outcome = ToolOutcome(f"tool-{turn}", status, Payload.LARGE, 10 ** (turn % 8), 0.0)
        point = progress.advance(outcome, sampled, context)
        assert len(point.numbers) == NUMBERS
        assert len(point.cells) == CELLS
        assert all(NUMBERS <= cell < COLUMNS for cell in point.cells)
        assert np.isfinite([*point.numbers, point.base]).all()


def test_turns_are_told_apart_less_the_later_they_are() -> None:
    cells = [turn_cell(turn) for turn in range(TURN_MAX)]
    assert cells == sorted(cells)
    assert cells[:11] == list(range(11))
    assert turn_cell(30) > turn_cell(20) > turn_cell(12)


def test_a_row_counts_half_after_the_half_life() -> None:
    sums = Sums(half_life=10.0)
    sums.add(rows([4.0] * 8, clock=0.0).batch())
    sums.add(rows([0.0], clock=10.0).batch())
    assert sums.count == pytest.approx(8 / 2 + 1)


def test_late_rows_weigh_as_little_as_if_they_had_come_in_time() -> None:
    early, late = Sums(10.0), Sums(10.0)
    old, new = rows([4.0] * 3, clock=2.0).batch(), rows([1.0], clock=9.0).batch()
    for batch in (old, new):
        early.add(batch)
    for batch in (new, old):
        late.add(batch)
    assert np.allclose(early.products, late.products)
    assert np.allclose(early.solve(), late.solve())


def test_few_observations_move_a_column_less_than_many() -> None:
    few, many = Sums(1e9), Sums(1e9)
    few.add(rows([2.0], clock=0.0).batch())
    many.add(rows([2.0] * 100, clock=0.0).batch())
    column = START.cells[0]
    assert 0 < few.solve()[column] < many.solve()[column] < 2.0


def test_quantiles_are_those_of_the_errors() -> None:
    errors = np.random.default_rng(0).normal(0.3, 0.5, 4000)
    spread = Spread(errors, trajectories=1e6)
    assert np.log(spread.p50) == pytest.approx(0.3, abs=0.05)
    assert np.log(spread.p90) == pytest.approx(0.3 + 1.2816 * 0.5, abs=0.05)
    assert spread.mean == pytest.approx(np.exp(errors).mean(), rel=0.05)


def test_the_spread_is_wider_the_fewer_trajectories_it_rests_on() -> None:
    errors = np.random.default_rng(0).normal(0.0, 0.5, 400)
    assert Spread(errors, 5.0).p90 > Spread(errors, 500.0).p90


def test_a_distribution_is_ascending_and_of_equal_levels() -> None:
    values = Spread(np.zeros(0), 0.0).remaining(5.0)
    assert len(values) == LEVELS
    assert values == sorted(values)
    assert min(values) >= 0
