"""A second opinion while little is known: what the last outcome alone says.

Many columns are fitted to few trajectories, whose rows err together. The mean of log(1 +
remaining) after such an outcome (by status, then tool, then size of the observation, each drawn
towards the coarser one) needs fewer. Both are tried on the newest trajectories as if each had not
been learned from; the opinion counts as far as it would have made the square error less. How much
larger the regression's errors are there than on what it was fitted to says how far they spread.
All of it is derived from the ring and the sums, anew each time.
"""

from math import inf
from typing import Any

import numpy as np

from services.scheduler.predictor.features import (
    OBSERVED_COLUMN,
    SIZE_CELLS,
    START_COLUMN,
    STATUS_COLUMNS,
    STATUSES,
    TOOL_CELLS,
    TOOL_COLUMNS,
)
from services.scheduler.predictor.regression import PENALTIES, Sums, bases
from services.scheduler.predictor.rows import Ring, dense

Array = np.ndarray[Any, Any]

ROWS_MAX = 4096
"""Rows ever finished until which it is asked, less and less; then the regression knows better."""
_FEW = 512
_GROWTH = 1.25
"""It is derived anew when there are so many times as many rows, and each time while few."""
_TRIED = 256
"""Newest rows that both are tried on."""
_CELLS = TOOL_CELLS * STATUSES * SIZE_CELLS
_STATUS_CELL, _OBSERVED_CELL, _TOOL_CELL = 1, 6, 8
"""Places among a row's cells."""
_STATUS_COLUMN = int(STATUS_COLUMNS.start)
_TOOL_COLUMN = int(TOOL_COLUMNS.start)
_GUESS = 6.2
"""log(500): before any is known."""
_DOUBT = 1.0
"""A cell's mean counts like its parent's after so many rows."""
_SHARE_DOUBT = 30.0
"""Rows' worth, one apart in the logarithm, of belief in the regression alone."""
_WIDER_DOUBT = 20.0
_WIDER_ASSUMED = 2.0
"""Rows' worth of belief in how much larger a variance is on what was not learned from."""
_WIDER_MAX = 3.0


class Expert:
    """What the last outcome says, and how far to believe it."""

    __slots__ = ("expected", "outgrown", "share", "wider")

    def __init__(self, rows: int = 0) -> None:
        self.outgrown = inf if rows >= ROWS_MAX else rows * _GROWTH if rows > _FEW else rows
        """Rows ever finished from which it should be derived anew."""
        self.share = 0.0
        """Weight in a convex combination with the regression, where nothing is unfinished."""
        self.wider = 1.0
        """Errors on trajectories still to come, per error on those learned from."""
        self.expected: list[float] = []
        """Mean of log(1 + remaining) by cell."""

    def blended(self, cells: tuple[int, ...], location: float, known: float) -> float:
        """The regression's estimate for a row with such cells, and its share of this one."""
        share = self.share * known
        status = (cells[_STATUS_CELL] - _STATUS_COLUMN) % STATUSES
        tool = cells[_TOOL_CELL] - _TOOL_COLUMN
        observed = cells[_OBSERVED_CELL] - OBSERVED_COLUMN
        expected = self.expected[(tool * STATUSES + status) * SIZE_CELLS + observed]
        return location + share * (expected - location)


class _Seen:
    """Rows after a first outcome, and the trajectories they are of."""

    def __init__(self, ring: Ring, half_life: float) -> None:
        places = ring.newest(ROWS_MAX)
        starts = ring.cells[places, 0] == START_COLUMN
        self.trajectories = (np.cumsum(starts) - 1)[~starts]
        self.places = places = places[~starts]
        self.numbers, self.cells = ring.numbers[places], ring.cells[places].astype(np.int64)
        self.actual = ring.targets[places] + bases(self.numbers, self.cells)
        newest = ring.clocks[places].max(initial=0.0)
        self.shares = 0.5 ** ((newest - ring.clocks[places]) / half_life)


def expert(ring: Ring, residuals: Array, sums: Sums) -> Expert:
    """Derive it from written rows, and from what the regression leaves unexplained of them."""
    made = Expert(ring.total)
    if ring.total >= ROWS_MAX:
        return made
    seen = _Seen(ring, sums.half_life)
    if not len(seen.places) or seen.trajectories[-1] < 1:
        return made
    tried = slice(max(0, len(seen.places) - _TRIED), None)
    expected, untold = _tables(seen, tried)
    made.expected = expected.tolist()
    fitted = residuals[seen.places[tried]]
    missed = _missed(seen, tried, fitted, sums)
    apart = untold - (seen.actual[tried] - missed)
    share = float(apart @ missed) / (float(apart @ apart) + _SHARE_DOUBT)
    made.share = min(1.0, max(0.0, share)) * (1.0 - ring.total / ROWS_MAX)
    count, variance = len(missed), float(fitted.var()) + 1e-9
    times = float(missed.var()) / variance * count + _WIDER_ASSUMED * _WIDER_DOUBT
    made.wider = min(_WIDER_MAX, max(1.0, (times / (count + _WIDER_DOUBT)) ** 0.5))
    return made


def _tables(seen: _Seen, tried: slice) -> tuple[Array, Array]:
    """Means by cell; and those at the tried rows, without what their own trajectory said."""
    status = (seen.cells[:, _STATUS_CELL] - _STATUS_COLUMN) % STATUSES
    tool = (seen.cells[:, _TOOL_CELL] - _TOOL_COLUMN) * STATUSES + status
    finest = tool * SIZE_CELLS + seen.cells[:, _OBSERVED_CELL] - OBSERVED_COLUMN
    cells = np.arange(_CELLS)
    levels = (
        (np.zeros_like(status), np.zeros_like(cells)),
        (status, cells // SIZE_CELLS % STATUSES),
        (tool, cells // SIZE_CELLS),
        (finest, cells),
    )
    expected = np.full(_CELLS, _GUESS)
    untold = np.full(len(status[tried]), _GUESS)
    for codes, parents in levels:
        totals = np.bincount(codes, seen.shares * seen.actual, _CELLS)
        counts = np.bincount(codes, seen.shares, _CELLS)
        expected = (totals[parents] + _DOUBT * expected) / (counts[parents] + _DOUBT)
        _, own = np.unique(seen.trajectories * _CELLS + codes, return_inverse=True)
        own_totals = np.bincount(own, seen.shares * seen.actual)[own[tried]]
        own_counts = np.bincount(own, seen.shares)[own[tried]]
        at = codes[tried]
        left = np.maximum(counts[at] - own_counts, 0.0)
        untold = (totals[at] - own_totals + _DOUBT * untold) / (left + _DOUBT)
    return expected, untold


def _missed(seen: _Seen, tried: slice, fitted: Array, sums: Sums) -> Array:
    """Errors of the regression, had it not learned from the trajectory.

    Without a block of rows, its residuals are those with it, times the inverse of one minus the
    block of the hat matrix.
    """
    count = len(fitted)
    rows = dense(seen.numbers[tried], seen.cells[tried])
    solved = np.linalg.solve(sums.products + np.diag(PENALTIES), rows.T)
    shares = seen.shares[tried]
    cuts = np.flatnonzero(np.diff(seen.trajectories[tried])) + 1
    missed = fitted.copy()
    for first, last in zip((0, *cuts.tolist()), (*cuts.tolist(), count), strict=True):
        hat = rows[first:last] @ solved[:, first:last] * shares[first:last]
        rest = (1.0 + 1e-6) * np.eye(last - first) - hat
        missed[first:last] = np.linalg.solve(rest, fitted[first:last])
    return missed
