"""The scheduler's memory and all its decisions, changed by events.

Built from a snapshot of the ledger, so that a restart takes the same path as a start. Every method
is given the time and returns what is to be written, sent and said; none waits, reads a clock or
does I/O. What an event changes here is in the rows of the same outcome, so the ledger and this
object tell the same story at every moment. Where a trajectory runs is the policy's to say.
"""

from collections.abc import Mapping, Sequence

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import (
    BatchOffer,
    ReportWorker,
    StepFinished,
    StepRecorded,
    TurnFinished,
)
from services.scheduler.admission import groups_admissible, oldest_step_allowed
from services.scheduler.groups import Groups
from services.scheduler.leases import Leases
from services.scheduler.measures import measure_turn
from services.scheduler.moves import Moves
from services.scheduler.records import DecisionKind, GroupRecord, Snapshot, StepRow
from services.scheduler.reports import check_report
from services.scheduler.routing.policy import Decision, Policy
from services.scheduler.rules import Rules
from services.scheduler.state import Assign, Lineage, Outcome, Trajectory, TurnReply
from services.scheduler.status import waiting_for
from services.scheduler.steps import Steps
from services.scheduler.tasks import TaskOrder
from services.scheduler.turns import (
    after_turn,
    check_turn,
    end_route,
    grow_route,
    turn_row,
    turn_sizes,
)


class Book:
    """See the module. Attributes are for reading."""

    def __init__(
        self,
        rules: Rules,
        order: TaskOrder,
        snapshot: Snapshot,
        policy: Policy,
        *,
        now: float,
        wall_offset_s: float = 0.0,
    ) -> None:
        """Take over where the ledger stands.

        Args:
            rules: limits and sizes.
            order: all tasks in the order of their admission.
            snapshot: of the ledger.
            policy: says where trajectories run; nobody else may drive it.
            now: loop time.
            wall_offset_s: what to add to the loop time for the wall clock, in seconds since 1970.
        """
        self.rules = rules
        self._bucket_names = [bucket.name for bucket in rules.buckets]
        self.leases = Leases(rules, policy, wall_offset_s=wall_offset_s)
        self.groups = Groups(rules, order, self.leases, snapshot, now=now)
        self.steps = Steps(rules, self.groups, snapshot, now=now)
        self._moves = Moves(self.leases, self.groups.counts)

    @property
    def lineage(self) -> Lineage:
        """The history that the trainer is in."""
        return self.steps.lineage

    @property
    def step(self) -> int:
        """Optimizer steps in the surviving history."""
        return self.steps.step

    @property
    def attempt(self) -> int:
        """Attempts at the next step that were skipped."""
        return self.steps.attempt

    @property
    def last_metrics(self) -> dict[str, float]:
        """The newest row of `metrics.jsonl`."""
        return self.steps.last_metrics

    @property
    def finished(self) -> bool:
        """Whether the last step is recorded."""
        return self.steps.finished

    @property
    def exhausted(self) -> bool:
        """Whether no batch can become complete any more."""
        return self.steps.exhausted

    # ── workers ──────────────────────────────────────────────────────────────────────────────

    def worker_reported(
        self, peer: str, name: str, report: ReportWorker, now: float, *, member: bool = True
    ) -> tuple[list[str], Outcome]:
        """Note the load and renew the leases; returns what the worker must let go.

        Args:
            peer: the worker.
            name: for people.
            report: what it says.
            now: loop time.
            member: whether it can be sent anything. If not, it keeps what it holds and gets
                nothing until `worker_joined`.

        Raises:
            RequestRefused: `INVALID`.
        """
        fleet = self.leases.fleet
        check_report(report, self._bucket_names, fleet.workers.get(peer))
        outcome = Outcome()
        fleet.report(peer, name, report, now)
        if not member:
            fleet.refuse(peer)
        return self.leases.renew(peer, report, self.groups.trajectories, now, outcome), outcome

    def worker_joined(self, peer: str) -> None:
        """It is a member now; fine when it has not reported yet."""
        self.leases.fleet.welcome(peer)

    def worker_gone(self, peer: str, now: float) -> Outcome:
        """The worker's process is gone; what it held goes on elsewhere."""
        outcome = Outcome()
        for route in self.leases.fleet.remove(peer):
            trajectory = self.groups.trajectories.get(route.trajectory_id)
            if trajectory is not None:  # An earlier loss may have dropped the whole group.
                self._lose(trajectory, "worker_gone", now, outcome)
        return outcome

    def assignment_failed(self, order: Assign, reason: str, now: float, *, lost: bool) -> Outcome:
        """The worker did not take the trajectory, and gets nothing until it reports again.

        Args:
            order: what was sent.
            reason: in the worker's own words where it has said something.
            now: loop time.
            lost: it would be refused again, so it counts as a worker lost and not as a wait.
        """
        outcome = Outcome()
        self.leases.fleet.refuse(order.peer)
        trajectory = self._still(order)
        if trajectory is None:
            return outcome
        if lost:
            self._lose(trajectory, "refused", now, outcome, detail=reason)
            return outcome
        self.leases.take_back(trajectory, reason, now, outcome)
        outcome.tell(
            "trajectory.returned",
            trajectory_id=trajectory.row.trajectory_id,
            worker=order.peer,
            reason=reason,
        )
        return outcome

    def _still(self, order: Assign) -> Trajectory | None:
        """The trajectory, if the order is its newest placement and nothing has ended it."""
        trajectory = self.groups.trajectories.get(order.trajectory.trajectory_id)
        if trajectory is None or not trajectory.running:
            return None
        return trajectory if trajectory.row.lease == order.trajectory.lease else None

    def expire(self, now: float) -> Outcome:
        """Take back what workers do not report or do not get on with."""
        outcome = Outcome()
        for trajectory, reason in self.leases.expired(now):
            if trajectory.running:  # An earlier loss may have dropped the whole group.
                self._lose(trajectory, reason, now, outcome)
        return outcome

    def _lose(
        self,
        trajectory: Trajectory,
        reason: str,
        now: float,
        outcome: Outcome,
        detail: str = "",
    ) -> None:
        if trajectory.moving_from and self._moves.roll_back(trajectory, reason, now, outcome):
            return
        self.groups.counts[f"trajectories/lost/{reason}"] += 1
        if self.leases.lose(trajectory, detail or reason, now, outcome):
            self.groups.end(trajectory, now, outcome)

    def advance(self, now: float) -> Outcome:
        """Admit what may be admitted and place what can be placed."""
        outcome = Outcome()
        if self.finished or self.groups.failure or self.lineage.number < 0:
            return outcome
        admissible = groups_admissible(
            self.rules,
            step=self.step,
            alive=len(self.groups.alive),
            tasks_left=self.groups.tasks_left,
        )
        for _ in range(admissible):
            self.groups.admit(now, outcome)
        needy = self.groups.needy()
        if needy:
            line = self.groups.in_line()
            outcome.add(self.leases.place_waiting(needy, line, self.step, self.lineage.number, now))
        return outcome

    # ── turns and moves ──────────────────────────────────────────────────────────────────────

    def turn_finished(self, peer: str, turn: TurnFinished, now: float) -> tuple[TurnReply, Outcome]:
        """Journal a turn; returns whether the worker goes on with the trajectory, or a move.

        A turn that is said again while its move is under way must wait for the end of the move.

        Raises:
            RequestRefused: `NOT_FOUND`, `STALE_FENCE` or `INVALID`.
        """
        trajectory = self.groups.trajectories.get(turn.trajectory_id)
        if trajectory is None:
            raise RequestRefused(Refusal.NOT_FOUND, f"{turn.trajectory_id} is not wanted any more")
        row = trajectory.row
        if peer != row.worker or turn.lease != row.lease:
            return self._said_before(trajectory, peer, turn), Outcome()
        check_turn(turn, row)
        if turn.turn < row.turns:  # Said twice: the same answer.
            go_on = not (row.ended or trajectory.handed_back)
            return TurnReply(go_on, row.lease if go_on else 0), Outcome()
        if row.ended:
            raise RequestRefused(Refusal.NOT_FOUND, f"{turn.trajectory_id} has ended")
        return self._journal(trajectory, turn, now)

    def _said_before(self, trajectory: Trajectory, peer: str, turn: TurnFinished) -> TurnReply:
        """A turn under an older lease: from before a move that was rolled back, or stale."""
        row = trajectory.row
        newest = turn.turn == row.turns - 1 and turn.lease == trajectory.turn_lease
        if newest and peer == row.worker and trajectory.running:
            return TurnReply(go_on=True, lease=row.lease)
        raise RequestRefused(
            Refusal.STALE_FENCE,
            f"{turn.trajectory_id} has lease {row.lease} at {row.worker or 'no worker'}",
        )

    def _journal(
        self, trajectory: Trajectory, turn: TurnFinished, now: float
    ) -> tuple[TurnReply, Outcome]:
        outcome = Outcome()
        self.leases.adopt(trajectory, now, outcome)
        sizes = turn_sizes(turn)
        measure_turn(trajectory, turn, sizes, self.leases, self.groups.counts)
        first = not trajectory.row.turns
        trajectory.since, trajectory.turn_lease = now, turn.lease
        trajectory.row = after_turn(trajectory.row, turn, sizes)
        outcome.rows.append(turn_row(turn))
        if trajectory.row.ended:
            end_route(trajectory.route, sizes)
            self.leases.fleet.learn_length(trajectory.row.context_tokens)
            self.groups.end(trajectory, now, outcome)
            return TurnReply(go_on=False), outcome
        if first:
            self.leases.touched[trajectory.row.group_id] = None
        grow_route(trajectory.route, sizes, self.rules.payload_sizes)
        self.leases.fleet.recount(trajectory.route)
        return self._route(trajectory, now, outcome), outcome

    def _route(self, trajectory: Trajectory, now: float, outcome: Outcome) -> TurnReply:
        """A tool has returned: stay, move, or wait."""
        row, leases = trajectory.row, self.leases
        worker = leases.fleet.workers[row.worker]
        if worker.heard:
            oldest = oldest_step_allowed(self.rules, step=self.step, rank=1)
            terms = leases.terms(oldest, self.lineage.number, now)
            decision = leases.policy.returned(trajectory.route, leases.fleet, terms)
        else:  # After a restart: nothing is known of it yet, nor of the others.
            decision = Decision(row.worker, "unheard", kv_expected=trajectory.route.kv_expected)
        if decision is None:
            leases.hand_back(trajectory, "draining" if worker.draining else "full", now, outcome)
            return TurnReply(go_on=False)
        if decision.peer != row.worker:
            group = self.groups.alive[row.group_id]
            move = self._moves.reserve(trajectory, group, decision, now, outcome)
            return TurnReply(go_on=False, move=move)
        leases.expect(trajectory, decision)
        leases.fleet.recount(trajectory.route)
        outcome.rows.append(row)
        leases.record(DecisionKind.STAYED, trajectory, now, outcome, decision)
        return TurnReply(go_on=True, lease=row.lease)

    def move_accepted(self, order: Assign, now: float) -> tuple[TurnReply, Outcome]:
        """The target of a move has the trajectory; returns what its source is told."""
        outcome = Outcome()
        trajectory = self._still(order)
        if trajectory is not None and trajectory.moving_from:
            trajectory.lease_until = now + self.rules.lease_s
            self._moves.commit(trajectory, outcome)
        return self._end_of_move(order), outcome

    def move_refused(self, order: Assign, reason: str, now: float) -> tuple[TurnReply, Outcome]:
        """The target did not take it, or has not said so in time; returns what its source is told.

        The rows must be durable before the source hears it.
        """
        outcome = Outcome()
        self.leases.fleet.refuse(order.peer)
        trajectory = self._still(order)
        if trajectory is not None and trajectory.moving_from:
            self._lose(trajectory, reason, now, outcome)
        return self._end_of_move(order), outcome

    def _end_of_move(self, order: Assign) -> TurnReply:
        """Whatever has happened meanwhile: the source goes on if it is the holder again."""
        trajectory = self.groups.trajectories.get(order.trajectory.trajectory_id)
        if trajectory is None or not trajectory.running:
            return TurnReply(go_on=False)
        row = trajectory.row
        if row.worker != order.kv_source or row.turns != order.trajectory.turns:
            return TurnReply(go_on=False)
        return TurnReply(go_on=True, lease=row.lease)

    # ── the trainer ──────────────────────────────────────────────────────────────────────────

    def take_batch(self, lineage: int, step: int, now: float) -> tuple[BatchOffer, Outcome]:
        """Offer the groups of the next step, or say what is missing.

        The same step asked twice gets the same groups.

        Raises:
            RequestRefused: `STALE_FENCE` for another lineage or a step that is done, `INVALID`
                for one that is not next.
        """
        offer, waits_for, outcome = self.steps.take_batch(lineage, step)
        if not offer.group_ids and not offer.exhausted:
            text = waiting_for(self, now, waits_for)
            offer = offer.model_copy(update={"waiting_for": text})
        return offer, outcome

    def step_finished(
        self, finished: StepFinished, extra: Mapping[str, float], now: float
    ) -> tuple[StepRecorded, Outcome]:
        """See `Steps.step_finished`."""
        return self.steps.step_finished(finished, extra, now)

    def begin_lineage(
        self,
        trainer: str,
        step: int,
        later: tuple[Sequence[GroupRecord], Sequence[StepRow]],
        now: float,
    ) -> Outcome:
        """See `Steps.begin_lineage`."""
        return self.steps.begin_lineage(trainer, step, later, now)

    @property
    def lineage_number(self) -> int:
        """-1 until a trainer has begun one."""
        return self.lineage.number
