"""Replicas at the core's side: between their requests on the event loop and the training thread.

The loop grants leases and passes messages; gradients are opened and checked in a helper thread and
added by the training thread. Both look at the leases under one lock that nobody holds for longer
than a decision.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import structlog

from common.errors import Refusal, RequestRefused, WeightError
from common.mesh import Mesh
from common.messages.blob import Blob
from common.messages.trainer import (
    GradientTaken,
    LeaseWork,
    PackData,
    ReturnGradient,
    SequenceData,
    WorkOffer,
)
from common.weights import NO_VERSION
from services.trainer.gradients import (
    WIRE_DTYPES,
    GradientLayout,
    GradientUnsound,
    ReceivedGradient,
)
from services.trainer.leases import NO_LEASE, Add, Decision, Done, Lease, Leases, Own, Tally, Wait
from services.trainer.packing import cost
from services.trainer.pieces import REPORTED
from services.trainer.rounds import Round, Sum, Work

log = structlog.get_logger()

POLL_S = 0.8
"""How long a replica's question stays open; it gives up after a second."""
LOOK_S = 0.1
"""How often the waiting training thread looks whether the process is to stop."""


class Fetcher(Protocol):
    """Brings a gradient from another host."""

    async def __call__(self, blob: Blob, sources: list[str]) -> ReceivedGradient:
        """Raise a `WeightError` when no source gives it in time."""
        ...


@dataclass(eq=False, slots=True)
class _Incoming:
    """A gradient that has arrived, sound, and is not added yet."""

    file: ReceivedGradient
    due: Sum
    counted: "asyncio.Future[bool]"


class Crew:
    """The `Sharing` of a trainer with replicas."""

    def __init__(
        self,
        ranks: int,
        helper: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        fetcher: Fetcher | None = None,
    ) -> None:
        self._ranks, self._helper, self._clock, self._fetcher = ranks, helper, clock, fetcher
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._waiting = 0
        """Replicas that are to be told of news. Waking the loop costs the training thread."""
        self._changed = threading.Condition()
        self._leases = Leases()
        self._layout: GradientLayout | None = None
        self._step, self._version = 0, NO_VERSION
        self._work: Work | None = None
        self._incoming: dict[int, _Incoming] = {}
        self._fences: dict[str, int] = {}
        self._slots: dict[str, str] = {}
        self._done: Callable[[], None] | None = None
        """What follows when the round that the core is in has ended."""
        self.wait_s = 0.0
        """Seconds that the core has waited for replicas in this update…"""
        self.loop_s = 0.0
        """…and that it has spent on them: deciding, and adding what they returned."""

    def serve_on(self, mesh: Mesh) -> None:
        """Answer replicas; until `prepare` there is no work."""
        mesh.serve(LeaseWork, self.lease_work)
        mesh.serve(ReturnGradient, self.return_gradient)
        mesh.on_peer_lost(self.lost)

    def prepare(self, layout: GradientLayout) -> None:
        """The model is loaded."""
        self._layout = layout

    def expect(self, step: int, version: int) -> None:
        """The next update is of this step, with the weights of this version."""
        self._step, self._version = step, version

    @property
    def tally(self) -> Tally:
        """Who ran the micro-batches of the last update."""
        return self._leases.tally

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last update."""
        tally = self._leases.tally
        return {
            "replicas/micro_batches": float(tally.replicas),
            "replicas/own_micro_batches": float(tally.own),
            "replicas/again": float(tally.again),
            "time/wait_replicas": self.wait_s,
            "time/loop_replicas": self.loop_s,
        }

    # ── the training thread ──────────────────────────────────────────────────────────────────

    def begin(self, work: Work) -> None:
        """See `Sharing`."""
        began = self._clock()
        lengths = [len(sequence.tokens) for sequence in work.sequences]
        with self._changed:
            self._work, self.wait_s = work, 0.0
            self._leases.begin([cost(pack, lengths) for pack in work.packs])
        self._tell()
        self.loop_s = self._clock() - began

    def next(self, between: Callable[[], None]) -> Round | None:
        """See `Sharing`."""
        while isinstance(due := self.look(), Wait):
            between()
            began = self._clock()
            with self._changed:
                self._changed.wait(max(0.0, min(LOOK_S, due.until_s - began)))
            self.wait_s += self._clock() - began
        return due

    def look(self) -> Round | Wait | None:
        """What the core does now; the round before is done."""
        began = self._clock()
        with self._changed:
            if self._done is not None:
                self._done()
                self._done = None
                self._tell()
            due = self._begin_round(self._leases.next(self._clock(), self._ranks))
        self.loop_s += self._clock() - began
        return due

    def _begin_round(self, decision: Decision) -> Round | Wait | None:
        began = self._clock()
        match decision:
            case Own(packs):
                self._done = lambda: self._leases.ran(packs, self._clock() - began)
                return decision
            case Add(number):
                incoming = self._incoming.pop(number)
                self._done = lambda: self._settle_added(incoming, began)
                return incoming.due
            case Wait():
                return decision
            case Done():
                return None

    def end(self) -> None:
        """See `Sharing`."""
        with self._changed:
            if self._done is not None:
                self._done()
                self._done = None
            self._work = None
            self._leases.end()
            for incoming in self._incoming.values():
                self._settle(incoming, counted=False)
            self._incoming.clear()

    def _settle_added(self, incoming: _Incoming, began: float) -> None:
        self.loop_s += self._clock() - began
        self._settle(incoming, counted=True)

    def _settle(self, incoming: _Incoming, *, counted: bool) -> None:
        incoming.file.close()

        def answer() -> None:
            if not incoming.counted.done():
                incoming.counted.set_result(counted)

        self._loop.call_soon_threadsafe(answer)

    def _tell(self) -> None:
        """There may be work for those who wait for some, if anybody does."""
        if self._waiting:
            self._loop.call_soon_threadsafe(self._wake_waiting)

    def _wake_waiting(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # ── the event loop ───────────────────────────────────────────────────────────────────────

    async def lease_work(self, sender: str, request: LeaseWork) -> WorkOffer:
        """Give a replica micro-batches, or after a moment none."""
        self._check_fence(request.slot, request.fence)
        self._slots[sender] = request.slot
        self._waiting += 1  # Before the first look, or news in between would not be told.
        try:
            async with asyncio.timeout(POLL_S):
                while (offer := self._offer(request)) is None:
                    await self._news.wait()
        except TimeoutError:
            return WorkOffer(lease=NO_LEASE, step=0, version=NO_VERSION, sequences=[], packs=[])
        finally:
            self._waiting -= 1
        return offer

    def _offer(self, request: LeaseWork) -> WorkOffer | None:
        with self._changed:
            work, step = self._work, self._step
            if work is None or request.version != self._version:
                return None
            lease = self._leases.grant(request.slot, self._clock(), keep=request.returning)
        if lease is None:
            return None
        log.debug("work.leased", slot=lease.slot, lease=lease.number, packs=len(lease.packs))
        return _offered(work, lease, step, request.version)

    async def return_gradient(self, _sender: str, request: ReturnGradient) -> GradientTaken:
        """Have a gradient added, when it is sound and still counts."""
        self._check_fence(request.slot, request.fence)
        number = request.lease
        with self._changed:
            if self._leases.counts(number) and self._is_current(request):
                return GradientTaken(counted=True)
            lease = self._held(request)
            lease.returning = True
        arrived = False
        try:
            self._check_claims(request, lease)
            file = await self._receive(request)
            incoming = _Incoming(
                file,
                Sum(file.path, request.dtype, tuple(request.sums)),
                self._loop.create_future(),
            )
            with self._changed:
                arrived = self._leases.arrive(number, self._clock())
                if arrived:
                    self._incoming[number] = incoming
                    self._changed.notify()
            if not arrived:
                file.close()
                raise RequestRefused(Refusal.STALE_FENCE, f"lease {number} does not count any more")
        except GradientUnsound as error:
            with self._changed:
                self._leases.refuse(number)
                self._changed.notify()
            log.warning("gradient.refused", slot=request.slot, lease=number, reason=error.reason)
            raise RequestRefused(Refusal.INVALID, error.reason) from error
        finally:
            if not arrived:
                with self._changed:
                    self._leases.give_back(number)
                    self._changed.notify()
        return GradientTaken(counted=await incoming.counted)

    def lost(self, peer: str, _reason: str = "") -> None:
        """A process is gone; when it was a replica, what it had at work is."""
        slot = self._slots.pop(peer, None)
        if slot is not None and slot not in self._slots.values():
            with self._changed:
                self._leases.gone(slot)
                self._changed.notify()

    def _check_fence(self, slot: str, fence: int) -> None:
        newest = self._fences.get(slot, fence)
        if fence < newest:
            raise RequestRefused(Refusal.STALE_FENCE, f"fence {fence} < {newest}")
        self._fences[slot] = fence

    def _is_current(self, request: ReturnGradient) -> bool:
        return (request.step, request.version) == (self._step, self._version)

    def _held(self, request: ReturnGradient) -> Lease:
        lease = self._leases.find(request.lease, request.slot)
        if lease is None or self._work is None or not self._is_current(request):
            detail = f"lease {request.lease} of step {request.step} does not count any more"
            raise RequestRefused(Refusal.STALE_FENCE, detail)
        if lease.returning:
            raise RequestRefused(Refusal.NOT_READY, f"lease {request.lease} is being returned")
        return lease

    def _check_claims(self, request: ReturnGradient, lease: Lease) -> None:
        """What can be seen without the gradient itself."""
        assert self._work is not None
        assert self._layout is not None
        members = [i for pack in lease.packs for i in self._work.packs[pack].members]
        tokens = sum(len(self._work.sequences[i].actions) for i in members)
        report = dict(zip(REPORTED, request.sums, strict=False))
        if request.layout != self._layout.digest:
            raise GradientUnsound("layout")
        if request.dtype not in WIRE_DTYPES:
            raise GradientUnsound("dtype")
        if request.blob.length != self._layout.length(request.dtype):
            raise GradientUnsound("length")
        if len(request.sums) != len(REPORTED) or not all(map(math.isfinite, request.sums)):
            raise GradientUnsound("sums")
        if not request.tokens == tokens == report["tokens"]:
            raise GradientUnsound("tokens")

    async def _receive(self, request: ReturnGradient) -> ReceivedGradient:
        """Open the gradient and check it, off the loop."""
        try:
            file = ReceivedGradient.open(request.blob.path)
        except OSError as error:
            file = await self._stream(request, error)
        checked = False
        try:
            await self._loop.run_in_executor(self._helper, file.check, request.blob, request.dtype)
            checked = True
        finally:
            if not checked:
                file.close()
        return file

    async def _stream(self, request: ReturnGradient, error: OSError) -> ReceivedGradient:
        if self._fetcher is None or not request.sources:
            raise RequestRefused(Refusal.FAILED, f"gradient: {error.strerror}") from error
        try:
            return await self._fetcher(request.blob, request.sources)
        except WeightError as broken:
            raise RequestRefused(Refusal.FAILED, str(broken)) from broken


def _offered(work: Work, lease: Lease, step: int, version: int) -> WorkOffer:
    packs = [work.packs[number] for number in lease.packs]
    members = sorted({index for pack in packs for index in pack.members})
    place = {index: number for number, index in enumerate(members)}
    return WorkOffer(
        lease=lease.number,
        step=step,
        version=version,
        sequences=[_packed(work, index) for index in members],
        packs=[
            PackData(members=[place[index] for index in pack.members], shared=pack.shared)
            for pack in packs
        ],
    )


def _packed(work: Work, index: int) -> SequenceData:
    sequence = work.sequences[index]
    return SequenceData(
        tokens=sequence.tokens.tobytes(),
        actions=sequence.actions.tobytes(),
        behaviour=sequence.behaviour.tobytes(),
        advantage=sequence.advantage,
        weight=work.weights[index],
        prompt=sequence.prompt,
    )
