"""A move between two turns: reserved on the target, offered to it, then committed or rolled back.

The ledger names the target from the reservation on, under a new lease. So whoever dies in between,
at most one worker can report the next turn: the target under that lease, or, after a roll-back,
the source under a still newer one.
"""

from collections import Counter
from dataclasses import replace

from services.scheduler.leases import Leases
from services.scheduler.records import DecisionKind
from services.scheduler.routing.policy import Decision
from services.scheduler.state import Assign, Group, Outcome, Trajectory


class Moves:
    """Moves that are under way are marked on their trajectories; this has no state of its own."""

    def __init__(self, leases: Leases, counts: Counter[str]) -> None:
        self._leases = leases
        self._counts = counts

    def reserve(
        self,
        trajectory: Trajectory,
        group: Group,
        decision: Decision,
        now: float,
        outcome: Outcome,
    ) -> Assign:
        """Count it on the target from now on; returns what the target is to be sent."""
        source = trajectory.row.worker
        self._leases.fleet.take(trajectory.route)
        self._leases.assign(trajectory, decision, now)
        self._leases.hold(trajectory, now)
        trajectory.moving_from, trajectory.moving_for = source, decision.reason
        outcome.rows.append(trajectory.row)
        self._leases.record(DecisionKind.MOVED, trajectory, now, outcome, decision, source)
        return Assign(decision.peer, group.row, trajectory.row, source)

    def commit(self, trajectory: Trajectory, outcome: Outcome) -> None:
        """The target has it."""
        source = self._leases.fleet.workers.get(trajectory.moving_from)
        if source is not None and not source.draining:
            trajectory.route.moves += 1
        trajectory.came_from = source.bucket if source is not None else ""
        trajectory.cached_tokens = 0
        row = trajectory.row
        self._counts[f"moves/{trajectory.moving_for}"] += 1
        self._counts["moves/tokens"] += row.context_tokens
        outcome.tell(
            "trajectory.moved",
            trajectory_id=row.trajectory_id,
            turn=row.turns,
            source=trajectory.moving_from,
            worker=row.worker,
            lease=row.lease,
            tokens=row.context_tokens,
            reason=trajectory.moving_for,
        )
        trajectory.moving_from = ""

    def roll_back(self, trajectory: Trajectory, reason: str, now: float, outcome: Outcome) -> bool:
        """The target does not have it, or not for certain: back to the source under a new lease.

        A source that drains is told to stop, and the trajectory waits. False when the source is
        gone, too: then it is lost, and nothing has changed here.
        """
        peer, target = trajectory.moving_from, trajectory.row.worker
        source = self._leases.fleet.workers.get(peer)
        trajectory.moving_from = ""
        self._counts["moves/refused"] += 1
        outcome.tell(
            "move.refused",
            trajectory_id=trajectory.row.trajectory_id,
            source=peer,
            worker=target,
            reason=reason,
        )
        if source is None:
            return False
        self._leases.fleet.take(trajectory.route)
        trajectory.row = replace(trajectory.row, worker=peer, lease=trajectory.row.lease + 1)
        if source.draining:
            self._leases.hand_back(trajectory, reason, now, outcome)
            return True
        self._leases.hold(trajectory, now)
        outcome.rows.append(trajectory.row)
        self._leases.record(DecisionKind.MOVE_REFUSED, trajectory, now, outcome, reason, target)
        return True
