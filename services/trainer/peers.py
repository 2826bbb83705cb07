"""What the trainer asks of the scheduler and the coordinator, until it is answered or it is late.

Both may be restarted at any moment: every request here is idempotent, repeated while its peer is
away, and given up with a message that names the peer.
"""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from common.errors import Refusal, RequestRefused, RunFailed, TransportError
from common.membership import Membership
from common.messages.base import Message, Request
from common.messages.coordinator import GetSegmentsInUse, PublishVersion
from common.messages.scheduler import (
    BatchOffer,
    BeginLineage,
    FetchGroup,
    GroupData,
    StepFinished,
    StepRecorded,
    TakeBatch,
)

R = TypeVar("R", bound=Message)

PATIENCE_S = 60.0
"""The launcher restarts a service within seconds; a minute later it has given up."""
STOPPING_PATIENCE_S = 3.0
"""The same when this process is being stopped and a checkpoint has yet to be written."""
REQUEST_TIMEOUT_S = 10.0
"""Ten times what the slowest of these, `TakeBatch`, is answered within."""
HASH_TIMEOUT_S = 60.0
"""The coordinator hashes the whole version before it answers."""
TRIES_MIN = 3
"""One lost reply must not use up the patience of a slow request."""
LOOK_S = 1.0
"""Between two looks at whether the process is to stop, while there is no scheduler."""
RETRY_S = 0.25
FETCHES = 4
"""Groups read at a time: enough to hide the way there and back."""


class Peers:
    """The scheduler and the coordinator, as the trainer knows them."""

    def __init__(self, membership: Membership, stopping: asyncio.Event) -> None:
        self._membership = membership
        self._stopping = stopping

    async def begin_lineage(self, step: int) -> int:
        """Go on from `step`; returns the number of the new lineage."""
        return (await self._ask_scheduler(BeginLineage(step=step))).lineage

    async def take_batch(self, lineage: int, step: int) -> BatchOffer:
        """The groups of a step, or word of what is missing."""
        return await self._ask_scheduler(TakeBatch(lineage=lineage, step=step))

    async def fetch(self, group_ids: Sequence[str]) -> list[GroupData]:
        """Read the groups of a batch, in the order given."""
        fetched: dict[str, GroupData] = {}
        places = asyncio.Semaphore(FETCHES)

        async def fetch_one(group_id: str) -> None:
            async with places:
                fetched[group_id] = await self._ask_scheduler(FetchGroup(group_id=group_id))

        async with asyncio.TaskGroup() as tasks:
            for group_id in group_ids:
                tasks.create_task(fetch_one(group_id), name=f"fetch {group_id}")
        return [fetched[group_id] for group_id in group_ids]

    async def step_finished(self, report: StepFinished) -> StepRecorded:
        """Have a step and what it consumed recorded."""
        return await self._ask_scheduler(report)

    async def segments_in_use(self) -> frozenset[str]:
        """Segments that a worker may still read."""
        reply = await self._ask_coordinator(GetSegmentsInUse(), REQUEST_TIMEOUT_S)
        return frozenset(reply.segments)

    async def publish(self, version: int, segment: str, canary: list[float]) -> None:
        """Have a version announced."""
        request = PublishVersion(version=version, segment=segment, canary=canary)
        await self._ask_coordinator(request, HASH_TIMEOUT_S)

    async def _ask_scheduler(self, request: Request[R]) -> R:
        began = self._now()
        while True:
            try:
                member = await self._membership.wait_for("scheduler", timeout_s=LOOK_S)
                return await self._membership.request(member, request, timeout_s=REQUEST_TIMEOUT_S)
            except (TransportError, RequestRefused) as error:
                patience_s = self._patience_s(REQUEST_TIMEOUT_S)
                self._check_patience("scheduler", request, error, began + patience_s)
            await asyncio.sleep(RETRY_S)

    async def _ask_coordinator(self, request: Request[R], timeout_s: float) -> R:
        began = self._now()
        while True:
            try:
                return await self._membership.ask_coordinator(request, timeout_s=timeout_s)
            except (TransportError, RequestRefused) as error:
                patience_s = self._patience_s(timeout_s)
                self._check_patience("coordinator", request, error, began + patience_s)
            await asyncio.sleep(RETRY_S)

    def _patience_s(self, timeout_s: float) -> float:
        if self._stopping.is_set():
            return STOPPING_PATIENCE_S
        return max(PATIENCE_S, TRIES_MIN * timeout_s)

    def _check_patience(
        self, peer: str, request: Request[R], error: TransportError | RequestRefused, until: float
    ) -> None:
        """Raise when the peer will not answer otherwise, or not in time."""
        kind = type(request).__name__
        if isinstance(error, RequestRefused):
            if error.refusal is Refusal.STALE_FENCE:
                raise RunFailed(f"{kind}: a newer trainer has taken over ({error})") from error
            if not error.refusal.retryable:
                raise RunFailed(f"the {peer} refused {kind}: {error}") from error
        if self._now() >= until:
            raise RunFailed(f"the {peer} did not answer {kind} in time: {error}") from error

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
