"""Ridge regression from decayed sums: what rows say on average."""

from typing import Any

import numpy as np

from services.scheduler.predictor.features import (
    COLUMNS,
    SIZE_COLUMNS,
    START_COLUMN,
    STATUS_COLUMNS,
    TOOL_COLUMNS,
    TURN_COLUMNS,
)
from services.scheduler.predictor.rows import Batch

Array = np.ndarray[Any, Any]

_PENALTIES = np.empty(COLUMNS)
"""Rows' worth of belief that a column says nothing: small for what differs most between
workloads, so that it is learned first, larger for what only bends it."""
_PENALTIES[:] = 15.0
_PENALTIES[0] = 1.0  # the constant
_PENALTIES[TURN_COLUMNS] = 5.0
_PENALTIES[STATUS_COLUMNS] = 5.0
_PENALTIES[SIZE_COLUMNS] = 10.0
_PENALTIES[TOOL_COLUMNS] = 3.0
_PENALTIES[START_COLUMN] = 1.0  # no other column speaks for the start


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
        dense = batch.dense(COLUMNS)
        dense *= np.sqrt(shares)[:, None]
        self.products += dense.T @ dense
        self.moments += dense.T @ (batch.targets * np.sqrt(shares))
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
            dense, targets = guessed
            products = products + weight * (dense.T @ dense)
            moments = moments + weight * (dense.T @ targets)
        return np.linalg.solve(products + np.diag(_PENALTIES), moments)
