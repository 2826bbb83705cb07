"""Turns on their way into the scheduler's ledger.

A turn is reported with the same content until the scheduler has it, also across a restart of the
scheduler. One that cannot be reported for a minute is given up here: the lease has long lapsed.
"""

import asyncio

import structlog

from common.errors import Refusal, RequestRefused, TransportError
from common.membership import Membership
from common.messages.scheduler import TurnFinished, TurnRecorded

log = structlog.get_logger()

DEADLINE_S = 60.0
"""Longer than a restart of the scheduler takes."""
ATTEMPT_S = 10.0
PAUSE_S = 0.5
NOT_WANTED = (Refusal.STALE_FENCE, Refusal.NOT_FOUND)


class Journal:
    """Reports the turns of one worker."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def record(self, turn: TurnFinished) -> TurnRecorded | None:
        """Report a turn until it is recorded; None when it is not wanted or cannot be reported."""
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + DEADLINE_S
        while True:
            try:
                left_s = deadline_s - now_s()
                scheduler = await self._membership.wait_for("scheduler", timeout_s=left_s)
                recorded = await self._membership.request(scheduler, turn, timeout_s=ATTEMPT_S)
            except RequestRefused as error:
                if not error.refusal.retryable:
                    self._given_up(turn, error.refusal.value, expected=error.refusal in NOT_WANTED)
                    return None
            except TransportError as error:
                log.debug("turn.delayed", trajectory_id=turn.trajectory_id, reason=str(error))
            else:
                return recorded
            if now_s() + PAUSE_S >= deadline_s:
                self._given_up(turn, "deadline", expected=False)
                return None
            await asyncio.sleep(PAUSE_S)

    def _given_up(self, turn: TurnFinished, reason: str, *, expected: bool) -> None:
        report = log.info if expected else log.warning
        report(
            "trajectory.released",
            trajectory_id=turn.trajectory_id,
            turn=turn.turn,
            lease=turn.lease,
            reason=reason,
        )
