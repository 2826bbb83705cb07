"""Virtual time: a heap of things to do, each at its moment, in an order that never varies."""

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """Runs actions in order of time; those of one moment in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Actions run so far."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._set = 0
        self._stopped = False

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Run the action at that moment, or now if it has passed."""
        self._set += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._set, action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Run the action so much later."""
        self._set += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._set, action, arguments))

    def stop(self) -> None:
        """Run nothing more after the action that is running."""
        self._stopped = True

    def run(self) -> None:
        """Run until stopped, or until nothing is left to do."""
        heap, pop = self._heap, heapq.heappop
        while heap and not self._stopped:
            self.now, _, action, arguments = pop(heap)
            self.events += 1
            action(*arguments)
