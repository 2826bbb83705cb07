"""Weight versions as they come to a host: what rollout workers and replicas do alike."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from common.errors import Refusal, RequestRefused, VersionGone, WeightError
from common.messages.coordinator import Manifest
from common.messages.rollout import ApplyVersion, FetchVersion, VersionFetched

log = structlog.get_logger()

FETCH_SHARE = 0.8
"""Of the coordinator's limit: whoever cannot fetch says so, by name, before it is given up."""
BRING_SHARE = 0.4
"""The same for a worker that is told to apply what it has not fetched."""


class Copies(Protocol):
    """Versions on this host: `common.mirror.Mirror`, or the segments themselves."""

    labels: dict[str, str]
    """Of the member that has them: which memory it sees, and where it passes chunks on."""

    @property
    def streamed_bytes(self) -> int:
        """Received from other hosts, since the start."""
        ...

    async def bring(
        self, manifest: Manifest, sources: Sequence[str], *, timeout_s: float
    ) -> Manifest:
        """The same version, with a segment that this process can open.

        Raises:
            WeightError: no source gave the right bytes in time.
        """
        ...


class InPlace:
    """All processes see the trainer's segments."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.streamed_bytes = 0

    async def bring(
        self, manifest: Manifest, sources: Sequence[str], *, timeout_s: float
    ) -> Manifest:
        """It is here already."""
        del sources, timeout_s
        return manifest


class Bringing:
    """Does what the coordinator asks of a host.

    Args:
        copies: brings versions here.
        limit_s: after so long the coordinator gives a worker up.
    """

    def __init__(self, copies: Copies, limit_s: float) -> None:
        self._copies, self._limit_s = copies, limit_s

    async def fetch(self, request: FetchVersion) -> VersionFetched:
        """Bring a version here, for all processes of the host.

        Raises:
            RequestRefused: it is not to be had.
        """
        loop = asyncio.get_running_loop()
        version = request.manifest.version
        began, before = loop.time(), self._copies.streamed_bytes
        timeout_s = FETCH_SHARE * self._limit_s
        try:
            await self._copies.bring(request.manifest, request.sources, timeout_s=timeout_s)
        except WeightError as error:
            raise refused(error) from error
        fetch_s = loop.time() - began
        log.info("version.fetched", policy_version=version, duration_s=fetch_s)
        streamed = self._copies.streamed_bytes - before
        return VersionFetched(version=version, streamed_bytes=streamed, fetch_s=fetch_s)

    async def local(self, request: ApplyVersion) -> Manifest:
        """The version that is to be applied, with a segment that this process can open.

        Raises:
            WeightError: it is not to be had.
        """
        timeout_s = BRING_SHARE * self._limit_s
        return await self._copies.bring(request.manifest, request.sources, timeout_s=timeout_s)


def refused(error: WeightError) -> RequestRefused:
    """What the coordinator is told."""
    refusal = Refusal.NOT_FOUND if isinstance(error, VersionGone) else Refusal.FAILED
    return RequestRefused(refusal, f"{type(error).__name__}: {error}")
