"""The coordinator: knows who is there and brings each weight version to every rollout worker."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from common.errors import (
    PeerUnreachable,
    Refusal,
    RequestRefused,
    ShardCorrupt,
    TransportError,
)
from common.messages.coordinator import (
    Fleet,
    GetFleet,
    GetSegmentsInUse,
    Heartbeat,
    HeartbeatAck,
    Leave,
    Left,
    Manifest,
    Member,
    MemberStatus,
    PublishVersion,
    Register,
    Registered,
    SegmentsInUse,
    VersionAccepted,
)
from common.messages.rollout import ApplyVersion
from common.service import Runtime, publish_coordinator
from services.coordinator.manifest import SegmentUnreadable, build_manifest
from services.coordinator.members import Members
from services.coordinator.versions import Versions

log = structlog.get_logger()

TICK_S = 0.25
"""How often leases are checked; an eighth of the shortest sensible lease."""
CONNECT_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.5


async def describe_in_thread(version: int, segment: str) -> Manifest:
    """Build a manifest off the event loop: hashing is CPU work."""
    return await asyncio.to_thread(build_manifest, version, segment)


class CoordinatorService:
    """Membership, roles and weight versions of one run."""

    def __init__(
        self,
        runtime: Runtime,
        describe: Callable[[int, str], Awaitable[Manifest]] = describe_in_thread,
    ) -> None:
        self._runtime = runtime
        self._describe = describe
        self._mesh = runtime.mesh
        self._config = runtime.config.coordinator
        self._members = Members(self._config.lease_s)
        self._versions = Versions()
        self._wake = asyncio.Event()
        self._publishing = asyncio.Lock()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until asked to stop."""
        mesh = self._mesh
        mesh.serve(Register, self._register)
        mesh.serve(Heartbeat, self._heartbeat)
        mesh.serve(Leave, self._leave)
        mesh.serve(PublishVersion, self._publish)
        mesh.serve(GetSegmentsInUse, self._segments_in_use)
        mesh.serve(GetFleet, self._fleet)
        publish_coordinator(self._runtime.run_dir, self._mesh.address, self._runtime.run_id)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(tasks), name="coordinator.watch")
            await stopping.wait()
            watch.cancel()

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Expire leases and send due orders, at every tick and at every event."""
        loop = asyncio.get_running_loop()
        while True:
            for member in self._members.expire(loop.time()):
                self._gone(member, "lease_lapsed")
            workers = {
                entry.member.peer: entry.version
                for entry in self._members.entries.values()
                if entry.member.role == "rollout"
            }
            for peer, manifest in self._versions.orders(workers, loop.time()):
                tasks.create_task(self._apply(peer, manifest), name=f"apply {peer}")
            self._wake.clear()
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    # ── membership ───────────────────────────────────────────────────────────────────────────

    def _register(self, sender: str, request: Register) -> Registered:
        if request.member.peer != sender:
            raise RequestRefused(Refusal.INVALID, "a member registers itself only")
        now = asyncio.get_running_loop().time()
        for old in self._members.register(request.member, request.pid, request.version, now):
            self._gone(old, "replaced")
        log.info(
            "worker.registered",
            peer=sender,
            role=request.member.role,
            name=request.member.name,
            policy_version=request.version,
        )
        self._wake.set()
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

    # ── versions ─────────────────────────────────────────────────────────────────────────────

    async def _publish(self, sender: str, request: PublishVersion) -> VersionAccepted:
        async with self._publishing:
            newest = self._versions.newest
            if newest is not None and request.version == newest.version:
                return VersionAccepted(version=newest.version, digest=newest.digest)
            if request.version < self._versions.version:
                raise RequestRefused(
                    Refusal.STALE_FENCE,
                    f"version {request.version} < announced {self._versions.version}",
                )
            try:
                manifest = await self._describe(request.version, request.segment)
            except SegmentUnreadable as error:
                raise RequestRefused(Refusal.INVALID, str(error)) from error
            self._versions.announce(manifest)
        log.info(
            "version.published",
            policy_version=manifest.version,
            bytes=manifest.length,
            digest=manifest.digest[:16],
            peer=sender,
        )
        self._wake.set()
        return VersionAccepted(version=manifest.version, digest=manifest.digest)

    async def _apply(self, peer: str, manifest: Manifest) -> None:
        """Have one worker apply one version; a worker that cannot is quarantined or evicted."""
        entry = self._members.entries.get(peer)
        if entry is None:
            self._versions.gone(peer)
            return
        try:
            answered = await self._mesh.connect(entry.member.address, timeout_s=CONNECT_TIMEOUT_S)
            if answered != peer:
                raise PeerUnreachable(peer, f"{answered!r} answers at its address")
            reply = await self._mesh.request(
                answered, ApplyVersion(manifest=manifest), timeout_s=self._config.apply_timeout_s
            )
        except TimeoutError:
            self._evict(peer, manifest)
            return
        except (TransportError, RequestRefused) as error:
            await self._note_failure(peer, manifest, error)
            return
        if reply.version == manifest.version and reply.digest != manifest.digest:
            await self._note_failure(peer, manifest, ShardCorrupt(reply.version, "its digest"))
            return
        self._versions.acknowledged(peer)
        self._members.applied(peer, reply.version)
        log.info(
            "version.applied", peer=peer, policy_version=reply.version, duration_s=reply.apply_s
        )
        self._wake.set()

    def _evict(self, peer: str, manifest: Manifest) -> None:
        """It accepted the order and never answered: it is not part of the run any more."""
        member = self._members.leave(peer)
        log.warning("version.timed_out", peer=peer, policy_version=manifest.version)
        if member is not None:
            self._gone(member, "apply_timeout")

    async def _note_failure(self, peer: str, manifest: Manifest, error: Exception) -> None:
        """Try again after a while; a worker that has failed too often is not part of the run."""
        refusal = error.refusal if isinstance(error, RequestRefused) else None
        if isinstance(error, PeerUnreachable) or refusal in (Refusal.NOT_READY, Refusal.DRAINING):
            await asyncio.sleep(RETRY_DELAY_S)  # It starts or leaves; both have their own end.
            self._versions.applying.pop(peer, None)
            return
        log.warning(
            "version.refused", peer=peer, policy_version=manifest.version, detail=str(error)
        )
        await asyncio.sleep(RETRY_DELAY_S)
        if self._versions.failed(peer):
            log.warning("worker.quarantined", peer=peer, policy_version=manifest.version)

    def _segments_in_use(self, _sender: str, _request: GetSegmentsInUse) -> SegmentsInUse:
        return SegmentsInUse(segments=self._versions.segments_in_use())

    def _fleet(self, _sender: str, _request: GetFleet) -> Fleet:
        now = asyncio.get_running_loop().time()
        applying = self._versions.applying
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
                    applying_s=now - applying[peer].since_s if peer in applying else 0.0,
                )
                for peer, entry in sorted(self._members.entries.items())
            ],
            version=self._versions.version,
            versions_published=self._versions.published,
        )
