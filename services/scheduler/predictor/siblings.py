"""What the siblings of a trajectory say of it: they leave the same things unexplained.

A sibling's residuals are noisy, so they are weighed like measurements: by how much residuals of
two siblings have in common (on the whole, and at the same turn) against how much one varies.
Both are measured over all groups in the ring. Where siblings have nothing in common, such as
samples of different models, their weights come out as zero.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from services.scheduler.predictor.features import NUMBERS, TURN_CELLS, TURN_MAX
from services.scheduler.predictor.rows import Kept, Ring

Array = np.ndarray[Any, Any]

SIBLINGS_MAX = 32
"""The newest so many finished siblings are asked."""
SIGNALS = 6
_ASSUMED = np.array([0.7, 0.3, 0.0, 0.0, 0.0, 0.0])
"""Weights before anything is known."""
_PENALTIES = np.array([20.0, 20.0, 20.0, 20.0, 20.0, 3.0])
"""Rows' worth of belief in that; few for the constant, which follows a drift."""
_PENALTY_MIN = 1e-6
_FINISHED_DOUBT = 1.5
_TURN_DOUBT = 1.0
"""A mean over n siblings counts n / (n + doubt)."""
_ASKED_ROWS = 16384
"""Siblings are looked for in so many of the newest rows."""
_RESIDUAL_MAX = 3.0
_TURN_CELLS = 32
_CLOCK_MAX = 1e9


def signals(
    mean: float, finished: int, at_turn: float, count: int, unfinished: float, ahead: float
) -> tuple[float, ...]:
    """What siblings say, as columns; the last one is the constant."""
    others = finished + unfinished
    return (
        mean * finished / (finished + _FINISHED_DOUBT),
        (at_turn - mean * finished / (finished + _FINISHED_DOUBT)) * count / (count + _TURN_DOUBT),
        finished / (finished + 1.0),
        unfinished / (others + 1.0),
        ahead * unfinished / (others + 1.0),
        1.0,
    )


class Unfinished(NamedTuple):
    """Rows of unfinished trajectories, ended as is expected of them."""

    rows: float = 0.0
    residual: float = 0.0
    """Mean."""


def fit(
    ring: Ring, residuals: Array, newest: int, censored: Unfinished
) -> tuple[list[float], Array]:
    """Weights of the signals, from what they said of the newest rows when those came.

    Unfinished rows count for the constant only: without them it would be that of the short ones.
    Also returns what is left unexplained of the newest rows, moved likewise.
    """
    places = ring.newest(_ASKED_ROWS)
    if len(places) < 2:
        return _ASSUMED.tolist(), np.zeros(0)
    cut = np.clip(residuals[places], -_RESIDUAL_MAX, _RESIDUAL_MAX)
    turn_cells = ring.cells[places, 0].astype(np.int64) - NUMBERS
    starts = turn_cells == 0
    starts[0] = True
    trajectory = np.cumsum(starts) - 1
    means = np.bincount(trajectory, cut) / np.bincount(trajectory)
    groups, clocks = ring.groups[places], ring.clocks[places]
    told = slice(max(0, len(places) - newest), None)
    seen = ring.seen[places[told]]
    mean, finished = _before(groups[starts], clocks[starts], means, groups[told], seen[:, 0])
    turn_keys = groups * _TURN_CELLS + turn_cells
    at_turn, count = _before(turn_keys, clocks, cut, turn_keys[told], seen[:, 0])
    unfinished, ahead = seen[:, 1], seen[:, 2]
    shrunk = mean * finished / (finished + _FINISHED_DOUBT)
    others = finished + unfinished
    columns = np.stack(
        [
            shrunk,
            (at_turn - shrunk) * count / (count + _TURN_DOUBT),
            finished / (finished + 1.0),
            unfinished / (others + 1.0),
            ahead * unfinished / (others + 1.0),
            np.ones(len(mean)),
        ]
    )
    penalties = _PENALTIES * float(np.square(cut[told]).mean()) + _PENALTY_MIN
    products = columns @ columns.T + np.diag(penalties)
    moments = columns @ cut[told] + penalties * _ASSUMED
    products[-1, -1] += censored.rows
    moments[-1] += censored.rows * censored.residual
    weights = np.linalg.solve(products, moments)
    left = residuals[places[told]] - weights @ columns
    share = censored.rows / (censored.rows + len(left))
    left += share * (censored.residual - weights[-1] - left.mean())
    return weights.tolist(), left


def _before(
    keys: Array, clocks: Array, values: Array, asked: Array, at: Array
) -> tuple[Array, Array]:
    """Mean and number of the values under a key by a clock, for each key and clock asked.

    Clocks ascend.
    """
    order = np.argsort(keys, kind="stable")
    sums = np.r_[0.0, np.cumsum(values[order])]
    stamps = keys[order] * _CLOCK_MAX + clocks[order]
    last = np.searchsorted(stamps, asked * _CLOCK_MAX + at, side="right")
    first = np.searchsorted(stamps, asked * _CLOCK_MAX - 1.0, side="left")
    counts = last - first
    return (sums[last] - sums[first]) / np.maximum(counts, 1), counts


class Siblings:
    """Trajectories of one prompt."""

    __slots__ = ("_at_turn", "_mean_sum", "finished", "live", "log_sum", "number", "seen")

    def __init__(self, number: int) -> None:
        self.number = number
        self.finished: deque[Kept] = deque()
        self.live = 0
        """Unfinished ones."""
        self.log_sum = 0.0
        """Over those, of log(1 + action tokens)."""
        self.seen = -1
        """The ring's residuals are summed up as of this version of the weights."""
        self._mean_sum = 0.0
        self._at_turn: dict[int, list[float]] = {}

    def add(self, kept: Kept, ring: Ring) -> None:
        """One has finished."""
        self.finished.append(kept)
        if len(self.finished) > SIBLINGS_MAX:
            self.finished.popleft()
            self.seen = -1
        else:
            self._sum(kept, ring)

    def queue(self, kept: Kept) -> None:
        """One has finished, and is summed up with the next refresh."""
        self.finished.append(kept)
        if len(self.finished) > SIBLINGS_MAX:
            self.finished.popleft()
        self.seen = -1

    def clear(self) -> None:
        """Forget the finished ones."""
        self.finished.clear()
        self.seen = -1

    def forget(self, kept: Kept) -> None:
        """Its rows are overwritten."""
        if self.finished and self.finished[0].start == kept.start:
            self.finished.popleft()
            self.seen = -1

    def refresh(self, ring: Ring, version: int) -> None:
        """Sum up again under new weights."""
        self._mean_sum = 0.0
        self._at_turn = {}
        for kept in self.finished:
            self._sum(kept, ring)
        self.seen = version

    def _sum(self, kept: Kept, ring: Ring) -> None:
        residuals, rows_max = ring.residuals, ring.rows_max
        at_turn = self._at_turn
        total = 0.0
        for turn in range(kept.rows):
            residual = residuals[(kept.start + turn) % rows_max]
            total += residual
            cell = TURN_CELLS[turn if turn < TURN_MAX else TURN_MAX - 1]
            sums = at_turn.get(cell)
            if sums is None:
                at_turn[cell] = [residual, 1]
            else:
                sums[0] += residual
                sums[1] += 1
        self._mean_sum += total / kept.rows

    def means(self, turn_cell: int) -> tuple[float, int, float, int]:
        """Mean residual and number of finished siblings; the same of those with such a turn."""
        finished = len(self.finished)
        if not finished:
            return 0.0, 0, 0.0, 0
        at_turn = self._at_turn.get(turn_cell)
        if at_turn is None:
            return self._mean_sum / finished, finished, 0.0, 0
        count = int(at_turn[1])
        return self._mean_sum / finished, finished, at_turn[0] / count, count
