"""A clock that jumps: hours of simulated time in milliseconds, in the same order every time.

`run_sim` runs a coroutine on an event loop whose `time()` moves only when every task waits, and
then straight to the next timer. What runs on it is the production code: `asyncio.sleep`,
`asyncio.timeout` and `loop.call_at` all read the loop's clock.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: adds the time that `select` would have waited to `elapsed_s`."""

    elapsed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and no timer is set")
            self.elapsed_s += max(timeout, 0.0)
        return ready


class _SimLoop(asyncio.SelectorEventLoop):
    """A loop on virtual time. Work for threads runs inline, since time must not pass meanwhile.

    Timers with *equal* deadlines run in an order that is the same for the same program, but not
    the order in which they were set (the heap is not stable). Whoever needs an order keeps it.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.elapsed_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  (carried to the awaiter, as a thread would)
            future.set_exception(error)
        return future


def run_sim(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh loop whose clock starts at 0 and never waits.

    Raises:
        RuntimeError: a deadlock: every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=_SimLoop) as runner:
        return runner.run(coroutine)
