"""A gradient replica: weights only. It asks the trainer for micro-batches and returns their sum.

It is one tenant of a hybrid slot. Whatever becomes of it, the trainer loses nothing but the help:
what it does not return in time is computed by the core.
"""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from common.copies import Bringing, Copies, InPlace, refused
from common.errors import RequestRefused, TransportError, WeightError
from common.membership import MEMORY, Membership
from common.messages.coordinator import Member
from common.messages.rollout import ApplyVersion, FetchVersion, VersionApplied, VersionFetched
from common.messages.trainer import GradientTaken, LeaseWork, ReturnGradient, WorkOffer
from common.service import Runtime
from common.stream import StreamServer
from common.tenant import Tenant
from common.weights import NO_VERSION
from services.trainer.leases import NO_LEASE
from services.trainer.replica_engine import Computed, ReplicaEngine

log = structlog.get_logger()

LEASE_TIMEOUT_S = 2.0
"""The trainer answers within one."""
RETRY_S = 0.5
RETURN_TIMEOUT_S = 10.0
"""For the core to come to the end of its micro-batch; after that the sum is late anyway."""
RETURN_TRIES = 2


@dataclass(frozen=True, slots=True)
class Streams:
    """How bulk bytes come and go."""

    copies: Copies = field(default_factory=InPlace)
    server: StreamServer | None = None
    """Offers gradients to a trainer on another host; None: it sees this one's memory."""


OpenStreams = Callable[[Runtime], AbstractAsyncContextManager[Streams]]


class ReplicaService:
    """The process."""

    def __init__(
        self, runtime: Runtime, open_streams: OpenStreams | None = None, memory: Path = MEMORY
    ) -> None:
        self._runtime, self._open_streams, self._memory = runtime, open_streams, memory

    async def run(self, stopping: asyncio.Event) -> None:
        """Load the policy, then compute whenever the slot is ours, until `stopping` is set.

        Raises:
            ConfigError: the model cannot be used.
        """
        async with contextlib.AsyncExitStack() as stack:
            streams = Streams()
            if self._open_streams is not None:
                streams = await stack.enter_async_context(self._open_streams(self._runtime))
            await self._run(streams, stopping)

    async def _run(self, streams: Streams, stopping: asyncio.Event) -> None:
        runtime = self._runtime
        stem = self._memory / f"libra-{runtime.run_id}-g-{runtime.name}"
        engine = await asyncio.to_thread(ReplicaEngine, runtime.config, stem, streams.server)
        try:
            await Replica(runtime, engine, streams.copies).run(stopping)
        finally:
            engine.close()


class Replica:
    """Serves the coordinator, and works for the trainer while it is awake."""

    def __init__(
        self, runtime: Runtime, engine: ReplicaEngine, copies: Copies | None = None
    ) -> None:
        self._mesh, self._slot, self._engine = runtime.mesh, runtime.name, engine
        copies = copies or InPlace()
        self._bringing = Bringing(copies, runtime.config.coordinator.apply_timeout_s)
        labels = {**copies.labels, "slot": runtime.name}
        self._membership = Membership(runtime, labels)
        self._tenant = Tenant(runtime.mesh, self._membership, self)
        self._working = asyncio.Event()
        """Set while new work may be taken."""
        self._computing = False
        self._returning: asyncio.Task[None] | None = None
        self._returning_lease = NO_LEASE
        self._idle = asyncio.Event()
        """Set while nothing is at work or on its way to the trainer."""
        self._idle.set()
        self._wanted = NO_VERSION
        """The newest version that was ordered; work for an older one is in vain."""
        self._give_up_s: float | None = None
        self._swapping = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set."""
        self._mesh.serve(FetchVersion, self._fetch_version)
        self._mesh.serve(ApplyVersion, self._apply_version)
        async with self._tasks as tasks:
            background = [
                tasks.create_task(self._membership.run(), name="membership"),
                tasks.create_task(self._tenant.run(), name="tenant"),
                tasks.create_task(self._work(), name="work"),
            ]
            await stopping.wait()
            for task in background:
                task.cancel()
            if self._returning is not None:
                self._returning.cancel()

    # ── the slot ─────────────────────────────────────────────────────────────────────────────

    async def wake(self) -> None:
        """See `Body`."""
        await self._engine.wake()
        self._give_up_s = None
        self._working.set()

    async def drain(self, deadline_s: float) -> None:
        """See `Body`. What is begun is returned, unless the time does not suffice."""
        loop = asyncio.get_running_loop()
        self._working.clear()
        self._give_up_s = loop.time() + deadline_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        if self._returning is not None:
            self._returning.cancel()
        await self._idle.wait()  # A micro-batch is never torn; then the work is given up.

    async def release(self) -> None:
        """See `Body`."""
        await self._engine.release()

    # ── versions ─────────────────────────────────────────────────────────────────────────────

    async def _fetch_version(self, _sender: str, request: FetchVersion) -> VersionFetched:
        return await self._bringing.fetch(request)

    async def _apply_version(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        """Take a version's weights. The engine finishes a micro-batch first, no more."""
        manifest = request.manifest
        self._wanted = max(self._wanted, manifest.version)
        engine, began_s = self._engine, self._now()
        async with self._swapping:
            if manifest.version > engine.version:
                try:
                    await engine.apply(await self._bringing.local(request))
                except WeightError as error:
                    raise refused(error) from error
                finally:
                    self._membership.applied_version = engine.version
        apply_s = self._now() - began_s
        log.info("version.applied", policy_version=engine.version, duration_s=apply_s)
        return VersionApplied(version=engine.version, digest=engine.digest, apply_s=apply_s)

    # ── work ─────────────────────────────────────────────────────────────────────────────────

    async def _work(self) -> None:
        while True:
            await self._working.wait()
            trainer = self._membership.find("trainer")
            offer = None
            if trainer is not None and self._engine.version != NO_VERSION:
                offer = await self._ask(trainer)
            if trainer is None or offer is None:
                await asyncio.sleep(RETRY_S)
            elif offer.lease != NO_LEASE and self._working.is_set():
                self._computing = True
                self._note_idle()
                await self._compute(trainer, offer)
                self._computing = False
                self._note_idle()

    async def _ask(self, trainer: Member) -> WorkOffer | None:
        request = LeaseWork(
            slot=self._slot,
            fence=self._tenant.fence,
            version=self._engine.version,
            returning=self._returning_lease,
        )
        try:
            return await self._membership.request(trainer, request, timeout_s=LEASE_TIMEOUT_S)
        except (TransportError, RequestRefused) as error:
            log.debug("work.refused", reason=str(error))
            return None

    async def _compute(self, trainer: Member, offer: WorkOffer) -> None:
        """Run the micro-batches of an offer and return their sum, or give them up."""
        began_s = self._now()
        for pack in offer.packs:
            if self._in_vain(offer):
                await self._engine.forget()
                return
            await self._engine.accumulate(offer, pack)
        if self._in_vain(offer):
            await self._engine.forget()
            return
        if self._returning is not None:  # Its buffer is the next but one.
            await asyncio.wait([self._returning])
        computed = await self._engine.finish()
        self._membership.busy_s += self._now() - began_s
        task = self._tasks.create_task(
            self._return(trainer, offer, computed), name=f"return {offer.lease}"
        )
        self._returning, self._returning_lease = task, offer.lease
        task.add_done_callback(self._returned)

    def _returned(self, task: "asyncio.Task[None]") -> None:
        if self._returning is task:
            self._returning, self._returning_lease = None, NO_LEASE
        self._note_idle()

    def _note_idle(self) -> None:
        if self._computing or self._returning is not None:
            self._idle.clear()
        else:
            self._idle.set()

    def _in_vain(self, offer: WorkOffer) -> bool:
        """Whether the sum would come too late."""
        if self._give_up_s is not None and self._now() >= self._give_up_s:
            return True
        return not self._engine.version == offer.version >= self._wanted

    async def _return(self, trainer: Member, offer: WorkOffer, computed: Computed) -> None:
        request = ReturnGradient(
            slot=self._slot,
            fence=self._tenant.fence,
            lease=offer.lease,
            step=offer.step,
            version=offer.version,
            blob=computed.blob,
            dtype=computed.dtype,
            layout=computed.layout,
            sources=self._engine.sources,
            tokens=computed.tokens,
            sums=computed.sums,
        )
        taken = None
        try:
            taken = await self._send(trainer, request)
        finally:
            if taken is None or not taken.counted:  # The core may still read it.
                await self._engine.discard(computed)

    async def _send(self, trainer: Member, request: ReturnGradient) -> GradientTaken | None:
        for _ in range(RETURN_TRIES):
            try:
                return await self._membership.request(
                    trainer, request, timeout_s=RETURN_TIMEOUT_S, key=str(request.lease)
                )
            except TransportError as error:
                log.debug("gradient.lost", lease=request.lease, reason=str(error))
            except RequestRefused as error:
                log.info(
                    "gradient.refused",
                    lease=request.lease,
                    reason=error.refusal.value,
                    detail=error.detail,
                )
                return None
        return None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
