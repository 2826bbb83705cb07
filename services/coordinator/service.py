"""The coordinator: knows who is there and brings each weight version to every rollout worker."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import structlog

from common.errors import Refusal, RequestRefused
from common.membership import MEMORY, memory_label
from common.messages.coordinator import (
    Fleet,
    GetFleet,
    GetSegmentsInUse,
    Heartbeat,
    HeartbeatAck,
    Leave,
    Left,
    Member,
    MemberStatus,
    PublishVersion,
    Register,
    Registered,
    SegmentsInUse,
    SetSplit,
)
from common.service import Runtime, publish_coordinator
from common.stream import StreamServer
from common.streaming import open_server
from services.coordinator.fanout import Describe, Fanout, describe_in_thread
from services.coordinator.members import Members
from services.coordinator.slot_orders import SlotOrders
from services.coordinator.store import VersionStore
from services.coordinator.versions import Versions

log = structlog.get_logger()

OpenStream = Callable[[Runtime], AbstractAsyncContextManager[StreamServer]]

TICK_S = 0.25
"""How often leases are checked; an eighth of the shortest sensible lease."""


class CoordinatorService:
    """Membership, roles and weight versions of one run."""

    def __init__(
        self,
        runtime: Runtime,
        describe: Describe = describe_in_thread,
        open_stream: OpenStream | None = None,
        memory: str = "",
        directory: Path = MEMORY,
    ) -> None:
        self._runtime = runtime
        self._mesh = runtime.mesh
        self._directory = directory
        self._open_stream = open_stream
        self._members = Members(runtime.config.coordinator.lease_s)
        self._versions = Versions(memory or memory_label())
        self._fanout = Fanout(
            runtime.mesh,
            runtime.config,
            self._members,
            self._versions,
            describe,
            self._evict,
        )
        self._slots = SlotOrders(
            runtime, self._members, lambda: self._versions.version, self._evict, self._fanout.wake
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until asked to stop."""
        if self._open_stream is None:
            await self._serve(stopping)
            return
        async with self._open_stream(self._runtime) as server:
            store = VersionStore(server, self._directory, self._runtime.run_id)
            store.sweep()
            self._fanout.store = store
            try:
                await self._serve(stopping)
            finally:
                store.close()

    async def _serve(self, stopping: asyncio.Event) -> None:
        mesh = self._mesh
        mesh.serve(Register, self._register)
        mesh.serve(Heartbeat, self._heartbeat)
        mesh.serve(Leave, self._leave)
        mesh.serve(PublishVersion, self._fanout.publish)
        mesh.serve(GetSegmentsInUse, self._segments_in_use)
        mesh.serve(GetFleet, self._fleet)
        mesh.serve(SetSplit, self._slots.set_split)
        publish_coordinator(self._runtime.run_dir, self._mesh.address, self._runtime.run_id)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(tasks), name="coordinator.watch")
            await stopping.wait()
            watch.cancel()
            self._slots.close()
            self._fanout.close()

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Expire leases and send due orders, at every tick and at every event."""
        loop = asyncio.get_running_loop()
        wake = self._fanout.wake
        while True:
            for member in self._members.expire(loop.time()):
                self._gone(member, "lease_lapsed")
            self._slots.look(tasks, loop.time())
            self._fanout.send_due(tasks, loop.time())
            wake.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await wake.wait()
            except TimeoutError:
                continue

    # ── membership ───────────────────────────────────────────────────────────────────────────

    def _register(self, sender: str, request: Register) -> Registered:
        if request.member.peer != sender:
            raise RequestRefused(Refusal.INVALID, "a member registers itself only")
        if self._slots.is_evicted(sender, awake=request.awake):
            raise RequestRefused(Refusal.STALE_FENCE, "it must yield its slot first")
        now = asyncio.get_running_loop().time()
        for old in self._members.register(
            request.member,
            request.pid,
            request.version,
            now,
            fence=request.fence,
            awake=request.awake,
        ):
            self._gone(old, "replaced")
        log.info(
            "worker.registered",
            peer=sender,
            role=request.member.role,
            name=request.member.name,
            policy_version=request.version,
        )
        self._fanout.wake.set()
        return Registered(
            lease_s=self._members.lease_s,
            number=self._members.number,
            members=self._members.live(),
            version=self._versions.version,
        )

    def _heartbeat(self, sender: str, beat: Heartbeat) -> HeartbeatAck:
        now = asyncio.get_running_loop().time()
        updates = self._members.heartbeat(sender, beat, now)
        if updates is None:
            raise RequestRefused(Refusal.NOT_FOUND, "not a member; register again")
        return HeartbeatAck(
            number=self._members.number, updates=updates, version=self._versions.version
        )

    def _leave(self, sender: str, _request: Leave) -> Left:
        member = self._members.leave(sender)
        if member is not None:
            self._gone(member, "left")
        return Left()

    def _gone(self, member: Member, reason: str) -> None:
        self._versions.gone(member.peer)
        if reason != "left":  # It is answered first, and closes the connection itself.
            self._mesh.disconnect(member.peer)
        report = log.info if reason == "left" else log.warning
        report("worker.lost", peer=member.peer, role=member.role, name=member.name, reason=reason)

    def _evict(self, peer: str, reason: str = "apply_timeout") -> None:
        member = self._members.leave(peer)
        if member is not None:
            self._gone(member, reason)

    # ── versions ─────────────────────────────────────────────────────────────────────────────

    def _segments_in_use(self, _sender: str, _request: GetSegmentsInUse) -> SegmentsInUse:
        return SegmentsInUse(segments=self._fanout.segments_in_use())

    # ── status ───────────────────────────────────────────────────────────────────────────────

    def _fleet(self, _sender: str, _request: GetFleet) -> Fleet:
        now = asyncio.get_running_loop().time()
        waiting = self._versions.fetching | self._versions.applying
        return Fleet(
            members=[
                MemberStatus(
                    member=entry.member,
                    pid=entry.pid,
                    version=entry.version,
                    loop_lag_s=entry.loop_lag_s,
                    busy_s=entry.busy_s,
                    uptime_s=entry.uptime_s,
                    silent_s=now - entry.heard_s,
                    applying_s=now - waiting[peer].since_s if peer in waiting else 0.0,
                    quarantined=peer in self._members.hidden,
                )
                for peer, entry in sorted(self._members.entries.items())
            ],
            version=self._versions.version,
            versions_published=self._versions.published,
            slots=self._slots.status(now),
        )


def streaming(runtime: Runtime) -> CoordinatorService:
    """The service as a process: other hosts stream versions from it."""
    return CoordinatorService(runtime, open_stream=open_server)
