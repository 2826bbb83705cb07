"""What unfinished trajectories say: they are censored observations.

Those that finish first are the short ones. How long the unfinished will be is not in their rows,
but the share of turns that were a trajectory's last is known without that bias, whoever is
unfinished. It says how many turns are left as long as little has finished; then the regression
does.

At each of its points but the last, one has already gone on for so many tokens: its error there is
at least so large. How large errors are beyond that is estimated by product limit (Kaplan and
Meier) from all, ended and not.
"""

from math import log, log1p
from typing import Any

import numpy as np

from services.scheduler.predictor.features import START_COLUMN, Point, turns_guessed
from services.scheduler.predictor.regression import bases, sampled
from services.scheduler.predictor.rows import Batch
from services.scheduler.predictor.spread import ASSUMED

Array = np.ndarray[Any, Any]

_ENDED_ASSUMED = 1.0
"""Trajectories that ended after `_TURNS_ASSUMED` turns, before any is known."""
_TURNS_ASSUMED = 3.0
_LEFT_AT_MOST = 2.0
"""Times the turns that the unfinished have had, and one: without ends, they may be halfway."""
_BELOW_MEAN = 0.6
"""An exponential's mean logarithm lies so far below the logarithm of its mean."""
_BEYOND = 0.7
"""log(2): what has outlasted all that ended goes on for as long again."""
_UNSURE = 0.3
"""Unfinished rows' share from which a last point's own estimate counts, as a row, for itself."""
_NOTHING = 1e-12


def share_unfinished(unfinished_rows: int, finished_rows: float) -> float:
    """Of all rows: how far one is from knowing."""
    return unfinished_rows / (unfinished_rows + finished_rows)


def log_turns_left(
    unfinished: int, unfinished_turns: int, ended: float, ended_turns: float
) -> float:
    """Of an unfinished one, on the whole.

    Args:
        unfinished: trajectories that have had a turn, at least one.
        unfinished_turns: turns that they have had.
        ended: trajectories that have ended.
        ended_turns: turns that those had.
    """
    turns = ended_turns + unfinished_turns + _TURNS_ASSUMED
    left = turns / (ended + _ENDED_ASSUMED)
    at_most = 1.0 + _LEFT_AT_MOST * unfinished_turns / unfinished
    return log1p(min(left, at_most)) - _BELOW_MEAN


def location_of(last: Point, regressed: float, turns_left: float, unsure: float) -> float:
    """Expected logarithm at an unfinished one's last point, by turns left and by regression."""
    by_turns = last.base - log(turns_guessed(last.turn)) + turns_left
    return regressed + unsure * (by_turns - regressed)


class Tail:
    """How large errors are, given that they are at least so large."""

    def __init__(self, ended: Array, lasting: Array, weight: float) -> None:
        """From errors, and from lower bounds of others, each of which counts `weight` times."""
        values = np.concatenate([ended, ASSUMED, lasting])
        known = len(values) - len(lasting)
        counts = np.ones(len(values))
        counts[known:] = weight
        # At equal values the ended come first: whoever lasts is at risk until then.
        order = np.lexsort((np.arange(len(values)) >= known, values))
        values, counts, ends = values[order], counts[order], order < known
        at_risk = np.cumsum(counts[::-1])[::-1]
        surviving = np.cumprod(np.where(ends, 1.0 - counts / at_risk, 1.0))
        masses = np.append(np.append(1.0, surviving[:-1])[ends] - surviving[ends], surviving[-1])
        self._values = np.append(values[ends], values[-1] + _BEYOND)
        beyond = np.cumsum(masses[::-1])[::-1]
        sums = np.cumsum((self._values * masses)[::-1])[::-1]
        self._means = np.where(beyond > _NOTHING, sums / np.maximum(beyond, _NOTHING), np.inf)

    def beyond(self, bounds: Array) -> Array:
        """Mean error of those at or above each bound."""
        places = np.searchsorted(self._values, bounds)
        means = np.append(self._means, np.inf)[places]
        return np.maximum(bounds, np.where(np.isfinite(means), means, bounds + _BEYOND))


def imputed(
    batch: Batch, expected: Array, ended: Array, *, weight: float, unsure: float
) -> tuple[Array, Array]:
    """Targets of rows of unfinished trajectories, and which rows to count.

    Args:
        batch: the rows; targets as the trajectories' last points tell them.
        expected: targets by the regression.
        ended: what the regression leaves unexplained of the ended.
        weight: unfinished rows for which each of these stands.
        unsure: how far one is from knowing (`share_unfinished`).
    """
    so_far = sampled(batch.numbers, batch.cells)
    starts = batch.cells[:, 0] == START_COLUMN
    lasts = np.append(starts[1:], [True])
    now = so_far[lasts][np.cumsum(starts) - 1]
    bounds = np.log1p(now - so_far) - bases(batch.numbers, batch.cells) - expected
    tail = Tail(ended, bounds[~lasts], weight)
    targets = expected + tail.beyond(bounds)
    targets += unsure**0.5 * (batch.targets - targets)
    targets[lasts] = batch.targets[lasts]
    # Later on, a last point would only say again what is thought of it already.
    return targets, ~lasts | (unsure >= _UNSURE)
