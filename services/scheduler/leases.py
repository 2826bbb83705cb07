"""Who holds which trajectory until when, and where a waiting one goes."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from common.messages.scheduler import ReportWorker
from common.trajectory import FailureKind
from common.weights import NO_VERSION
from services.scheduler.admission import oldest_step_allowed
from services.scheduler.decisions import decision_row
from services.scheduler.line import Line
from services.scheduler.records import DecisionKind, TrajectoryState
from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.policy import Decision, Policy
from services.scheduler.rules import Rules
from services.scheduler.state import Assign, Group, Outcome, Trajectory
from services.scheduler.turns import failed

FORGOTTEN_AFTER_LEASES = 10
"""A worker that holds nothing and says nothing for so many leases leaves the status, too."""
GROUPS_MISSED_MAX = 16
"""When no worker takes anything of so many groups in line, those behind them wait for the next
change: asking for thousands at every change would cost more than it finds."""


class Leases:
    """Moves trajectories between waiting and running. Does not know what becomes of them."""

    def __init__(self, rules: Rules, policy: Policy, *, wall_offset_s: float = 0.0) -> None:
        self._rules = rules
        self._wall_offset_s = wall_offset_s
        self._watched: list[tuple[float, int, Trajectory]] = []
        """Running trajectories by the earliest time at which they could expire: a heap."""
        self._watches = 0
        self.policy = policy
        self.fleet = Fleet(rules.buckets, rules.tokens_expected)
        self.touched: dict[str, None] = {}
        """Groups of which something changed that their place in line depends on."""

    # ── what a decision leaves ───────────────────────────────────────────────────────────────

    def record(
        self,
        kind: DecisionKind,
        trajectory: Trajectory,
        now: float,
        outcome: Outcome,
        why: Decision | str,
        source: str = "",
    ) -> None:
        """Write down what was decided, once the trajectory's row says so.

        Args:
            kind: what happened.
            trajectory: to what.
            now: loop time.
            outcome: gets the row.
            why: the policy's decision, or a reason in a word where nothing was decided.
            source: worker that had it; its present one by default.
        """
        decision = why if isinstance(why, Decision) else None
        if decision is not None and decision.residual is not None:
            trajectory.predicted.append((trajectory.row.action_tokens, decision.residual.p50))
        row = decision_row(
            kind,
            trajectory,
            now + self._wall_offset_s,
            source or trajectory.row.worker,
            why,
        )
        outcome.rows.append(row)
        trajectory.decisions += 1

    def terms(self, oldest_step: int, lineage: int, now: float) -> Terms:
        """What a worker must fulfil; silent ones get nothing new."""
        return Terms(now, now - self._rules.lease_s, lineage, oldest_step)

    def expect(self, trajectory: Trajectory, decision: Decision) -> None:
        """Take over what the policy thinks of the trajectory."""
        route = trajectory.route
        route.residual = decision.residual
        route.kv_expected = max(decision.kv_expected, route.context_tokens)

    # ── leases ───────────────────────────────────────────────────────────────────────────────

    def resume(self, trajectory: Trajectory, now: float) -> None:
        """After a restart its worker keeps it for a lease: if it reports it, it never stopped."""
        if trajectory.running:
            self.hold(trajectory, now)

    def hold(self, trajectory: Trajectory, now: float) -> None:
        """Count it as held by the worker that its row names, for a lease from now on."""
        peer = trajectory.row.worker
        name = peer.split("/")[2] if peer.count("/") == 3 else peer
        self.fleet.put(trajectory.route, peer, name)
        trajectory.lease_until = now + self._rules.lease_s
        trajectory.handed_back = False
        if not trajectory.watched:
            trajectory.watched = True
            self._watch(trajectory)

    def _watch(self, trajectory: Trajectory) -> None:
        self._watches += 1
        until = min(trajectory.lease_until, trajectory.since + self._rules.turn_timeout_s)
        heappush(self._watched, (until, self._watches, trajectory))

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
        lease_until = now + self._rules.lease_s
        for trajectory_id in report.holding:
            trajectory = trajectories.get(trajectory_id)
            if trajectory is None:
                drop.append(trajectory_id)
            elif trajectory.row.worker != peer:
                if trajectory.moving_from != peer:  # Else it waits to hear whether it goes on.
                    drop.append(trajectory_id)
            elif trajectory.running:
                trajectory.lease_until = lease_until
            elif trajectory.handed_back:
                drop.append(trajectory_id)
            elif not trajectory.row.ended:
                self.adopt(trajectory, now, outcome)
        if report.slots == 0:
            self._take_back_all(peer, set(report.holding), trajectories, now, outcome)
        return drop

    def _take_back_all(
        self,
        peer: str,
        held: Container[str],
        trajectories: Mapping[str, Trajectory],
        now: float,
        outcome: Outcome,
    ) -> None:
        """A draining worker hands back what it no longer holds: moved, not lost."""
        for trajectory_id in list(self.fleet.workers[peer].routes):
            trajectory = trajectories[trajectory_id]
            # One that is on its way to it will be refused, and goes back to where it was.
            if trajectory_id not in held and not trajectory.moving_from:
                self.take_back(trajectory, "draining", now, outcome)

    def adopt(self, trajectory: Trajectory, now: float, outcome: Outcome) -> None:
        """The holder of the newest lease works on it, also if it was thought lost meanwhile."""
        trajectory.lease_until = now + self._rules.lease_s
        if trajectory.row.state == TrajectoryState.WAITING:
            trajectory.row = replace(trajectory.row, state=TrajectoryState.RUNNING.value)
            trajectory.since = now
            self.hold(trajectory, now)
            self.touched[trajectory.row.group_id] = None
            outcome.rows.append(trajectory.row)

    def release(self, trajectory: Trajectory) -> None:
        """It ended or was dropped, so no worker holds it."""
        self.fleet.take(trajectory.route)
        trajectory.moving_from = ""
        trajectory.lease_until = inf
        self.touched[trajectory.row.group_id] = None

    def take_back(self, trajectory: Trajectory, reason: str, now: float, outcome: Outcome) -> None:
        """It waits for a worker again, and nobody is to blame."""
        self._wait(trajectory, now)
        outcome.rows.append(trajectory.row)
        self.record(DecisionKind.RETURNED, trajectory, now, outcome, reason)

    def hand_back(self, trajectory: Trajectory, reason: str, now: float, outcome: Outcome) -> None:
        """Its worker is told to stop, and it waits for another."""
        self.take_back(trajectory, reason, now, outcome)
        trajectory.handed_back = True

    def _wait(self, trajectory: Trajectory, now: float) -> None:
        self.release(trajectory)
        trajectory.row = replace(trajectory.row, state=TrajectoryState.WAITING.value)
        trajectory.since = trajectory.route.waiting_since = now

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
        last = losses >= self._rules.placements_max
        if last:
            self.release(trajectory)
            detail = f"{losses} workers lost it, the last one {worker}: {reason}"
            trajectory.row = failed(trajectory.row, FailureKind.WORKER_LOST, detail)
        else:
            self._wait(trajectory, now)
            outcome.rows.append(trajectory.row)
        self.record(DecisionKind.LOST, trajectory, now, outcome, reason)
        return last

    def expired(self, now: float) -> list[tuple[Trajectory, str]]:
        """What its worker does not report, or does not get on with, and which of the two."""
        found: list[tuple[Trajectory, str]] = []
        while self._watched and self._watched[0][0] <= now:
            trajectory = heappop(self._watched)[2]
            if not trajectory.running:
                trajectory.watched = False
            elif trajectory.lease_until <= now:
                found.append((trajectory, "lease_expired"))
            elif trajectory.since + self._rules.turn_timeout_s <= now:
                found.append((trajectory, "turn_timeout"))
            else:
                self._watch(trajectory)
        for trajectory, _ in found:
            trajectory.watched = False
        self.fleet.forget(silent_since=now - FORGOTTEN_AFTER_LEASES * self._rules.lease_s)
        return found

    # ── placement ────────────────────────────────────────────────────────────────────────────

    def place_waiting(
        self, needy: Iterable[Group], line: Line, step: int, lineage: int, now: float
    ) -> Outcome:
        """Place what can be placed, in the order in which it will be trained.

        Args:
            needy: groups with waiting members, in line.
            line: all groups.
            step: optimizer steps done.
            lineage: of the weights that may be used.
            now: loop time.
        """
        outcome = Outcome()
        missed = 0
        for group in needy:
            if missed >= GROUPS_MISSED_MAX or not self.fleet.has_room:
                break
            terms = self.terms(
                oldest_step_allowed(self._rules, step=step, rank=line.rank(group)), lineage, now
            )
            begun = self.terms(oldest_step_allowed(self._rules, step=step, rank=1), lineage, now)
            missed += not self._place_group(group, terms, begun, outcome)
        return outcome

    def _place_group(self, group: Group, terms: Terms, begun: Terms, outcome: Outcome) -> bool:
        """Whether anything was placed. Members that have not begun are alike: one None is all."""
        placed, alike = False, True
        for trajectory in group.trajectories:
            if trajectory.row.state != TrajectoryState.WAITING:
                continue
            has_begun = trajectory.row.oldest_version != NO_VERSION
            if not has_begun and not alike:
                continue
            decision = self.policy.place(
                trajectory.route, self.fleet, begun if has_begun else terms
            )
            if decision is not None:
                self._give(trajectory, group, decision, terms.now, outcome)
                placed = True
            elif not has_begun:
                alike = False
        return placed

    def _give(
        self, trajectory: Trajectory, group: Group, decision: Decision, now: float, outcome: Outcome
    ) -> None:
        last, peer = trajectory.row.worker, decision.peer
        source = self.fleet.workers.get(last) if trajectory.row.turns and last != peer else None
        self.assign(trajectory, decision, now)
        if last != peer:
            trajectory.came_from = source.bucket if source is not None else ""
            trajectory.cached_tokens = 0
        trajectory.since = now
        self.hold(trajectory, now)
        outcome.rows.append(trajectory.row)
        outcome.orders.append(
            Assign(peer, group.row, trajectory.row, source.peer if source is not None else "")
        )
        self.record(DecisionKind.PLACED, trajectory, now, outcome, decision, last)

    def assign(self, trajectory: Trajectory, decision: Decision, now: float) -> None:
        """Write a new placement into its row."""
        self.expect(trajectory, decision)
        trajectory.row = replace(
            trajectory.row,
            state=TrajectoryState.RUNNING.value,
            lease=trajectory.row.lease + 1,
            worker=decision.peer,
            placed_version=self.fleet.workers[decision.peer].version,
        )
        trajectory.lease_until = now + self._rules.lease_s
        self.touched[trajectory.row.group_id] = None
