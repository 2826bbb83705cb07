"""A rollout worker as a tenant of a hybrid slot: its engine sleeps while the replica trains.

It stays a member throughout. Its engine is started when it is woken for the first time: before,
the devices may be the other tenant's.
"""

import asyncio
from collections.abc import Awaitable, Callable

from common.errors import RunFailed
from services.rollout.engine import Engine
from services.rollout.receiving import Receiving


class RolloutBody:
    """What `common.tenant` asks of the worker.

    Args:
        engine: not started yet.
        versions: takes none while the engine sleeps.
        hand_back: stops all trajectories at their next turn, and after so many seconds anyway.
        open_again: takes trajectories again.
        start_timeout_s: for the engine to be ready.
    """

    def __init__(
        self,
        engine: Engine,
        versions: Receiving,
        hand_back: Callable[[float], Awaitable[None]],
        open_again: Callable[[], None],
        *,
        start_timeout_s: float,
    ) -> None:
        self._engine, self._versions = engine, versions
        self._hand_back, self._open_again = hand_back, open_again
        self._start_timeout_s = start_timeout_s
        self._started = False

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
