"""A wake-up for everybody who waits for a change, without losing one that comes early."""

import asyncio


class Pulse:
    """Take a `ticket`, look at the state, then wait: a change in between ends the wait at once."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Stands for the next change."""
        return self._next

    def beat(self) -> None:
        """Something changed."""
        self._next.set()
        self._next = asyncio.Event()

    @staticmethod
    async def wait(ticket: asyncio.Event, *, until: float) -> None:
        """Wait for the change or for a loop time, whichever is first."""
        try:
            async with asyncio.timeout_at(until):
                await ticket.wait()
        except TimeoutError:
            return
