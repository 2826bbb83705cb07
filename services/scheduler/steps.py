"""The trainer's half of the book: which groups a step gets, and what becomes of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import BatchOffer, StepFinished, StepRecorded
from services.scheduler.batches import Candidate, choose_batch
from services.scheduler.groups import Groups
from services.scheduler.metrics import early_warnings, step_metrics
from services.scheduler.records import GroupRecord, GroupState, Snapshot, StepRow
from services.scheduler.rules import Rules
from services.scheduler.state import Group, Lineage, Outcome


class Steps:
    """The history of optimizer steps. Attributes are for reading."""

    def __init__(self, rules: Rules, groups: Groups, snapshot: Snapshot, *, now: float) -> None:
        self.rules = rules
        self.groups = groups
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
    def finished(self) -> bool:
        """Whether the last step is recorded."""
        return self.step >= self.rules.max_steps

    @property
    def exhausted(self) -> bool:
        """Whether no batch can become complete any more."""
        return (
            self.groups.tasks_left == 0
            and self.groups.count(GroupState.RUNNING) == 0
            and self.groups.count(GroupState.READY) < self.rules.groups_per_step
        )

    def take_batch(self, lineage: int, step: int) -> tuple[BatchOffer, Sequence[str], Outcome]:
        """Offer the groups of the next step, or name those that it must wait for.

        The same step asked twice gets the same groups.

        Raises:
            RequestRefused: `STALE_FENCE` for another lineage or a step that is done, `INVALID`
                for one that is not next.
        """
        self._check_step(lineage, step)
        outcome = Outcome()
        taken = self.groups.in_state(GroupState.TAKEN)
        if taken:
            return _offer([group.row.group_id for group in taken]), (), outcome
        if self.groups.failure or self.finished:
            return _nothing(self.groups.failure, exhausted=True), (), outcome
        self._drop_stale(step, outcome)
        waits_for: Sequence[str] = ()
        if self.groups.count(GroupState.READY) >= self.rules.groups_per_step:
            choice = choose_batch(self._candidates(), step=step, size=self.rules.groups_per_step)
            if choice.chosen:
                self.groups.take(choice.chosen, lineage, step, outcome)
                return _offer(choice.chosen), (), outcome
            waits_for = choice.waits_for
        if self.exhausted:
            for group in self.groups.in_state(GroupState.READY):
                self.groups.drop(group, "incomplete_batch", outcome)
            return _nothing("", exhausted=True), (), outcome
        return _nothing("", exhausted=False), waits_for, outcome

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
        for group in list(takewhile(lambda g: self._last_step(g) < step, self.groups.in_line())):
            outcome.warn("group.expired", group_id=group.row.group_id, step=step)
            self.groups.drop(group, "stale", outcome)

    def _last_step(self, group: Group) -> float:
        """The last step that may train a group in line; inf while nothing of it has begun."""
        oldest_step = group.key[1]  # As `group.oldest_step`, which looks at every trajectory.
        return oldest_step + self.rules.max_staleness_steps + 1

    def _candidates(self) -> list[Candidate]:
        beyond = (self.rules.max_staleness_steps + 1) * self.rules.groups_per_step
        return [
            Candidate(
                group_id=group.row.group_id,
                last_step=self._last_step(group),
                admission=group.row.admission,
                ready=group.row.state == GroupState.READY,
                blocked=rank > beyond and group.unbegun,
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
        metrics |= {**self.groups.accuracy.take(), **extra, **finished.metrics}
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
