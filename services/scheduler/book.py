"""The scheduler's memory and all its decisions, changed by events.

Built from a snapshot of the ledger, so that a restart takes the same path as a start. Every method
is given the time and returns what is to be written, sent and said; none waits, reads a clock or
does I/O. What an event changes here is in the rows of the same outcome, so the ledger and this
object tell the same story at every moment.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import (
    BatchOffer,
    ReportWorker,
    StepFinished,
    StepRecorded,
    TurnFinished,
)
from services.scheduler.admission import groups_admissible
from services.scheduler.batches import Candidate, choose_batch
from services.scheduler.groups import Groups
from services.scheduler.leases import Leases
from services.scheduler.metrics import early_warnings, step_metrics
from services.scheduler.records import (
    GroupRecord,
    GroupState,
    Snapshot,
    StepRow,
)
from services.scheduler.rules import Rules
from services.scheduler.state import Assign, Group, Lineage, Outcome, Trajectory
from services.scheduler.status import waiting_for
from services.scheduler.tasks import TaskOrder
from services.scheduler.turns import after_turn, check_turn, turn_row


class Book:
    """See the module. Attributes are for reading."""

    def __init__(self, rules: Rules, order: TaskOrder, snapshot: Snapshot, *, now: float) -> None:
        self.rules = rules
        self.leases = Leases(rules)
        self.groups = Groups(rules, order, self.leases, snapshot, now=now)
        self.lineage = Lineage.of(snapshot.meta)
        self.step = self.lineage.begun_at
        """Optimizer steps in the surviving history."""
        self.attempt = 0
        """Attempts at the next step that were skipped."""
        self.last_metrics: dict[str, float] = json.loads(snapshot.last_metrics or "{}")
        self._step_at = now
        last = snapshot.last_step
        if last is not None and last.lineage == self.lineage.number:
            self.step = last.step - 1 if last.skipped else last.step
            self.attempt = last.attempt + 1 if last.skipped else 0

    @property
    def lineage_number(self) -> int:
        """-1 until a trainer has begun one."""
        return self.lineage.number

    @property
    def finished(self) -> bool:
        """Whether the last step is recorded."""
        return self.step >= self.rules.max_steps

    @property
    def exhausted(self) -> bool:
        """Whether no batch can become complete any more."""
        states = Counter(group.row.state for group in self.groups.alive.values())
        return (
            self.groups.tasks_left == 0
            and states[GroupState.RUNNING] == 0
            and states[GroupState.READY] < self.rules.groups_per_step
        )

    # ── workers ──────────────────────────────────────────────────────────────────────────────

    def worker_reported(
        self, peer: str, name: str, report: ReportWorker, now: float
    ) -> tuple[list[str], Outcome]:
        """Note the load and renew the leases; returns what the worker must let go."""
        outcome = Outcome()
        self.leases.fleet.report(peer, name, report, now)
        return self.leases.renew(peer, report, self.groups.trajectories, now, outcome), outcome

    def worker_gone(self, peer: str, now: float) -> Outcome:
        """The worker's process is gone; what it held goes on elsewhere."""
        outcome = Outcome()
        for trajectory in self.leases.fleet.remove(peer):
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
        worker = self.leases.fleet.workers.get(order.peer)
        if worker is not None:
            worker.draining = True
        trajectory = self.groups.trajectories.get(order.trajectory.trajectory_id)
        if trajectory is None or not trajectory.running:
            return outcome
        if trajectory.row.lease != order.trajectory.lease:
            return outcome
        if lost:
            self._lose(trajectory, "refused", now, outcome, detail=reason)
            return outcome
        self.leases.take_back(trajectory, now, outcome)
        outcome.tell(
            "trajectory.returned",
            trajectory_id=trajectory.row.trajectory_id,
            worker=order.peer,
            reason=reason,
        )
        return outcome

    def expire(self, now: float) -> Outcome:
        """Take back what workers do not report or do not get on with."""
        outcome = Outcome()
        for trajectory, reason in self.leases.expired(self.groups.trajectories.values(), now):
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
        self.groups.counts[f"trajectories/lost/{reason}"] += 1
        if self.leases.lose(trajectory, detail or reason, now, outcome):
            self.groups.end(trajectory, outcome)

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
        if self.leases.fleet.has_room and self.groups.any_waiting:
            in_line = self.groups.in_line()
            self.leases.place_waiting(in_line, self.step, self.lineage.number, now, outcome)
        return outcome

    def turn_finished(self, peer: str, turn: TurnFinished, now: float) -> tuple[bool, Outcome]:
        """Journal a turn; returns whether the worker goes on with the trajectory.

        Raises:
            RequestRefused: `NOT_FOUND`, `STALE_FENCE` or `INVALID`.
        """
        trajectory = self.groups.trajectories.get(turn.trajectory_id)
        if trajectory is None:
            raise RequestRefused(Refusal.NOT_FOUND, f"{turn.trajectory_id} is not wanted any more")
        row = trajectory.row
        if turn.lease != row.lease or peer != row.worker:
            raise RequestRefused(
                Refusal.STALE_FENCE,
                f"{turn.trajectory_id} has lease {row.lease} at {row.worker or 'no worker'}",
            )
        check_turn(turn, row)
        outcome = Outcome()
        if turn.turn < row.turns:  # Said twice: the same answer.
            return not row.ended, outcome
        if row.ended:
            raise RequestRefused(Refusal.NOT_FOUND, f"{turn.trajectory_id} has ended")
        self.leases.adopt(trajectory, now, outcome)
        trajectory.since = now
        trajectory.row = after_turn(trajectory.row, turn)
        outcome.rows.append(turn_row(turn))
        if not trajectory.row.ended:
            outcome.rows.append(trajectory.row)
            return True, outcome
        self.leases.fleet.learn_length(trajectory.row.context_tokens)
        self.groups.end(trajectory, outcome)
        return False, outcome

    # ── the trainer ──────────────────────────────────────────────────────────────────────────

    def take_batch(self, lineage: int, step: int, now: float) -> tuple[BatchOffer, Outcome]:
        """Offer the groups of the next step, or say what is missing.

        The same step asked twice gets the same groups.

        Raises:
            RequestRefused: `STALE_FENCE` for another lineage or a step that is done, `INVALID`
                for one that is not next.
        """
        self._check_step(lineage, step)
        outcome = Outcome()
        taken = self.groups.in_state(GroupState.TAKEN)
        if taken:
            return _offer([group.row.group_id for group in taken]), outcome
        if self.groups.failure or self.finished:
            return _nothing(self.groups.failure, exhausted=True), outcome
        self._drop_stale(step, outcome)
        choice = choose_batch(self._candidates(), step=step, size=self.rules.groups_per_step)
        if choice.chosen:
            self.groups.take(choice.chosen, lineage, step, outcome)
            return _offer(choice.chosen), outcome
        if self.exhausted:
            for group in self.groups.in_state(GroupState.READY):
                self.groups.drop(group, "incomplete_batch", outcome)
            return _nothing("", exhausted=True), outcome
        return _nothing(waiting_for(self, now, choice.waits_for), exhausted=False), outcome

    def _check_step(self, lineage: int, step: int) -> None:
        if lineage != self.lineage.number:
            raise RequestRefused(
                Refusal.STALE_FENCE, f"lineage {lineage} is not {self.lineage.number}"
            )
        if step <= self.step:
            raise RequestRefused(Refusal.STALE_FENCE, f"step {step} is done")
        if step > self.step + 1:
            raise RequestRefused(Refusal.INVALID, f"step {self.step + 1} comes before {step}")

    def _drop_stale(self, step: int, outcome: Outcome) -> None:
        """Drop what is too old; only a bound tightened between two starts leaves any.

        Otherwise admission, placement and `choose_batch` keep every group within the bound.
        """
        for group in self.groups.in_line():
            if self._last_step(group) < step:
                outcome.warn("group.expired", group_id=group.row.group_id, step=step)
                self.groups.drop(group, "stale", outcome)

    def _last_step(self, group: Group) -> float:
        """The last step that may train the group; inf while nothing of it has begun."""
        return group.oldest_step + self.rules.max_staleness_steps + 1

    def _candidates(self) -> list[Candidate]:
        beyond = (self.rules.max_staleness_steps + 1) * self.rules.groups_per_step
        return [
            Candidate(
                group_id=group.row.group_id,
                last_step=self._last_step(group),
                admission=group.row.admission,
                ready=group.row.state == GroupState.READY,
                blocked=group.unbegun and rank > beyond,
            )
            for rank, group in enumerate(self.groups.in_line(), start=1)
        ]

    def step_finished(
        self, finished: StepFinished, extra: Mapping[str, float], now: float
    ) -> tuple[StepRecorded, Outcome]:
        """Record an attempt at a step: its groups are trained, or dropped with the reason.

        Args:
            finished: what the trainer says.
            extra: further metrics for the row.
            now: loop time.

        Raises:
            RequestRefused: as `take_batch`; `INVALID` also for groups that were not offered.
        """
        outcome = Outcome()
        attempt = (finished.step, finished.attempt)
        if finished.lineage == self.lineage.number and attempt < (self.step + 1, self.attempt):
            return self._recorded(), outcome  # Said twice.
        self._check_step(finished.lineage, finished.step)
        taken = self.groups.in_state(GroupState.TAKEN)
        if sorted(finished.group_ids) != sorted(group.row.group_id for group in taken):
            raise RequestRefused(Refusal.INVALID, "these are not the groups of this step")
        if finished.skipped:
            for group in taken:
                self.groups.drop(group, finished.skipped, outcome)
            self.groups.counts[f"steps/skipped/{finished.skipped}"] += 1
            self.attempt = finished.attempt + 1
            outcome.rows.append(_step_row(finished, ""))
            outcome.warn("step.skipped", step=finished.step, reason=finished.skipped)
        else:
            self._train(taken, finished, extra, now, outcome)
        return self._recorded(), outcome

    def _train(
        self,
        taken: Sequence[Group],
        finished: StepFinished,
        extra: Mapping[str, float],
        now: float,
        outcome: Outcome,
    ) -> None:
        rows = [row for group in taken for row in group.usable]
        passed_s = now - self._step_at
        metrics = step_metrics(
            finished,
            rows,
            self.groups.counts,
            filtered_rewards=self.groups.filtered_rewards,
            passed_s=passed_s,
        )
        metrics |= {**extra, **finished.metrics}
        self.groups.train(taken, outcome)
        self.groups.counts.clear()
        self.groups.filtered_rewards.clear()
        self.step, self.attempt, self._step_at = finished.step, 0, now
        self.last_metrics = metrics
        outcome.line = json.dumps(metrics)
        outcome.rows.append(_step_row(finished, outcome.line))
        outcome.tell(
            "step.finished",
            step=finished.step,
            reward=metrics.get("reward/mean"),
            staleness=metrics.get("staleness/max"),
            trajectories=len(rows),
        )
        for warning in early_warnings(metrics, step=finished.step):
            outcome.warn(warning.event, key=warning.key, share=round(warning.share, 3))

    def _recorded(self) -> StepRecorded:
        if self.groups.failure:
            return StepRecorded(stop=True, reason=self.groups.failure)
        return StepRecorded(stop=self.finished, reason="max_steps" if self.finished else "")

    def begin_lineage(
        self,
        trainer: str,
        step: int,
        later: tuple[Sequence[GroupRecord], Sequence[StepRow]],
        now: float,
    ) -> Outcome:
        """A trainer goes on from the state after `step`; later steps are forgotten.

        Asked again by the same trainer, nothing changes. `self.lineage` is the answer.

        Args:
            trainer: its identity.
            step: the step that its state includes.
            later: groups and steps of the ledger after `step`.
            now: loop time.

        Raises:
            RequestRefused: `INVALID` when the ledger has never heard of that step.
        """
        outcome = Outcome()
        if trainer == self.lineage.trainer:
            return outcome
        taken = self.groups.in_state(GroupState.TAKEN)
        if step == self.step + 1 and taken:
            # It saved the step and died before it could say so. The weights include these groups.
            self.groups.train(taken, outcome)
            outcome.rows.append(self._untold_step(taken))
            outcome.warn("step.recovered", step=step)
        elif step > self.step:
            raise RequestRefused(
                Refusal.INVALID,
                f"the trainer's state is of step {step}, but this run has done {self.step}; "
                "resume with the checkpoint of this run directory",
            )
        else:
            self.groups.make_ready(taken, outcome)
            groups, steps = later
            self.groups.recall([Group.of(record, now) for record in groups], now, outcome)
            outcome.rows += [replace(row, forgotten=1) for row in steps]
        self.lineage = Lineage(self.lineage.number + 1, step, trainer)
        self.step, self.attempt, self._step_at = step, 0, now
        outcome.rows += self.lineage.rows()
        outcome.tell("lineage.begun", lineage=self.lineage.number, step=step, trainer=trainer)
        return outcome

    def _untold_step(self, taken: Sequence[Group]) -> StepRow:
        ids = json.dumps([group.row.group_id for group in taken])
        return StepRow(self.lineage.number, self.step + 1, self.attempt, "", ids, "")


def _offer(group_ids: Sequence[str]) -> BatchOffer:
    return BatchOffer(group_ids=list(group_ids), waiting_for="", exhausted=False)


def _nothing(waiting_for: str, *, exhausted: bool) -> BatchOffer:
    return BatchOffer(group_ids=[], waiting_for=waiting_for, exhausted=exhausted)


def _step_row(finished: StepFinished, metrics: str) -> StepRow:
    return StepRow(
        lineage=finished.lineage,
        step=finished.step,
        attempt=finished.attempt,
        skipped=finished.skipped,
        group_ids=json.dumps(finished.group_ids),
        metrics=metrics,
    )
