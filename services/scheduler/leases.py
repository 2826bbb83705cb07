"""Who holds which trajectory until when, and where a waiting one goes."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from common.messages.scheduler import ReportWorker
from common.trajectory import FailureKind
from common.weights import NO_VERSION
from services.scheduler.admission import oldest_step_allowed
from services.scheduler.fleet import Fleet
from services.scheduler.placement import POLICIES, Need, WorkerView, place
from services.scheduler.records import GroupState, TrajectoryState
from services.scheduler.rules import Rules
from services.scheduler.state import Assign, Group, Outcome, Trajectory
from services.scheduler.turns import failed

FORGOTTEN_AFTER_LEASES = 10
"""A worker that holds nothing and says nothing for so many leases leaves the status, too."""


class Leases:
    """Moves trajectories between waiting and running. Does not know what becomes of them."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._policy = POLICIES[rules.placement]
        self.fleet = Fleet(rules.tokens_expected)

    def resume(self, trajectory: Trajectory, now: float) -> None:
        """After a restart its worker keeps it for a lease: if it reports it, it never stopped."""
        if trajectory.running:
            trajectory.lease_until = now + self._rules.lease_s
            self.fleet.hold(trajectory)

    def renew(
        self,
        peer: str,
        report: ReportWorker,
        trajectories: Mapping[str, Trajectory],
        now: float,
        outcome: Outcome,
    ) -> list[str]:
        """Renew what the worker holds; returns what it must let go."""
        drop: list[str] = []
        for trajectory_id in report.holding:
            trajectory = trajectories.get(trajectory_id)
            if trajectory is None or trajectory.row.worker != peer:
                drop.append(trajectory_id)
            elif not trajectory.row.ended:
                self.adopt(trajectory, now, outcome)
        if report.slots == 0:
            self._take_back_all(peer, set(report.holding), trajectories.values(), now, outcome)
        return drop

    def _take_back_all(
        self,
        peer: str,
        held: Container[str],
        trajectories: Iterable[Trajectory],
        now: float,
        outcome: Outcome,
    ) -> None:
        """A draining worker hands back what it no longer holds: moved, not lost."""
        for trajectory in trajectories:
            row = trajectory.row
            if trajectory.running and row.worker == peer and row.trajectory_id not in held:
                self.take_back(trajectory, now, outcome)

    def adopt(self, trajectory: Trajectory, now: float, outcome: Outcome) -> None:
        """The holder of the newest lease works on it, also if it was thought lost meanwhile."""
        trajectory.lease_until = now + self._rules.lease_s
        if trajectory.row.state == TrajectoryState.WAITING:
            trajectory.row = replace(trajectory.row, state=TrajectoryState.RUNNING.value)
            trajectory.since = now
            self.fleet.hold(trajectory)
            outcome.rows.append(trajectory.row)

    def release(self, trajectory: Trajectory) -> None:
        """It ended or was dropped, so no worker holds it."""
        self.fleet.release(trajectory)
        trajectory.lease_until = inf

    def take_back(self, trajectory: Trajectory, now: float, outcome: Outcome) -> None:
        """It waits for a worker again."""
        self.release(trajectory)
        trajectory.row = replace(trajectory.row, state=TrajectoryState.WAITING.value)
        trajectory.since = now
        outcome.rows.append(trajectory.row)

    def lose(self, trajectory: Trajectory, reason: str, now: float, outcome: Outcome) -> bool:
        """Its worker lost it. True when that was once too often, and it has failed now."""
        worker, losses = trajectory.row.worker, trajectory.row.losses + 1
        trajectory.row = replace(trajectory.row, losses=losses)
        outcome.warn(
            "trajectory.lost",
            trajectory_id=trajectory.row.trajectory_id,
            worker=worker,
            reason=reason,
            losses=losses,
        )
        if losses < self._rules.placements_max:
            self.take_back(trajectory, now, outcome)
            return False
        self.release(trajectory)
        detail = f"{losses} workers lost it, the last one {worker}: {reason}"
        trajectory.row = failed(trajectory.row, FailureKind.WORKER_LOST, detail)
        return True

    def expired(
        self, trajectories: Iterable[Trajectory], now: float
    ) -> list[tuple[Trajectory, str]]:
        """What its worker does not report, or does not get on with, and which of the two."""
        found: list[tuple[Trajectory, str]] = []
        for trajectory in trajectories:
            if not trajectory.running:
                continue
            if trajectory.lease_until <= now:
                found.append((trajectory, "lease_expired"))
            elif trajectory.since + self._rules.turn_timeout_s <= now:
                found.append((trajectory, "turn_timeout"))
        self.fleet.forget(silent_since=now - FORGOTTEN_AFTER_LEASES * self._rules.lease_s)
        return found

    def place_waiting(
        self, in_line: Sequence[Group], step: int, lineage: int, now: float, outcome: Outcome
    ) -> None:
        """Place what can be placed, in the order in which it will be trained."""
        views = self.fleet.views(heard_since=now - self._rules.lease_s)
        for rank, group in enumerate(in_line, start=1):
            if not views:
                return
            if group.row.state != GroupState.RUNNING:
                continue
            for trajectory in group.trajectories:
                if trajectory.row.state != TrajectoryState.WAITING:
                    continue
                begun = trajectory.row.oldest_version != NO_VERSION
                oldest = oldest_step_allowed(self._rules, step=step, rank=1 if begun else rank)
                need = Need(self.fleet.expected_tokens(trajectory), lineage, oldest)
                worker = place(self._policy, need, list(views.values()))
                if worker is not None:
                    self._give(trajectory, worker, now)
                    outcome.rows.append(trajectory.row)
                    outcome.orders.append(Assign(worker.peer, group.row, trajectory.row))
                    _reserve(views, worker, need.kv_tokens)

    def _give(self, trajectory: Trajectory, worker: WorkerView, now: float) -> None:
        trajectory.row = replace(
            trajectory.row,
            state=TrajectoryState.RUNNING.value,
            lease=trajectory.row.lease + 1,
            worker=worker.peer,
            placed_version=worker.version,
        )
        trajectory.lease_until = now + self._rules.lease_s
        trajectory.since = now
        self.fleet.hold(trajectory)


def _reserve(views: dict[str, WorkerView], worker: WorkerView, kv_tokens: int) -> None:
    """Count a placement, so that the next one sees it."""
    if worker.slots_free == 1:
        del views[worker.peer]
        return
    views[worker.peer] = replace(
        worker,
        slots_free=worker.slots_free - 1,
        kv_tokens_expected=worker.kv_tokens_expected + kv_tokens,
    )
