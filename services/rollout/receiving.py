"""Versions as they arrive at a worker: brought to its host, swapped in, and proved."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from common.canary import canary_tokens
from common.copies import Bringing, Copies, refused
from common.errors import Refusal, RequestRefused, WeightError
from common.membership import Membership
from common.messages.base import Message
from common.messages.coordinator import Manifest
from common.messages.rollout import ApplyVersion, FetchVersion, VersionApplied, VersionFetched
from common.weights import NO_VERSION
from services.rollout.engine import Engine
from services.rollout.updates import Updates

log = structlog.get_logger()

R = TypeVar("R", bound=Message)

WAIT_SHARE = 0.25
"""Of the coordinator's limit: so long may turns take to end before a swap."""
CANARY_SHARE = 0.15
"""Of the same limit: a score waits behind what the engine samples."""


class Receiving:
    """Serves the coordinator's orders about versions.

    Args:
        engine: to apply them to.
        updates: how they are swapped in.
        membership: is told what is applied.
        copies: brings them here.
        limit_s: after so long the coordinator gives a worker up.
        tasks: a swap goes on here when its caller gives up.
        on_applied: called after each swap.
    """

    def __init__(  # noqa: PLR0913  Everything that a version touches.
        self,
        engine: Engine,
        updates: Updates,
        membership: Membership,
        copies: Copies,
        *,
        limit_s: float,
        tasks: asyncio.TaskGroup,
        on_applied: Callable[[], None],
    ) -> None:
        self._engine, self._updates, self._membership = engine, updates, membership
        self._bringing, self._limit_s = Bringing(copies, limit_s), limit_s
        self._tasks, self._on_applied = tasks, on_applied
        self._swapping = asyncio.Lock()
        self._fetching: dict[int, asyncio.Task[VersionFetched | RequestRefused]] = {}
        self._applying: dict[int, asyncio.Task[VersionApplied | RequestRefused]] = {}
        self._proof: VersionApplied | None = None
        """Of what is applied."""
        self.refusing: Refusal | None = None
        """Why no version is taken now, if none is."""

    async def fetch(self, _sender: str, request: FetchVersion) -> VersionFetched:
        """Bring a version to this host, for all workers on it. Goes on when the caller gives up."""
        version = request.manifest.version
        task = self._fetching.get(version)
        if task is None:
            task = self._tasks.create_task(self._fetch(request), name=f"fetch {version}")
            self._fetching[version] = task
            task.add_done_callback(lambda _: self._fetching.pop(version, None))
        return _answer(await asyncio.shield(task))

    async def _fetch(self, request: FetchVersion) -> VersionFetched | RequestRefused:
        try:
            return await self._bringing.fetch(request)
        except RequestRefused as refusal:
            return refusal

    async def apply(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        """Swap a version in. Goes on when the caller gives up: half a swap is no state."""
        if self.refusing is not None:
            raise RequestRefused(self.refusing)
        version = request.manifest.version
        task = self._applying.get(version)
        if task is None:
            task = self._tasks.create_task(self._swap(request), name=f"apply {version}")
            self._applying[version] = task
            task.add_done_callback(lambda _: self._applying.pop(version, None))
        return _answer(await asyncio.shield(task))

    def cancel(self) -> None:
        """End what is under way; the process ends."""
        for task in [*self._fetching.values(), *self._applying.values()]:
            task.cancel()

    async def sleep(self) -> None:
        """Put the engine to sleep between two swaps; `refusing` is set, so no other follows."""
        assert self.refusing is not None
        async with self._swapping:
            await self._engine.sleep()
            self._proof = None
            self._membership.applied_version = NO_VERSION

    async def _swap(self, request: ApplyVersion) -> VersionApplied | RequestRefused:
        async with self._swapping:
            manifest = request.manifest
            if self.refusing is not None:  # It sleeps since this was asked.
                return RequestRefused(self.refusing)
            if self._holds(manifest):
                return await self._prove(0.0)
            began = _now()
            try:
                await self._updates.swap(await self._bringing.local(request))
            except WeightError as error:
                return refused(error)
            self._proof = None
            apply_s = _now() - began
            self._membership.applied_version = manifest.version
            self._on_applied()
            log.info("version.applied", policy_version=manifest.version, duration_s=apply_s)
            return await self._prove(apply_s)

    def _holds(self, manifest: Manifest) -> bool:
        """Whether there is nothing to do. Who is thought to lie applies the version once more."""
        if manifest.version < self._engine.version:
            return True
        same = manifest.version == self._engine.version
        return same and self._engine.digest == manifest.digest and not self._membership.excluded

    async def _prove(self, apply_s: float) -> VersionApplied | RequestRefused:
        """Say what the engine holds and computes, not what it was told to."""
        version, digest = self._engine.version, self._engine.digest
        proof = self._proof
        if proof is None or (proof.version, proof.digest) != (version, digest):
            try:
                async with asyncio.timeout(CANARY_SHARE * self._limit_s):
                    canary = await self._engine.score(canary_tokens(self._engine.vocabulary))
            except TimeoutError:  # It is busy; the coordinator asks again.
                return RequestRefused(Refusal.NOT_READY, "no canary in time")
            proof = VersionApplied(version=version, digest=digest, apply_s=0.0, canary=canary)
            self._proof = proof
        return proof.model_copy(update={"apply_s": apply_s})


def _answer(outcome: R | RequestRefused) -> R:
    if isinstance(outcome, RequestRefused):
        raise outcome
    return outcome


def _now() -> float:
    return asyncio.get_running_loop().time()
