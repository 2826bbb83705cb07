"""Brings each version to every host and every worker. Decides nothing: `Versions` does."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from common.config import Config
from common.errors import (
    PeerUnreachable,
    Refusal,
    RequestRefused,
    RequestTimeout,
    TransportError,
    WeightError,
)
from common.mesh import Mesh
from common.messages.base import Message, Request
from common.messages.coordinator import Manifest, PublishVersion, VersionAccepted
from common.messages.rollout import ApplyVersion, FetchVersion, VersionApplied
from services.coordinator.judge import mismatch
from services.coordinator.manifest import SegmentUnreadable, build_manifest
from services.coordinator.members import Entry, Members
from services.coordinator.store import VersionStore
from services.coordinator.versions import Fetch, Receiver, Versions

log = structlog.get_logger()

R = TypeVar("R", bound=Message)
Describe = Callable[[int, str], Awaitable[Manifest]]

CONNECT_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.5
PATIENCE_SHARE = 1 / 6
"""Of `apply_timeout_s`: a worker that takes longer to swap stands still anyway, and the others
need not wait until it is given up."""
ASKS = 6
"""How often a worker is asked within `apply_timeout_s`."""
RECEIVERS = ("rollout", "replica")
NOT_NOW = (Refusal.NOT_READY, Refusal.DRAINING)
"""It starts or leaves; both have their own end."""


async def describe_in_thread(version: int, segment: str) -> Manifest:
    """Build a manifest off the event loop: hashing is CPU work."""
    return await asyncio.to_thread(build_manifest, version, segment)


class Fanout:
    """Publishes, has hosts fetch and workers apply, and takes out who decodes with other weights.

    Args:
        mesh: to ask the members.
        config: of the run.
        members: who is there.
        versions: what is decided.
        describe: makes the manifest of a segment.
        evict: ends the membership of a peer that accepted an order and never answered.
    """

    def __init__(
        self,
        mesh: Mesh,
        config: Config,
        members: Members,
        versions: Versions,
        describe: Describe,
        evict: Callable[[str], None],
    ) -> None:
        self._mesh, self._members, self._versions = mesh, members, versions
        self._config = config.coordinator
        self._describe, self._evict = describe, evict
        self._without_model = {b.name for b in config.buckets if b.engine == "fake"}
        self._publishing = asyncio.Lock()
        self._fences: dict[str, int] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self.store: VersionStore | None = None
        """Where other hosts stream from; None where all see one memory file system."""
        self.wake = asyncio.Event()
        """Something may be due."""

    # ── publishing ───────────────────────────────────────────────────────────────────────────

    async def publish(self, sender: str, request: PublishVersion) -> VersionAccepted:
        """Announce a version once all of it is read; before, nobody hears of it."""
        async with self._publishing:
            newest = self._versions.newest
            if newest is not None and request.version == newest.version:
                return VersionAccepted(version=newest.version, digest=newest.digest)
            if request.version < self._versions.version:
                raise RequestRefused(
                    Refusal.STALE_FENCE,
                    f"version {request.version} < announced {self._versions.version}",
                )
            manifest = await self._complete(request)
            self._versions.announce(manifest)
        log.info(
            "version.published",
            policy_version=manifest.version,
            bytes=manifest.length,
            digest=manifest.digest[:16],
            peer=sender,
        )
        self.wake.set()
        return VersionAccepted(version=manifest.version, digest=manifest.digest)

    async def _complete(self, request: PublishVersion) -> Manifest:
        try:
            described = await self._describe(request.version, request.segment)
            manifest = described.model_copy(update={"canary": request.canary})
            if self.store is not None:
                self.store.offer(manifest, self._versions.newest)
        except (SegmentUnreadable, WeightError) as error:
            raise RequestRefused(Refusal.INVALID, str(error)) from error
        return manifest

    def segments_in_use(self) -> list[str]:
        """What the trainer may not overwrite; the rest is not streamed from now on."""
        segments = self._versions.release()
        if self.store is not None:
            self.store.keep(self._versions.readers(), self._versions.previous)
        return segments

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    def send_due(self, tasks: asyncio.TaskGroup, now: float) -> None:
        """Start what is due now; call it at every tick and at every event."""
        receivers = self._receivers()
        self._versions.forget_hosts(receivers)
        address = self.store.address if self.store is not None else ""
        for fetch in self._versions.fetches(receivers.values(), address, now):
            name = f"fetch {fetch.link.peer}"
            self._keep(tasks.create_task(self._fetch(fetch), name=name))
        due = self._versions.orders(
            receivers.values(),
            now,
            share_min=self._config.decode_share_min,
            patience_s=self._config.apply_timeout_s * PATIENCE_SHARE,
        )
        for peer, manifest in due:
            self._keep(tasks.create_task(self._apply(peer, manifest), name=f"apply {peer}"))

    def close(self) -> None:
        """Wait for nobody's answer any more."""
        for task in self._waiting:
            task.cancel()

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _receivers(self) -> dict[str, Receiver]:
        """Who can take a version. A slot's tenant that has slept since has lost what it had."""
        entries = {
            peer: entry
            for peer, entry in self._members.entries.items()
            if entry.member.role in RECEIVERS
        }
        for peer, entry in entries.items():
            if not entry.awake or self._fences.get(peer) != entry.fence:
                self._versions.slept(peer)
        self._fences = {peer: entry.fence for peer, entry in entries.items()}
        return {peer: _receiver(entry) for peer, entry in entries.items() if entry.awake}

    async def _fetch(self, fetch: Fetch) -> None:
        """Have one worker bring a version to its host."""
        peer, manifest = fetch.link.peer, fetch.manifest
        request = FetchVersion(manifest=manifest, sources=list(fetch.link.sources))
        try:
            reply = await self._ask(peer, request)
        except TimeoutError:
            self._time_out(peer, manifest)
        except (TransportError, RequestRefused) as error:
            await asyncio.sleep(RETRY_DELAY_S)
            if _not_now(error):
                self._versions.fetching.pop(peer, None)
            elif self._versions.fetch_failed(peer):
                self._note_refused(peer, manifest, str(error))
        else:
            self._versions.fetched(peer)
            log.info(
                "version.fetched",
                peer=peer,
                policy_version=reply.version,
                bytes=reply.streamed_bytes,
                duration_s=reply.fetch_s,
            )
        self.wake.set()

    async def _apply(self, peer: str, manifest: Manifest) -> None:
        """Have one worker apply one version, and judge what it answers."""
        sources = [self.store.address] if self.store is not None else []
        try:
            reply = await self._ask(peer, ApplyVersion(manifest=manifest, sources=sources))
        except TimeoutError:
            self._time_out(peer, manifest)
        except (TransportError, RequestRefused) as error:
            await asyncio.sleep(RETRY_DELAY_S)
            if _not_now(error) or self._is_over(error):
                self._versions.applying.pop(peer, None)
            else:
                self._note_refused(peer, manifest, str(error))
                if self._versions.failed(peer):
                    log.warning("worker.quarantined", peer=peer, policy_version=manifest.version)
        else:
            await self._judge(peer, manifest, reply)
        self.wake.set()

    def _is_over(self, error: TransportError | RequestRefused) -> bool:
        """Whether the segment is gone because the trainer is: another version comes, or none."""
        gone = isinstance(error, RequestRefused) and error.refusal is Refusal.NOT_FOUND
        roles = {entry.member.role for entry in self._members.entries.values()}
        return gone and "trainer" not in roles

    async def _judge(self, peer: str, manifest: Manifest, reply: VersionApplied) -> None:
        entry = self._members.entries.get(peer)
        if entry is None:
            self._versions.gone(peer)
            return
        if problem := mismatch(manifest, reply, canary=self._has_canary(entry)):
            self._members.hide(peer)  # At once: what it samples from now on has a false version.
            await asyncio.sleep(RETRY_DELAY_S)
            if self._versions.quarantine(peer):
                log.warning(
                    "worker.quarantined",
                    peer=peer,
                    policy_version=manifest.version,
                    reason=problem,
                )
            else:
                self._note_refused(peer, manifest, problem)
            return
        if self._versions.acknowledged(peer, reply.version):
            self._members.show(peer)
            log.info("worker.cleared", peer=peer, policy_version=reply.version)
        self._members.applied(peer, reply.version)
        log.info(
            "version.applied", peer=peer, policy_version=reply.version, duration_s=reply.apply_s
        )

    def _has_canary(self, entry: Entry) -> bool:
        """A replica computes gradients, and a fake engine has no model to compute with."""
        bucket = entry.member.labels.get("bucket", "")
        return entry.member.role == "rollout" and bucket not in self._without_model

    async def _ask(self, peer: str, request: Request[R]) -> R:
        entry = self._members.entries.get(peer)
        if entry is None:
            raise PeerUnreachable(peer, "no member any more")
        answered = await self._mesh.connect(entry.member.address, timeout_s=CONNECT_TIMEOUT_S)
        if answered != peer:
            raise PeerUnreachable(peer, f"{answered!r} answers at its address")
        # Orders are idempotent and go on when the caller gives up: one that was lost costs a part.
        part_s = self._config.apply_timeout_s / ASKS
        for _ in range(ASKS - 1):
            with contextlib.suppress(RequestTimeout):
                return await self._mesh.request(peer, request, timeout_s=part_s)
        return await self._mesh.request(peer, request, timeout_s=part_s)

    def _time_out(self, peer: str, manifest: Manifest) -> None:
        """It accepted the order and never answered: it is not part of the run any more."""
        log.warning("version.timed_out", peer=peer, policy_version=manifest.version)
        self._versions.gone(peer)
        self._evict(peer)

    def _note_refused(self, peer: str, manifest: Manifest, detail: str) -> None:
        log.warning("version.refused", peer=peer, policy_version=manifest.version, detail=detail)


def _receiver(entry: Entry) -> Receiver:
    labels = entry.member.labels
    return Receiver(
        peer=entry.member.peer,
        version=entry.version,
        memory=labels.get("memory", ""),
        stream=labels.get("stream", ""),
        decodes=entry.member.role == "rollout",
    )


def _not_now(error: TransportError | RequestRefused) -> bool:
    """Whether the peer was not asked at all, and its membership says how that ends."""
    if isinstance(error, RequestRefused):
        return error.refusal in NOT_NOW
    return isinstance(error, PeerUnreachable)
