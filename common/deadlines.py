"""Many deadlines on one timer: a coarse wheel.

`loop.call_later` costs a timer object and a heap operation for each call, although nearly all
calls are answered long before their deadline. The wheel puts the deadlines of one tick into one
slot, so that adding and removing are dictionary operations.
"""

import asyncio
import heapq
import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

TICK_S = 0.01
"""Deadlines are kept to within one tick, never early. Timeouts are 50 ms and more."""


class DeadlineWheel(Generic[T]):
    """Calls `expired` with each item whose deadline has passed and that was not removed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[T], None]) -> None:
        self._loop, self._expired = loop, expired
        self._slots: dict[int, dict[T, None]] = {}
        self._ticks: list[int] = []
        """Heap of the keys of `_slots`."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_tick = 0

    def add(self, item: T, timeout_s: float) -> dict[T, None]:
        """Watch an item. `slot.pop(item, None)` on the returned slot stops watching it."""
        tick = math.ceil((self._loop.time() + timeout_s) / TICK_S)
        slot = self._slots.get(tick)
        if slot is None:
            slot = self._slots[tick] = {}
            heapq.heappush(self._ticks, tick)
            if self._timer is None or tick < self._timer_tick:
                self._arm()
        slot[item] = None
        return slot

    def close(self) -> None:
        """Forget every deadline."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._slots.clear()
        self._ticks.clear()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_tick = self._ticks[0]
        self._timer = self._loop.call_at(self._timer_tick * TICK_S, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now_tick = math.floor(self._loop.time() / TICK_S + 1e-6)
        while self._ticks and self._ticks[0] <= now_tick:
            slot = self._slots.pop(heapq.heappop(self._ticks))
            while slot:
                item = next(iter(slot))
                del slot[item]
                self._expired(item)
        if self._ticks and self._timer is None:
            self._arm()
