"""What unfinished trajectories say: they are censored observations.

Those that finish first are the short ones. How long the unfinished will be is not in their rows,
but the share of turns that were a trajectory's last is known without that bias, whoever is
unfinished. It says how many turns are left as long as little has finished; then the regression
does.
"""

from math import log, log1p

from services.scheduler.predictor.features import Point, turns_guessed

_ENDED_ASSUMED = 1.0
"""Trajectories that ended after `_TURNS_ASSUMED` turns, before any is known."""
_TURNS_ASSUMED = 3.0
_LEFT_AT_MOST = 2.0
"""Times the turns that the unfinished have had, and one: without ends, they may be halfway."""
_BELOW_MEAN = 0.6
"""An exponential's mean logarithm lies so far below the logarithm of its mean."""


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
