"""This process as a member of the run: registered, heard, and aware of the others.

Level-triggered: whatever is lost (the coordinator, the lease, an update), the next heartbeat or
registration brings the whole truth again.
"""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from common.errors import (
    PeerUnreachable,
    Refusal,
    RequestRefused,
    RequestTimeout,
    TransportError,
)
from common.messages.base import Message, Request
from common.messages.coordinator import Heartbeat, Leave, Member, MemberUpdate, Register
from common.service import Runtime
from common.weights import NO_VERSION

log = structlog.get_logger()

R = TypeVar("R", bound=Message)
HEARTBEATS_PER_LEASE = 6
"""Also bounds how long one may stay unanswered, so that two may be lost in a row."""
MISSED_MAX = 3
"""Unanswered heartbeats in a row after which the connection is made anew."""
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.25
LEAVE_TIMEOUT_S = 1.0
MEMORY = Path("/dev/shm")  # noqa: S108  (the memory file system is the point)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def memory_label(directory: Path = MEMORY) -> str:
    """Name the memory file system that this process sees: equal names mean equal files.

    Containers of one host may have one of their own each.
    """
    try:
        boot, seen = BOOT_ID.read_text().strip(), directory.stat()
    except OSError:
        return ""
    return f"{boot}/{seen.st_dev}/{seen.st_ino}"


class Membership:
    """Keeps this process a member at the coordinator and knows the others."""

    def __init__(self, runtime: Runtime, labels: dict[str, str] | None = None) -> None:
        self._mesh = runtime.mesh
        self._pid = runtime.pid
        self._began_s: float | None = None
        self._coordinator_address = runtime.coordinator_address
        self._lease_s = runtime.config.coordinator.lease_s
        self._me = Member(
            peer=runtime.mesh.identity,
            role=runtime.role,
            name=runtime.name,
            address=runtime.mesh.address,
            labels=labels or {},
        )
        self._callbacks: list[Callable[[MemberUpdate], None]] = []
        self._on_excluded: list[Callable[[bool], None]] = []
        self._changed = asyncio.Condition()
        self._coordinator: str | None = None
        self._last_coordinator = ""
        self._missed = 0
        self._number = 0
        self._doubted: dict[str, float] = {}
        """Members that a restarted coordinator has not named yet, and until when they count."""
        self.members: dict[str, Member] = {}
        self.version = NO_VERSION
        self.applied_version = NO_VERSION
        self.excluded = False
        """The coordinator tells the others that this process is gone: it decodes with other weights
        than it names. It stays registered, and may prove itself with the next version."""
        self.fence = -1
        """Of a slot's tenant: as in `Register`. `common.tenant` sets both."""
        self.awake = True
        self.contact_s = -math.inf
        """When the last message was sent that the coordinator has answered."""
        self.busy_s = 0.0
        self.loop_lag_s = 0.0

    # ── what the owner asks ──────────────────────────────────────────────────────────────────

    @property
    def coordinator(self) -> str | None:
        """Identity of the coordinator, while this process is registered there."""
        return self._coordinator

    @property
    def lease_s(self) -> float:
        """How long silence is forgiven."""
        return self._lease_s

    def on_change(self, callback: Callable[[MemberUpdate], None]) -> None:
        """Be told of every arrival and departure."""
        self._callbacks.append(callback)

    def on_excluded(self, callback: Callable[[bool], None]) -> None:
        """Be told when the others are told that this process is gone, or is back."""
        self._on_excluded.append(callback)

    def find(self, role: str, name: str | None = None) -> Member | None:
        """A live member by role, and by name where there may be several; first by name."""
        fitting = [
            member
            for member in self.members.values()
            if member.role == role and (name is None or member.name == name)
        ]
        return min(fitting, key=lambda member: member.name, default=None)

    async def joined(self, *, timeout_s: float) -> None:
        """Wait until this process is registered.

        Raises:
            PeerUnreachable: the coordinator did not answer in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._coordinator is not None)
        except TimeoutError as error:
            reason = f"no registration within {timeout_s:g} s"
            raise PeerUnreachable(self._coordinator_address(), reason) from error

    async def wait_for(self, role: str, *, timeout_s: float, name: str | None = None) -> Member:
        """Wait until a member is there.

        Raises:
            PeerUnreachable: it did not join in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.find(role, name) is not None)
        except TimeoutError as error:
            reason = f"did not join within {timeout_s:g} s"
            raise PeerUnreachable(f"{role}/{name or '*'}", reason) from error
        member = self.find(role, name)
        assert member is not None
        return member

    async def request(
        self, member: Member, request: Request[R], *, timeout_s: float, key: str = ""
    ) -> R:
        """Ask a member, connecting first where there is no connection yet."""
        peer = await self._mesh.connect(member.address, timeout_s=min(timeout_s, CONNECT_TIMEOUT_S))
        if peer != member.peer:
            raise PeerUnreachable(member.peer, f"{peer!r} answers at its address")
        return await self._mesh.request(peer, request, timeout_s=timeout_s, key=key)

    async def ask_coordinator(self, request: Request[R], *, timeout_s: float) -> R:
        """Ask the coordinator.

        Raises:
            PeerUnreachable: not registered at the moment.
        """
        if self._coordinator is None:
            raise PeerUnreachable(self._coordinator_address(), "not registered at the moment")
        return await self._mesh.request(self._coordinator, request, timeout_s=timeout_s)

    # ── the loop ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Register, renew, register again; until cancelled, then leave."""
        try:
            while True:
                try:
                    if self._coordinator is None:
                        await self._register()
                    await self._beat()
                except (TransportError, RequestRefused) as error:
                    await self._lose_coordinator(error)
                    await asyncio.sleep(RETRY_S)
        finally:
            await self._leave()

    async def _register(self) -> None:
        coordinator = await self._mesh.connect(
            self._coordinator_address(), timeout_s=CONNECT_TIMEOUT_S
        )
        sent_s = asyncio.get_running_loop().time()
        reply = await self._mesh.request(
            coordinator,
            Register(
                member=self._me,
                pid=self._pid,
                version=self.applied_version,
                fence=self.fence,
                awake=self.awake,
            ),
            timeout_s=CONNECT_TIMEOUT_S,
        )
        self.contact_s = sent_s
        self._lease_s = reply.lease_s
        self._number = reply.number
        self.version = reply.version
        named = {member.peer: member for member in reply.members}
        self._exclude(named.pop(self._me.peer, None) is None)
        for member in named.values():
            self._apply(MemberUpdate(number=reply.number, member=member, gone=False))
        patience_s = 0.0 if coordinator == self._last_coordinator else 2 * reply.lease_s
        until = asyncio.get_running_loop().time() + patience_s
        self._doubted = {peer: until for peer in self.members if peer not in named}
        self._last_coordinator = coordinator
        self._missed = 0
        async with self._changed:
            self._coordinator = coordinator
            self._changed.notify_all()
        log.info("worker.registered", coordinator=coordinator, members=len(named))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        if self._began_s is None:
            self._began_s = loop.time()
        interval_s = self._lease_s / HEARTBEATS_PER_LEASE
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        self.loop_lag_s = loop.time() - due
        beat = Heartbeat(
            number=self._number,
            loop_lag_s=self.loop_lag_s,
            busy_s=self.busy_s,
            uptime_s=loop.time() - self._began_s,
            version=self.applied_version,
            fence=self.fence,
            awake=self.awake,
        )
        sent_s = loop.time()
        try:
            reply = await self.ask_coordinator(beat, timeout_s=interval_s)
        except RequestTimeout:
            self._missed += 1
            if self._missed >= MISSED_MAX:
                raise
            return
        self._missed = 0
        self.contact_s = sent_s
        self._number = reply.number
        self.version = reply.version
        for update in reply.updates:
            if update.member.peer != self._me.peer:
                self._apply(update)
            else:
                self._exclude(update.gone)
        self._drop_doubted(loop.time())
        if reply.updates:
            async with self._changed:
                self._changed.notify_all()

    def _exclude(self, excluded: bool) -> None:  # noqa: FBT001
        if excluded != self.excluded:
            self.excluded = excluded
            for callback in self._on_excluded:
                callback(excluded)

    def _apply(self, update: MemberUpdate) -> None:
        peer = update.member.peer
        self._doubted.pop(peer, None)
        if update.gone:
            if self.members.pop(peer, None) is None:
                return
            self._mesh.disconnect(peer)
        elif self.members.get(peer) == update.member:
            return
        else:
            self.members[peer] = update.member
        for callback in self._callbacks:
            callback(update)

    def _drop_doubted(self, now: float) -> None:
        for peer in [peer for peer, until in self._doubted.items() if until < now]:
            member = self.members[peer]
            self._apply(MemberUpdate(number=self._number, member=member, gone=True))

    async def _lose_coordinator(self, error: Exception) -> None:
        if self._coordinator is not None:
            evicted = isinstance(error, RequestRefused) and error.refusal is Refusal.NOT_FOUND
            log.warning("coordinator.lost", reason="evicted" if evicted else type(error).__name__)
            self._mesh.disconnect(self._coordinator)
        async with self._changed:
            self._coordinator = None

    async def _leave(self) -> None:
        if self._coordinator is None:
            return
        try:
            await self.ask_coordinator(Leave(), timeout_s=LEAVE_TIMEOUT_S)
        except (TransportError, RequestRefused):
            log.debug("coordinator.lost", reason="leaving")
