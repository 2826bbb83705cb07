"""Threads for functions that may never return.

A thread cannot be stopped, only given up: its caller goes on, and the thread keeps its place until
the function returns. The threads are daemons, so that none of them can hold up the process's end.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class NoThreadFree(Exception):
    """Every thread is busy; the function was not started."""


class StillRunning(Exception):
    """The function has not returned within its limit, and its thread was given up."""


class Threads:
    """At most `size` threads, started as they are needed."""

    def __init__(self, size: int, name: str) -> None:
        self._free = asyncio.Semaphore(size)
        self._executor = _Daemons(name)
        self.stuck = 0
        """Threads that were given up and still run."""

    async def run(
        self,
        function: Callable[[], T],
        *,
        start_wait_s: float,
        limit_s: float,
        ended: Callable[[], None] | None = None,
    ) -> T:
        """Run a function in a thread, in this context.

        Args:
            function: what to run.
            start_wait_s: how long to wait for a free thread.
            limit_s: how long to wait for the function, once it runs.
            ended: called on the loop when the function returns, however late that is.

        Raises:
            NoThreadFree: no thread became free within `start_wait_s`.
            StillRunning: it did not return within `limit_s`.
        """
        try:
            async with asyncio.timeout(start_wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise NoThreadFree(f"all threads are busy ({self.stuck} stuck)") from error
        loop = asyncio.get_running_loop()
        outcome = loop.run_in_executor(self._executor, partial(copy_context().run, function))
        outcome.add_done_callback(lambda _: self._free.release())
        if ended:
            outcome.add_done_callback(lambda _: ended())
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await asyncio.shield(outcome)
        except TimeoutError as error:
            if not limit.expired():
                raise  # The function's own.
            raise StillRunning(f"the call did not end within {limit_s:g} s") from error
        finally:
            if not outcome.done():
                self._give_up(outcome)

    def _give_up(self, outcome: "asyncio.Future[Any]") -> None:
        self.stuck += 1

        def returned(late: "asyncio.Future[Any]") -> None:
            self.stuck -= 1
            late.exception()  # Nobody waits for it any more.

        outcome.add_done_callback(returned)


_Job = tuple["Future[Any]", Callable[[], Any]]


class _Daemons(Executor):
    """Daemon threads, one for each function that runs and reused. Whoever submits bounds them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[_Job]] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        jobs = self._idle.pop() if self._idle else self._new_thread()
        jobs.put((future, partial(fn, *args, **kwargs)))
        return future

    def _new_thread(self) -> "queue.SimpleQueue[_Job]":
        jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True).start()
        return jobs

    def _work(self, jobs: "queue.SimpleQueue[_Job]") -> None:
        while True:
            future, function = jobs.get()
            value, failure = None, None
            try:
                value = function()
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits.
                failure = _raisable(error)
            self._idle.append(jobs)
            if failure is None:
                future.set_result(value)
            else:
                future.set_exception(failure)
            del future, function, value, failure  # Not kept alive until the next job.


def _raisable(error: BaseException) -> Exception:
    """What a future can carry: SystemExit would end the loop, StopIteration is refused."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} raised: {error}")
    wrapped.__cause__ = error
    return wrapped
