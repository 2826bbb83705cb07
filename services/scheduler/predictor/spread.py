"""From one expected logarithm to a distribution of tokens."""

from bisect import bisect_right
from math import exp, sqrt
from typing import Any

import numpy as np

from services.scheduler.routing.route import Residual

Array = np.ndarray[Any, Any]

LEVELS = 32
"""Equally likely values that stand for a distribution."""
_LEVELS = np.array([*((np.arange(LEVELS) + 0.5) / LEVELS), 0.5, 0.9])
ASSUMED = (-1.6, -1.0, -0.7, -0.45, -0.25, -0.05, 0.1, 0.25, 0.45, 0.65, 1.0, 1.5)
"""Errors before any are known."""
_DOUBT = 30.0
"""Trajectories after which errors are thought to be 1.22 times what is left of them."""
_LOG_MAX = 30.0


class Spread:
    """How far actual logarithms lie from the expected ones."""

    __slots__ = ("factors", "mean", "p50", "p90")

    def __init__(self, errors: Array, trajectories: float, wider: float = 1.0) -> None:
        """From errors that are left on rows that were learned from.

        Those of rows that were not are `wider`, and those of rows still to come are more so, the
        fewer trajectories there were: they need not be like those.
        """
        middle = errors.mean() if len(errors) else 0.0
        wider *= sqrt(1.0 + _DOUBT / (trajectories + _DOUBT))
        known = np.concatenate([middle + (errors - middle) * wider, ASSUMED])
        known.sort()
        quantiles = np.interp(_LEVELS, np.linspace(0.0, 1.0, len(known)), known)
        factors = np.exp(np.clip(quantiles, -_LOG_MAX, _LOG_MAX))
        self.factors: list[float] = factors[:LEVELS].tolist()
        self.mean = float(factors[:LEVELS].mean())
        self.p50, self.p90 = factors[LEVELS:].tolist()

    def residual(self, location: float, evidence: float) -> Residual:
        """Tokens remaining, when the logarithm of one more is expected at `location`."""
        scale = exp(location) if location < _LOG_MAX else exp(_LOG_MAX)
        mean = scale * self.mean - 1.0
        p50 = scale * self.p50 - 1.0
        p90 = scale * self.p90 - 1.0
        return Residual(
            mean if mean > 0.0 else 0.0,
            p50 if p50 > 0.0 else 0.0,
            p90 if p90 > 0.0 else 0.0,
            evidence,
        )

    def remaining(self, location: float) -> list[float]:
        """Equally likely numbers of tokens, ascending."""
        scale = exp(min(location, _LOG_MAX))
        return [max(0.0, scale * factor - 1.0) for factor in self.factors]

    def residual_after(self, location: float, sampled: float, evidence: float) -> Residual:
        """The same for one that has sampled so many tokens since, and goes on."""
        left = self.remaining_after(location, sampled)
        count = len(left)
        return Residual(
            sum(left) / count, left[count // 2], left[min(count - 1, int(count * 0.9))], evidence
        )

    def remaining_after(self, location: float, sampled: float) -> list[float]:
        """Equally likely numbers of tokens after `sampled`, given that there are more."""
        values = self.remaining(location)
        first = bisect_right(values, sampled)
        if first >= LEVELS - 1:
            # Longer than nearly all: the longer it has gone on, the longer it will.
            top = max(values[-1], 1.0)
            return [max(1.0, sampled) * max(0.05, value / top) for value in values[LEVELS // 2 :]]
        return [value - sampled for value in values[first:]]
