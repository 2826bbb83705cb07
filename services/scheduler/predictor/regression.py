"""Ridge regression from decayed sums: what rows say on average."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.scheduler.predictor.features import (
    COLUMNS,
    LOG_SAMPLED,
    LOG_TURN,
    SIZE_COLUMNS,
    START_COLUMN,
    STATUS_COLUMNS,
    TOKENS_GUESSED,
    TOOL_COLUMNS,
    TURN_COLUMNS,
    TURN_TOKENS_GUESSED,
    Point,
    turns_guessed,
)
from services.scheduler.predictor.rows import Batch, dense

Array = np.ndarray[Any, Any]

PENALTIES = np.empty(COLUMNS)
"""Rows' worth of belief that a column says nothing: small for what differs most between
workloads, so that it is learned first, larger for what only bends it."""
PENALTIES[:] = 15.0
PENALTIES[0] = 1.0  # the constant
PENALTIES[TURN_COLUMNS] = 5.0
PENALTIES[STATUS_COLUMNS] = 5.0
PENALTIES[SIZE_COLUMNS] = 10.0
PENALTIES[TOOL_COLUMNS] = 3.0
PENALTIES[START_COLUMN] = 1.0  # no other column speaks for the start


def sampled(numbers: Array, cells: Array) -> Array:
    """Tokens sampled up to each row."""
    column, centre = LOG_SAMPLED
    starts = cells[:, 0] == START_COLUMN
    return np.where(starts, 0.0, np.expm1(numbers[:, column].astype(np.float64) + centre))


def bases(numbers: Array, cells: Array) -> Array:
    """What each row's target is counted from (`Point.base`)."""
    turns = np.expm1(numbers[:, LOG_TURN].astype(np.float64))
    turns_left = turns_guessed(0) + (turns_guessed(1) - turns_guessed(0)) * turns
    in_turn = (sampled(numbers, cells) + TURN_TOKENS_GUESSED) / (turns + 1.0)
    starts = cells[:, 0] == START_COLUMN
    return np.log1p(np.where(starts, TOKENS_GUESSED, in_turn * turns_left))


class Sums:
    """Sums over rows, each weighted by its age at `clock`: they add up across shards."""

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.clock = 0.0
        self.products = np.zeros((COLUMNS, COLUMNS))
        self.moments = np.zeros(COLUMNS)
        self.count = 0.0

    def _age_to(self, clock: float) -> None:
        if clock > self.clock:
            share = 0.5 ** ((clock - self.clock) / self.half_life)
            self.products *= share
            self.moments *= share
            self.count *= share
            self.clock = clock

    def add(self, batch: Batch) -> None:
        """Take in rows."""
        self._age_to(float(batch.clocks.max()))
        shares = 0.5 ** ((self.clock - batch.clocks) / self.half_life)
        rows = dense(batch.numbers, batch.cells)
        rows *= np.sqrt(shares)[:, None]
        self.products += rows.T @ rows
        self.moments += rows.T @ (batch.targets * np.sqrt(shares))
        self.count += float(shares.sum())

    def merge(self, other: "Sums") -> None:
        """Take in what another one has summed up."""
        self._age_to(other.clock)
        share = 0.5 ** ((self.clock - other.clock) / self.half_life)
        self.products += other.products * share
        self.moments += other.moments * share
        self.count += other.count * share

    def solve(self, guessed: tuple[Array, Array] | None = None, weight: float = 1.0) -> Array:
        """Weights of the columns; `guessed` rows, dense, and targets count in for this once."""
        products, moments = self.products, self.moments
        if guessed is not None:
            rows, targets = guessed
            products = products + weight * (rows.T @ rows)
            moments = moments + weight * (rows.T @ targets)
        return np.linalg.solve(products + np.diag(PENALTIES), moments)


def regressed(weights: Sequence[float], point: Point) -> float:
    """Expected log(1 + remaining) at a point. Written out: it is called at every tool return."""
    w = weights
    numbers, cells, base, _, _ = point
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = numbers
    c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 = cells
    return (
        base
        + (a * w[0] + b * w[1] + c * w[2] + d * w[3] + e * w[4] + f * w[5] + g * w[6])
        + (h * w[7] + i * w[8] + j * w[9] + k * w[10] + m * w[11] + n * w[12] + o * w[13])
        + (p * w[14] + q * w[15] + w[c0] + w[c1] + w[c2] + w[c3] + w[c4] + w[c5] + w[c6])
        + (w[c7] + w[c8] + w[c9])
    )
