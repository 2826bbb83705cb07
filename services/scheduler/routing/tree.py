"""The published prefix tree: residual lengths by prompt and the exact history of tool returns.

Each node holds a window of the tokens that trajectories with its history still sampled. A second,
global tree without prompts answers for prompts that were never seen. Kept as published, to be
compared with; Libra's own predictor is another one. Source: arXiv 2606.03077. No clock, no I/O.
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.scheduler.routing.outcomes import ToolOutcome
from services.scheduler.routing.route import Residual, Route

WINDOW = 64
"""Residuals that a node keeps, the newest ones."""
NODES_MAX = 200_000
"""Of all trees together; beyond it the prompts that were seen longest ago are forgotten."""
GLOBAL_CHILDREN_MAX = 256
"""Of one node of the global tree, which is never forgotten; new states beyond it stay out."""


def state_of(outcome: ToolOutcome) -> str:
    """A tool return as the tree tells them apart: tool, payload class and status."""
    return f"{outcome.tool or 'unknown'}:{outcome.payload.value}:{outcome.status.value}"


def residuals_of(route: Route) -> list[int]:
    """Tokens that a finished trajectory still sampled after each of its tool returns."""
    return [route.action_tokens - sampled for sampled in route.action_tokens_at]


class Node:
    """One history."""

    __slots__ = ("_sorted", "children", "visits", "window")

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.visits = 0
        self.children: dict[str, Node] = {}
        self._sorted: list[float] | None = None

    def add(self, residual: float) -> None:
        """One more trajectory had this history, and still sampled so many tokens."""
        self.window.append(residual)
        self.visits += 1
        self._sorted = None

    def residual(self) -> Residual:
        """Mean and quantiles (nearest rank) of the window, which must hold something."""
        if self._sorted is None:
            self._sorted = sorted(self.window)
        values = self._sorted
        count = len(values)
        p50 = values[(count + 1) // 2 - 1]
        p90 = values[min(count - 1, (9 * count + 9) // 10 - 1)]
        return Residual(sum(values) / count, p50, p90, float(count))


class Found(NamedTuple):
    """The deepest node that matches a history."""

    depth: int
    """Tool returns that matched."""
    node: Node
    everywhere: bool
    """It is of the global tree, for the prompt was never seen."""


class PrefixTree:
    """The trees of all prompts, and the global one."""

    def __init__(self, *, nodes_max: int = NODES_MAX) -> None:
        self._nodes_max = nodes_max
        self._nodes = 0
        self.roots: dict[str, Node] = {}
        """By prompt, the one seen longest ago first."""
        self.everywhere = Node()
        self.insertions = 0

    def insert(
        self, prompt: str, states: Sequence[str], residuals: Sequence[float], total: float
    ) -> None:
        """Learn one finished trajectory.

        Args:
            prompt: what identifies it.
            states: its tool returns, in order.
            residuals: tokens still sampled after each of them.
            total: tokens sampled in all.

        Raises:
            ValueError: `states` and `residuals` differ in length.
        """
        if len(states) != len(residuals):
            raise ValueError(f"{len(states)} states do not go with {len(residuals)} residuals")
        self.insertions += 1
        root = self.roots.pop(prompt, None)
        if root is None:
            root = Node()
            self._nodes += 1
        self.roots[prompt] = root
        self._learn(root, states, residuals, total)
        bounded = self._nodes
        self._learn(self.everywhere, states, residuals, total, children_max=GLOBAL_CHILDREN_MAX)
        self._nodes = bounded
        while self._nodes > self._nodes_max and len(self.roots) > 1:
            self._nodes -= _size(self.roots.pop(next(iter(self.roots))))

    def _learn(
        self,
        node: Node,
        states: Sequence[str],
        residuals: Sequence[float],
        total: float,
        children_max: int = 0,
    ) -> None:
        node.add(total)
        for state, residual in zip(states, residuals, strict=True):
            child = node.children.get(state)
            if child is None:
                if children_max and len(node.children) >= children_max:
                    return
                child = node.children[state] = Node()
                self._nodes += 1
            child.add(residual)
            node = child

    def find(self, prompt: str, states: Sequence[str]) -> Found | None:
        """The deepest matching node of this prompt's tree; None when it was never seen."""
        root = self.roots.get(prompt)
        return None if root is None else _descend(root, states, everywhere=False)

    def estimate(self, prompt: str, states: Sequence[str]) -> Found | None:
        """As `find`, but an unknown prompt is looked up in the global tree."""
        found = self.find(prompt, states)
        if found is None and self.everywhere.window:
            return _descend(self.everywhere, states, everywhere=True)
        return found

    def merge(self, other: "PrefixTree") -> None:
        """Learn what another tree knows, as if its trajectories had come after one's own."""
        self.insertions += other.insertions
        _merge(self.everywhere, other.everywhere)
        for prompt, root in other.roots.items():
            own = self.roots.pop(prompt, None) or Node()
            self.roots[prompt] = own
            _merge(own, root)
        self._nodes = sum(_size(root) for root in self.roots.values())

    def dump(self) -> bytes:
        """All that was learned."""
        roots = {prompt: _plain(root) for prompt, root in self.roots.items()}
        whole = [self.insertions, _plain(self.everywhere), roots]
        return json.dumps(whole, separators=(",", ":")).encode()

    def load(self, dumped: bytes) -> None:
        """Take over what `dump` gave."""
        self.insertions, everywhere, roots = json.loads(dumped)
        self.everywhere = _node(everywhere)
        self.roots = {prompt: _node(root) for prompt, root in roots.items()}
        self._nodes = sum(_size(root) for root in self.roots.values())


def _descend(node: Node, states: Sequence[str], *, everywhere: bool) -> Found:
    depth = 0
    for state in states:
        child = node.children.get(state)
        if child is None:
            break
        node = child
        depth += 1
    return Found(depth, node, everywhere)


def _size(node: Node) -> int:
    return 1 + sum(_size(child) for child in node.children.values())


def _merge(into: Node, other: Node) -> None:
    for residual in other.window:
        into.add(residual)
    into.visits += other.visits - len(other.window)
    for state, child in other.children.items():
        _merge(into.children.setdefault(state, Node()), child)


def _plain(node: Node) -> list[Any]:
    children = {state: _plain(child) for state, child in node.children.items()}
    return [node.visits, list(node.window), children]


def _node(plain: list[Any]) -> Node:
    node = Node()
    node.visits, window, children = plain
    node.window.extend(window)
    node.children = {state: _node(child) for state, child in children.items()}
    return node
