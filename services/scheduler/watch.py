"""How busy the processes of the run are, by the coordinator's word; for the metrics only."""

import asyncio

import structlog

from common.errors import RequestRefused, TransportError
from common.membership import Membership
from common.messages.coordinator import Fleet, GetFleet
from services.scheduler.metrics import idle_metrics

log = structlog.get_logger()

INTERVAL_S = 1.0
TIMEOUT_S = 1.0
WORKING_ROLES = ("rollout", "tools", "trainer")
"""Roles that report how long they have worked; the others only wait for these."""


class Watch:
    """The newest word on everybody, and the state at the last step."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._fleet = Fleet(members=[], version=-1, versions_published=0)
        self._at_step: dict[str, tuple[float, float]] = {}
        self._shares: dict[str, float] = {}

    async def run(self) -> None:
        """Ask until cancelled; a failure is no news."""
        while True:
            try:
                self._fleet = await self._membership.ask_coordinator(
                    GetFleet(), timeout_s=TIMEOUT_S
                )
            except (TransportError, RequestRefused) as error:
                log.debug("fleet.unknown", reason=type(error).__name__)
            await asyncio.sleep(INTERVAL_S)

    @property
    def fleet(self) -> Fleet:
        """As the coordinator saw it at the last look."""
        return self._fleet

    def step_finished(self) -> None:
        """Count from here for the next step."""
        self._at_step = {
            status.member.peer: (status.busy_s, status.uptime_s) for status in self._fleet.members
        }

    def idle(self) -> dict[str, float]:
        """Idle shares by role since the last step, or the last known ones after a short step."""
        spans: list[tuple[str, float, float]] = []
        for status in self._fleet.members:
            if status.member.role not in WORKING_ROLES:
                continue
            busy_s, uptime_s = self._at_step.get(status.member.peer, (0.0, 0.0))
            spans.append((status.member.role, status.busy_s - busy_s, status.uptime_s - uptime_s))
        self._shares |= idle_metrics(spans)
        return self._shares
