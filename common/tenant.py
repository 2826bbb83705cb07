"""One tenant of a hybrid slot: it follows the coordinator's orders by their fence.

Both tenants of a slot are started; at most one holds the devices. What is decided here is what one
of them may assume: only the coordinator that it is registered at gives orders, a lower fence than
one seen is stale, and whoever has had no coordinator for two leases yields by itself. After three,
the coordinator takes the devices for free.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from common.errors import Refusal, RequestRefused, RunFailed
from common.fence import (
    DRAIN_GRACE_S,
    FREE_LEASES,
    LAPSE_LEASES,
    NO_FENCE,
    RELEASE_S,
    Order,
    Verdict,
    judge,
)
from common.membership import Membership
from common.mesh import Mesh
from common.messages.slots import SlotTaken, SlotYielded, TakeSlot, YieldSlot

log = structlog.get_logger()

LAPSE_DRAIN_LEASES = 0.25
"""What is at work then gets so long to be handed back: there is hardly anybody to take it."""
CHECKS_PER_LEASE = 6


class Body(Protocol):
    """What a tenant does with the devices. One call at a time."""

    async def wake(self) -> None:
        """Take the devices, and be ready for a version. Idempotent."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Take no new work; finish what is at work or hand it back. Idempotent.

        Args:
            deadline_s: from now; what is not finished by then is given up.
        """
        ...

    async def release(self) -> None:
        """Free the devices: nothing is at work. Idempotent."""
        ...


class Tenant:
    """Answers `TakeSlot` and `YieldSlot`, and tells the coordinator by heartbeats where it stands.

    `awake` is never too small: true from the moment a `TakeSlot` is accepted until the devices are
    free again. Within one fence it changes once, from true to false.
    """

    def __init__(self, mesh: Mesh, membership: Membership, body: Body) -> None:
        self._membership, self._body = membership, body
        self._seen = Order(NO_FENCE, take=False)
        self._lapsed = False
        self._holds = False
        self._turn = asyncio.Lock()
        self._answer: asyncio.Task[SlotTaken | SlotYielded | None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._tell()
        mesh.serve(TakeSlot, self._take)
        mesh.serve(YieldSlot, self._yield)

    @property
    def fence(self) -> int:
        """Of the newest order; what is sent in the name of the slot carries it."""
        return self._seen.fence

    @property
    def awake(self) -> bool:
        """Whether it may hold the devices."""
        return self._holds or (self._seen.take and not self._lapsed)

    async def run(self) -> None:
        """Follow orders until cancelled.

        Raises:
            RunFailed: the devices could not be freed in time; the process must end to free them.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await self._watch()
            finally:
                self._tasks = None  # An order that comes now is refused.

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    async def _take(self, sender: str, request: TakeSlot) -> SlotTaken:
        if self._silent_s() > self._membership.lease_s:
            raise RequestRefused(Refusal.NOT_READY, "no recent word of the coordinator")
        answer = await self._follow(sender, Order(request.fence, take=True), self._wake)
        assert isinstance(answer, SlotTaken)
        return answer

    async def _yield(self, sender: str, request: YieldSlot) -> SlotYielded:
        order = Order(request.fence, take=False)
        answer = await self._follow(sender, order, lambda: self._sleep(request.deadline_s))
        assert isinstance(answer, SlotYielded)
        return answer

    async def _follow(
        self,
        sender: str,
        order: Order,
        act: Callable[[], Coroutine[Any, Any, SlotTaken | SlotYielded]],
    ) -> SlotTaken | SlotYielded:
        """Begin an order, or join it; it goes on when the caller gives up."""
        if self._tasks is None or sender != self._membership.coordinator:
            raise RequestRefused(Refusal.NOT_READY, "not registered at the sender")
        verdict = judge(self._seen, order, lapsed=self._lapsed)
        if verdict is Verdict.NEW:
            self._seen, self._lapsed = order, False
            self._tell()
            self._answer = self._tasks.create_task(
                self._in_turn(order, act), name=f"slot order {order.fence}"
            )
        answer = None
        if verdict is not Verdict.STALE and self._answer is not None:
            answer = await asyncio.shield(self._answer)
        if answer is None:
            raise RequestRefused(Refusal.STALE_FENCE, f"fence {order.fence}, at {self.fence}")
        return answer

    async def _in_turn(
        self, order: Order, act: Callable[[], Coroutine[Any, Any, SlotTaken | SlotYielded]]
    ) -> SlotTaken | SlotYielded | None:
        """Carry an order out after the one before it; None when a newer one has come by then."""
        async with self._turn:
            if order != self._seen or self._lapsed:
                return None
            answer = await act()
        self._tell()
        return answer

    async def _wake(self) -> SlotTaken:
        loop = asyncio.get_running_loop()
        fence, started_s = self.fence, loop.time()
        self._holds = True
        await self._body.wake()
        log.info("slot.taken", fence=fence, duration_s=loop.time() - started_s)
        return SlotTaken(fence=fence)

    async def _sleep(self, deadline_s: float) -> SlotYielded:
        loop = asyncio.get_running_loop()
        fence, started_s = self.fence, loop.time()
        drained_s = started_s
        if self._holds:
            await _in_time(self._body.drain(deadline_s), deadline_s + DRAIN_GRACE_S, "drained")
            drained_s = loop.time()
            await _in_time(self._body.release(), RELEASE_S, "free")
            self._holds = False
        self._tell()
        drain_s, release_s = drained_s - started_s, loop.time() - drained_s
        log.info("slot.yielded", fence=fence, drain_s=drain_s, release_s=release_s)
        return SlotYielded(fence=fence, drain_s=drain_s, release_s=release_s)

    # ── without a coordinator ────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        while True:
            lease_s = self._membership.lease_s
            await asyncio.sleep(lease_s / CHECKS_PER_LEASE)
            if self.awake and self._silent_s() > LAPSE_LEASES * lease_s:
                await self._lapse(lease_s)

    async def _lapse(self, lease_s: float) -> None:
        """Yield unasked; a process that cannot within a lease ends, which frees the devices too."""
        self._lapsed = True
        log.warning("slot.lapsed", fence=self.fence)
        try:
            async with asyncio.timeout((FREE_LEASES - LAPSE_LEASES) * lease_s), self._turn:
                await self._sleep(LAPSE_DRAIN_LEASES * lease_s)
        except TimeoutError as error:
            raise RunFailed(
                "the slot's devices were not free within three leases without a coordinator"
            ) from error

    def _silent_s(self) -> float:
        """Since the last word to the coordinator that it has answered."""
        return asyncio.get_running_loop().time() - self._membership.contact_s

    def _tell(self) -> None:
        self._membership.fence, self._membership.awake = self.fence, self.awake


async def _in_time(action: Coroutine[Any, Any, None], limit_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await action
    except TimeoutError as error:
        raise RunFailed(f"the slot was not {what} within {limit_s:g} s") from error
