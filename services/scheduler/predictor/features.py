"""What is known of a trajectory at a tool return, as a row of a regression.

A row has `NUMBERS` numeric columns and then indicator columns, of which each of `CELLS` families
sets one. The families are nested (turn, then turn and status; tool, then tool if it failed), and
a ridge penalty draws every indicator towards zero: a context with few observations leans on its
parents. Rows depend on the trajectory's own past only, never on what was learned before, so that
sums over rows can be added across shards.
"""

from math import log1p, log2
from typing import NamedTuple
from zlib import crc32

from common.trajectory import ToolStatus
from services.scheduler.routing.outcomes import ToolOutcome

NUMBERS = 16
"""Numeric columns of a row; `Progress.point` lists them."""
CELLS = 10
"""Indicators that are set in a row."""

TURN_MAX = 512
"""Later turns are told apart no more."""
_TURN_CELLS = 24
_STATUS_TURNS = 7
STATUSES = 4
_STREAK_MAX = 5
_KINDS = 3
_REPEATS = 5
SIZE_CELLS = 13
TOOL_CELLS = 24
_FAILED_TOOL_CELLS = 16

_TURN = NUMBERS
_TURN_STATUS = _TURN + _TURN_CELLS
_STREAK = _TURN_STATUS + _STATUS_TURNS * STATUSES
_HISTORY = _STREAK + _STREAK_MAX + 1
_REPEAT = _HISTORY + _KINDS * (_KINDS + 1)
_CONTEXT = _REPEAT + _REPEATS
_OBSERVED = _CONTEXT + SIZE_CELLS
_SAMPLED = _OBSERVED + SIZE_CELLS
_TOOL = _SAMPLED + SIZE_CELLS
_FAILED_TOOL = _TOOL + TOOL_CELLS
COLUMNS = _FAILED_TOOL + _FAILED_TOOL_CELLS + 1
"""Width of a row."""
START_COLUMN = _TURN
LOG_SAMPLED = 2, 5.0
"""Column of log(1 + tokens sampled), and what is subtracted from it."""
LOG_TURN = 5
"""Column of log(1 + turns)."""
TURN_COLUMNS = slice(_TURN, _TURN_STATUS)
STATUS_COLUMNS = slice(_TURN_STATUS, _CONTEXT)
SIZE_COLUMNS = slice(_CONTEXT, _TOOL)
TOOL_COLUMNS = slice(_TOOL, COLUMNS)
OBSERVED_COLUMN = _OBSERVED
"""Of the smallest observation; larger ones follow."""

_STATUS = {
    ToolStatus.OK: 0,
    ToolStatus.EMPTY: 1,
    ToolStatus.ERROR: 2,
    ToolStatus.MALFORMED: 2,
    ToolStatus.TIMEOUT: 3,
    ToolStatus.INFRASTRUCTURE: 3,
}
_TOOLS_KNOWN_MAX = 4096
_TURNS_GUESSED = 3.0
_TURNS_GUESSED_PER_TURN = 0.5
"""Without any evidence: so many turns more. The longer it has gone on, the longer it will."""
TURN_TOKENS_GUESSED = 60
"""Their length is the mean so far, of one such turn more: a first turn alone says little."""
TOKENS_GUESSED = 500
"""In all, of a trajectory that has sampled nothing yet, without any evidence."""


def turns_guessed(turn: int) -> float:
    """Turns to come after so many, without any evidence."""
    return _TURNS_GUESSED + _TURNS_GUESSED_PER_TURN * turn


def turn_cell(turn: int) -> int:
    """Class of a turn number: exact up to 10, then three classes per doubling."""
    if turn <= 10:
        return turn
    return min(_TURN_CELLS - 1, 11 + int(3 * log2(turn / 10)))


TURN_CELLS = [turn_cell(turn) for turn in range(TURN_MAX)]
"""By turn."""


class Point(NamedTuple):
    """A routing point as a row; the row's value in the regression is `numbers` and ones."""

    numbers: tuple[float, ...]
    cells: tuple[int, ...]
    """Columns of the indicators that are set."""
    base: float
    """Guess of log(1 + remaining tokens) without any evidence; the regression corrects it."""
    turn: int
    """Turns finished, at most `TURN_MAX - 1`."""
    sampled: int
    """Action tokens up to here."""


START = Point(
    numbers=(0.0,) * NUMBERS,
    cells=(_TURN, *(COLUMNS - 1,) * (CELLS - 1)),
    base=log1p(TOKENS_GUESSED),
    turn=0,
    sampled=0,
)
"""The point before the first turn."""


class ToolCells:
    """Cells of tools by name, hashed: stable across processes, collisions are harmless."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[int, int]] = {}

    def of(self, tool: str) -> tuple[int, int]:
        """Column of the tool, and column of the tool when it failed."""
        cells = self._cells.get(tool)
        if cells is None:
            if len(self._cells) >= _TOOLS_KNOWN_MAX:
                self._cells.clear()
            digest = crc32(tool.encode())
            cells = (_TOOL + digest % TOOL_CELLS, _FAILED_TOOL + digest % _FAILED_TOOL_CELLS)
            self._cells[tool] = cells
        return cells


class Progress:
    """A trajectory so far, kept up turn by turn."""

    __slots__ = (
        "_errors",
        "_kind",
        "_kind_before",
        "_log_sum",
        "_observed",
        "_repeats",
        "_sampled_in_turn",
        "_streak",
        "_tools",
        "context",
        "sampled",
        "turn",
    )

    def __init__(self, tools: ToolCells) -> None:
        self._tools = tools
        self.turn = 0
        self.sampled = 0
        self.context = 0
        self._errors = 0
        self._streak = 0
        self._kind = self._kind_before = 0
        self._log_sum = 0.0
        self._repeats = 0
        self._sampled_in_turn: int = -1
        self._observed: int = -1

    def advance(self, outcome: ToolOutcome, sampled: int, context: int) -> Point:
        """One turn more: all action tokens and the context with this outcome's observation."""
        in_turn = sampled - self.sampled
        observed: int = outcome.payload_tokens
        self.turn += 1
        status = _STATUS[outcome.status]
        kind = status if status < 2 else 2  # a time-out is one more way of failing
        failed = status > 0
        if failed:
            self._errors += 1
            self._streak += 1
        else:
            self._streak = 0
        if in_turn != self._sampled_in_turn:
            self._repeats = repeat = 0
        elif observed == self._observed:
            self._repeats = repeat = self._repeats + 1 if self._repeats < 3 else 3
        else:
            self._repeats, repeat = 0, 4
        self._kind_before = self._kind
        self._kind = kind + 1
        self._sampled_in_turn, self._observed = in_turn, observed
        self.sampled, self.context = sampled, context
        log_in_turn = log1p(in_turn)
        self._log_sum += log_in_turn
        return self._point(outcome.tool, status, repeat, log_in_turn)

    def _point(self, tool: str, status: int, repeat: int, log_in_turn: float) -> Point:
        turn = self.turn
        streak = self._streak if self._streak < _STREAK_MAX else _STREAK_MAX
        log_context = log1p(self.context)
        log_observed = log1p(self._observed)
        log_turn = log1p(turn)
        c = log_context - 6.0
        o = log_in_turn - 4.0
        v = log_observed - 4.0
        m = self._log_sum / turn - 4.0
        tool_cell, failed_cell = self._tools.of(tool)
        if status:
            c_failed, m_failed, v_failed = c, m, v
        else:
            c_failed = m_failed = v_failed = 0.0
            failed_cell = COLUMNS - 1
        numbers = (
            1.0,
            c,
            log1p(self.sampled) - 5.0,
            o,
            v,
            log_turn,
            m,
            self._errors / turn,
            c_failed,
            m_failed,
            v_failed,
            c * log_turn,
            m * log_turn,
            v * log_turn,
            m * streak,
            c * m,
        )
        counted = turn if turn < TURN_MAX else TURN_MAX - 1
        cells = (
            _TURN + TURN_CELLS[counted],
            _TURN_STATUS
            + (turn if turn < _STATUS_TURNS else _STATUS_TURNS - 1) * STATUSES
            + status,
            _STREAK + streak,
            _HISTORY + (self._kind - 1) * (_KINDS + 1) + self._kind_before,
            _REPEAT + repeat,
            _CONTEXT + (int(log_context) if log_context < SIZE_CELLS else SIZE_CELLS - 1),
            _OBSERVED + (int(log_observed) if log_observed < SIZE_CELLS else SIZE_CELLS - 1),
            _SAMPLED + (int(2 * log_in_turn) if log_in_turn < SIZE_CELLS / 2 else SIZE_CELLS - 1),
            tool_cell,
            failed_cell,
        )
        turn_tokens = (self.sampled + TURN_TOKENS_GUESSED) / (turn + 1)
        base = log1p(turn_tokens * turns_guessed(turn))
        return Point(numbers, cells, base, counted, self.sampled)
