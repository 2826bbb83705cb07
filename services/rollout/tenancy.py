"""A rollout worker as a tenant of a hybrid slot: its engine sleeps while the replica trains.

It stays a member throughout. On GPUs its engine is started when it is woken for the first time:
before, their memory may be the other tenant's. Without, there is nothing to leave to the other but
time, and the engine is started and put to sleep before the worker registers.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from common.errors import RunFailed
from services.rollout.engine import Engine
from services.rollout.receiving import Receiving

GPU_DRIVER = Path("/dev/nvidiactl")


def starts_cold() -> bool:
    """Whether a tenant's engine waits for the slot's devices before it starts."""
    return GPU_DRIVER.exists()


class RolloutBody:
    """What `common.tenant` asks of the worker.

    Args:
        engine: asleep, or not started yet.
        versions: takes none while the engine sleeps.
        hand_back: stops all trajectories at their next turn, and after so many seconds anyway.
        open_again: takes trajectories again.
        started: whether the engine is.
        start_timeout_s: for the engine to be ready.
    """

    def __init__(
        self,
        engine: Engine,
        versions: Receiving,
        hand_back: Callable[[float], Awaitable[None]],
        open_again: Callable[[], None],
        *,
        started: bool,
        start_timeout_s: float,
    ) -> None:
        self._engine, self._versions = engine, versions
        self._hand_back, self._open_again = hand_back, open_again
        self._start_timeout_s = start_timeout_s
        self._started = started

    async def wake(self) -> None:
        """Start the engine, or wake it."""
        if not self._started:
            await self._start()
        await self._engine.wake()
        self._open_again()

    async def drain(self, deadline_s: float) -> None:
        """Hand all trajectories back."""
        await self._hand_back(deadline_s)

    async def release(self) -> None:
        """Put the engine to sleep, after the swap that may be under way."""
        await self._versions.sleep()

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._engine.start()
        except TimeoutError as error:
            raise RunFailed(
                f"the engine was not ready within {self._start_timeout_s:g} s; "
                "see its log, or raise rollout.start_timeout_s"
            ) from error
        self._started = True
