"""Rows of finished trajectories: those that wait to be taken in, and a ring of the newest."""

from array import array
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from services.scheduler.predictor.features import CELLS, COLUMNS, NUMBERS, Point

Array = np.ndarray[Any, Any]


SEEN = 3
"""What was known of a trajectory's siblings at one of its points, beside those finished: the clock
(siblings learned by then had finished), how many others had not, and their mean of
log(1 + action tokens), minus the trajectory's own."""


class Kept(NamedTuple):
    """A finished trajectory whose rows are in the ring."""

    task: str
    start: int
    """Number of its first row, counted from the first row ever."""
    rows: int
    clock: float


class Batch(NamedTuple):
    """Rows as arrays."""

    numbers: Array
    """float64 [rows, NUMBERS]"""
    cells: Array
    """uint16 [rows, CELLS]"""
    targets: Array
    """float64 [rows]: log(1 + remaining) minus the point's base."""
    clocks: Array
    """float64 [rows]: when it was learned."""
    seen: Array
    """float64 [rows, SEEN]: what was known of its siblings when the point came (`SEEN`)."""
    groups: Array
    """int64 [rows]: number of its prompt."""


def dense(numbers: Array, cells: Array) -> Array:
    """float64 [rows, COLUMNS]; the last column, which stands for no cell, is zero."""
    rows = np.zeros((len(numbers), COLUMNS))
    rows[:, :NUMBERS] = numbers
    rows[np.arange(len(rows))[:, None], cells] = 1.0
    rows[:, -1] = 0.0
    return rows


_FIELDS = NUMBERS + CELLS
_WIDTH = _FIELDS + 2
_ROW_BYTES = 8 * _WIDTH
_PACK = Struct(f"{_WIDTH}d").pack


def packed(point: Point) -> bytes:
    """A row as float64, with its base and the tokens sampled."""
    return _PACK(*point.numbers, *point.cells, point.base, point.sampled)


class Ended(NamedTuple):
    """One trajectory among those that wait."""

    rows: int
    total: float
    """Tokens that it has sampled in all."""
    clock: float
    group: int


class Rows:
    """Rows of trajectories that wait to be taken in together."""

    def __init__(self) -> None:
        self._table = bytearray()
        self._seen = array("d")
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        return len(self._table) // _ROW_BYTES

    def append(self, table: bytes | bytearray, seen: Sequence[float], ended: Ended) -> None:
        """The first rows of a trajectory, packed; as many as `ended` says."""
        self._table += table[: ended.rows * _ROW_BYTES]
        self._seen.extend(seen[: ended.rows * SEEN])
        self._ended.append(ended)

    def batch(self) -> Batch:
        """All of them, as views: nothing may be appended afterwards."""
        table = np.frombuffer(self._table, np.float64).reshape(-1, _WIDTH)
        rows, totals, clocks, groups = map(np.array, zip(*self._ended, strict=True))
        return Batch(
            numbers=table[:, :NUMBERS],
            cells=table[:, NUMBERS:_FIELDS].astype(np.uint16),
            targets=np.log1p(np.repeat(totals, rows) - table[:, -1]) - table[:, -2],
            clocks=np.repeat(clocks, rows),
            seen=np.frombuffer(self._seen, np.float64).reshape(-1, SEEN),
            groups=np.repeat(groups, rows),
        )


class Ring:
    """The newest rows of whole trajectories, and what each has left unexplained.

    Trajectories are known from `keep` on, their arrays from the next `write`.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self.numbers = np.zeros((rows_max, NUMBERS), np.float32)
        self.cells = np.zeros((rows_max, CELLS), np.uint16, order="F")
        self.targets = np.zeros(rows_max)
        self.clocks = np.zeros(rows_max)
        self.seen = np.zeros((rows_max, SEEN))
        self.groups = np.zeros(rows_max, np.int64)
        self.kept: deque[Kept] = deque()
        self.total = 0
        """Rows ever kept."""
        self.written = 0
        """Of them, those in the arrays."""
        self.residuals = array("d", bytes(8 * rows_max))
        """Target minus the regression's value."""

    def keep(self, task: str, rows: int, clock: float) -> tuple[Kept, list[Kept]]:
        """Give a trajectory its rows; also returns those that are overwritten for it."""
        kept = Kept(task, self.total, rows, clock)
        self.kept.append(kept)
        self.total += rows
        gone: list[Kept] = []
        while self.kept[0].start < self.total - self.rows_max:
            gone.append(self.kept.popleft())
        return kept, gone

    def write(self, batch: Batch) -> None:
        """Take in the arrays of what was kept since the last time, in the same order."""
        places = np.arange(self.written, self.total) % self.rows_max
        assert len(places) == len(batch.targets)
        self.numbers[places] = batch.numbers
        self.cells[places] = batch.cells
        self.targets[places] = batch.targets
        self.clocks[places] = batch.clocks
        self.seen[places] = batch.seen
        self.groups[places] = batch.groups
        self.written = self.total

    def explain(self, weights: Array) -> Array:
        """Residuals under these weights, of all rows by place."""
        size = min(self.total, self.rows_max)
        residuals = self.targets[:size] - self.numbers[:size] @ weights[:NUMBERS].astype(np.float32)
        for cells in self.cells.T:
            residuals -= weights[cells[:size]]
        self.residuals[:size] = array("d", residuals.tobytes())
        return residuals

    def newest(self, rows: int) -> Array:
        """Places of the newest rows, oldest first, from the start of a trajectory on."""
        first = max(0, self.total - rows, self.kept[0].start if self.kept else 0)
        return np.arange(first, self.total) % self.rows_max

    def batch(self) -> Batch:
        """All rows, oldest first, as copies; the ring must be written."""
        assert self.written == self.total
        places = self.newest(self.rows_max)
        return Batch(
            self.numbers[places],
            self.cells[places],
            self.targets[places],
            self.clocks[places],
            self.seen[places],
            self.groups[places],
        )


Trajectories = tuple[Sequence[Kept], Batch]
"""Whole trajectories in the order of their rows, and the rows."""


def united(first: Trajectories, second: Trajectories) -> Trajectories:
    """Those of both by clock; equal clocks by task and length."""
    kept = [*first[0], *second[0]]
    starts = np.cumsum([0, *(one.rows for one in kept)])
    order = sorted(range(len(kept)), key=lambda k: (kept[k].clock, kept[k].task, kept[k].rows))
    places: list[Array] = [np.arange(starts[k], starts[k + 1]) for k in order]
    chosen = np.concatenate([np.zeros(0, np.int64), *places])
    columns = zip(first[1], second[1], strict=True)
    return [kept[k] for k in order], Batch(*(np.concatenate(pair)[chosen] for pair in columns))
