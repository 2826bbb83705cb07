"""What the residual predictor is compared with: single signals, and the published prefix tree.

They learn from the same finished trajectories at the same moments. Each is as strong as it can
fairly be: tables are shrunk towards coarser ones, stand by themselves or correct the turn's, and
of several settings the best in hindsight counts; the tree averages logarithms, which are what it
is judged by.
"""

from collections.abc import Callable
from math import inf, log1p
from typing import Protocol

from services.scheduler.routing.route import Route
from services.scheduler.routing.tree import PrefixTree, state_of

GUESS = log1p(500)
"""Before anything was learned."""
HALF_LIVES = (inf, 300.0)
"""Finished trajectories after which an observation counts half."""
DOUBTS = (1.0, 5.0)
"""Observations' worth of belief that a cell is like its parent."""
TURN_MAX = 64


class Estimator(Protocol):
    """Expects log(1 + tokens still to come)."""

    def expect(self, route: Route) -> float:
        """After the route's last tool return."""
        ...

    def learn(self, route: Route) -> None:
        """It finished."""
        ...


Keys = Callable[[Route, int], tuple[object, ...]]
"""Cells of a route's turn, from the coarsest to the finest."""


class Table:
    """Means by cell, each drawn towards its parent's; older observations count less.

    With a `base`, they are means of what that one leaves unexplained.
    """

    def __init__(
        self, keys: Keys, half_life: float, doubt: float, base: "Table | None" = None
    ) -> None:
        self._keys = keys
        self._half_life = half_life
        self._doubt = doubt
        self._base = base
        self._clock = 0
        self._cells: dict[object, tuple[float, float, int]] = {}
        """Sum, count, and the clock up to which both have aged."""

    def _aged(self, key: object) -> tuple[float, float]:
        total, count, clock = self._cells.get(key, (0.0, 0.0, self._clock))
        share = 0.5 ** ((self._clock - clock) / self._half_life)
        return total * share, count * share

    def expect(self, route: Route) -> float:
        """From the finest cell, which leans on the others."""
        return self.at(route, route.turns - 1)

    def at(self, route: Route, turn: int) -> float:
        """The same after an earlier turn."""
        expected = 0.0 if self._base else GUESS
        for key in ("all", *self._keys(route, turn)):
            total, count = self._aged(key)
            doubt = 1.0 if key == "all" else self._doubt
            expected = (total + doubt * expected) / (count + doubt)
        return expected + (self._base.at(route, turn) if self._base else 0.0)

    def learn(self, route: Route) -> None:
        """All its points."""
        self._clock += 1
        if self._base:
            self._base.learn(route)
        for turn, sampled in enumerate(route.action_tokens_at):
            if sampled < route.action_tokens:
                value = log1p(route.action_tokens - sampled)
                value -= self._base.at(route, turn) if self._base else 0.0
                for key in ("all", *self._keys(route, turn)):
                    total, count = self._aged(key)
                    self._cells[key] = (total + value, count + 1.0, self._clock)


class Tree:
    """The published prefix tree of prompts and exact histories."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._states: dict[str, list[str]] = {}
        """Of each living trajectory: naming all its returns at each of them takes too long."""

    def expect(self, route: Route) -> float:
        """From the longest history that was seen before."""
        states = self._states.setdefault(route.trajectory_id, [])
        states += [state_of(each) for each in route.outcomes[len(states) :]]
        found = self._tree.estimate(route.task_id, states)
        return GUESS if found is None else found.node.residual().mean

    def learn(self, route: Route) -> None:
        """All its points that were followed by more."""
        self._states.pop(route.trajectory_id, None)
        points = [
            (state_of(outcome), log1p(route.action_tokens - sampled))
            for outcome, sampled in zip(route.outcomes, route.action_tokens_at, strict=True)
            if sampled < route.action_tokens
        ]
        states, residuals = [state for state, _ in points], [residual for _, residual in points]
        self._tree.insert(route.task_id, states, residuals, log1p(route.action_tokens))


def _turn(route: Route, turn: int) -> tuple[object, ...]:
    return (min(turn, TURN_MAX),)


def _outcome(route: Route, turn: int) -> tuple[object, ...]:
    outcome = route.outcomes[turn]
    size = int(2 * log1p(outcome.payload_tokens))
    named = (outcome.tool, outcome.status)
    return (outcome.status, named, (*named, size))


def _context(route: Route, turn: int) -> tuple[object, ...]:
    size = log1p(route.context_tokens_at[turn])
    return (("coarse", int(size)), ("fine", int(4 * size)))


def _siblings(route: Route, turn: int) -> tuple[object, ...]:
    return (route.task_id, (route.task_id, turn))


SIGNALS: dict[str, Keys] = {
    "turn": _turn,
    "last_outcome": _outcome,
    "context": _context,
    "siblings": _siblings,
}


def baselines() -> dict[str, list[Estimator]]:
    """By name, each in all its settings: by itself, and on top of the turn, which costs nothing."""
    made: dict[str, list[Estimator]] = {}
    for name, keys in SIGNALS.items():
        made[name] = [
            Table(keys, half_life, doubt, base)
            for half_life in HALF_LIVES
            for doubt in DOUBTS
            for base in (None, Table(_turn, half_life, DOUBTS[0]))
        ]
    made["prefix_tree"] = [Tree()]
    return made
