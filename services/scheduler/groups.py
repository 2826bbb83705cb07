"""Tasks and their groups: admitted in order, closed when all members ended, tried again or not."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.leases import Leases
from services.scheduler.records import (
    GroupRow,
    GroupState,
    Snapshot,
    TaskRow,
    TaskState,
    TrajectoryRow,
    TrajectoryState,
)
from services.scheduler.rules import Rules
from services.scheduler.state import Group, Outcome, Trajectory
from services.scheduler.tasks import TaskOrder

REWARD_TOLERANCE = 1e-8
"""Rewards that differ by less are equal: dividing by such a spread makes advantages of noise."""
FILTER_REASONS = ("zero_variance", "incomplete_batch")
"""Groups dropped for these are done with: sampling the task again would not help the run."""


class Groups:
    """All living groups; those that were trained or dropped are only counted."""

    def __init__(
        self, rules: Rules, order: TaskOrder, leases: Leases, snapshot: Snapshot, *, now: float
    ) -> None:
        self._rules = rules
        self._order = order
        self._leases = leases
        self.alive: dict[str, Group] = {}
        self.trajectories: dict[str, Trajectory] = {}
        self.failure = ""
        """Why the run cannot go on, or empty."""
        self.counts: Counter[str] = Counter()
        """What happened since the last recorded step; names as in `metrics.jsonl`."""
        self.filtered_rewards: list[float] = []
        """Of the groups that were dropped for having equal ones, since the last recorded step."""
        self.ended_groups = Counter(
            {
                GroupState.TRAINED.value: snapshot.groups_trained,
                GroupState.DROPPED.value: snapshot.groups_dropped,
            }
        )
        self.ended_trajectories = Counter(snapshot.trajectories_ended)
        self._place = snapshot.tasks_seen
        self._retries = deque(snapshot.retries)
        self._admissions = snapshot.admissions
        self._failed_in_row = 0
        for record in snapshot.alive:
            self._add(Group.of(record, now), now)

    def _add(self, group: Group, now: float) -> None:
        self.alive[group.row.group_id] = group
        for trajectory in group.trajectories:
            self.trajectories[trajectory.row.trajectory_id] = trajectory
            self._leases.resume(trajectory, now)

    @property
    def tasks_left(self) -> int:
        """Tasks that wait for their first or next group, over all epochs."""
        return len(self._retries) + self._order.length - self._place

    @property
    def any_waiting(self) -> bool:
        """Whether a trajectory is on no worker."""
        waiting = TrajectoryState.WAITING
        return any(t.row.state == waiting for t in self.trajectories.values())

    def in_line(self) -> list[Group]:
        """Living groups in the order in which they must be trained at the latest."""
        return sorted(
            self.alive.values(), key=lambda g: (not g.taken, g.oldest_step, g.row.admission)
        )

    def in_state(self, state: GroupState) -> list[Group]:
        """Living groups of one state, in order of admission."""
        found = [group for group in self.alive.values() if group.row.state == state]
        return sorted(found, key=lambda group: group.row.admission)

    def admit(self, now: float, outcome: Outcome) -> None:
        """Begin a group of the next task; those to be tried again come first."""
        if self._retries:
            task = self._retries.popleft()
            epoch, task_id, attempt = task.epoch, task.task_id, task.attempts
        else:
            epoch, task_id = self._order.at(self._place)
            attempt = 0
            self._place += 1
        self._admissions += 1
        # Named by the task's id, never by its text: equal prompts are still different tasks.
        group_id = f"{task_id}.e{epoch}.a{attempt}"
        row = GroupRow(
            group_id, task_id, epoch, attempt, self._admissions, GroupState.RUNNING.value
        )
        members = [
            TrajectoryRow(f"{group_id}.{number}", group_id, number, TrajectoryState.WAITING.value)
            for number in range(self._rules.group_size)
        ]
        self._add(Group(row, [Trajectory(member, since=now) for member in members]), now)
        task_row = TaskRow(epoch, task_id, TaskState.ADMITTED.value, attempt + 1)
        outcome.rows += [task_row, row, *members]

    def end(self, trajectory: Trajectory, outcome: Outcome) -> None:
        """The trajectory has its result; the last one of a group closes the group."""
        row = trajectory.row
        assert row.ended
        self._leases.release(trajectory)
        outcome.rows.append(row)
        if row.failure is not None:
            self.counts[f"rollout/failed/{row.failure}"] += 1
            outcome.warn(
                "trajectory.failed",
                trajectory_id=row.trajectory_id,
                reason=row.failure,
                detail=row.detail,
            )
        group = self.alive[row.group_id]
        if group.ended:
            self._close(group, outcome)

    def _close(self, group: Group, outcome: Outcome) -> None:
        rewards = [row.reward for row in group.usable if row.reward is not None]
        if len(rewards) < self._rules.group_usable_min:
            self._fail(group, outcome)
            return
        self._failed_in_row = 0
        self.counts["groups/closed"] += 1
        if self._rules.filters_zero_variance and max(rewards) - min(rewards) <= REWARD_TOLERANCE:
            self.counts["groups/zero_variance"] += 1
            self.filtered_rewards += rewards
            self.drop(group, "zero_variance", outcome)
            return
        group.row = replace(group.row, state=GroupState.READY.value)
        outcome.rows.append(group.row)

    def _fail(self, group: Group, outcome: Outcome) -> None:
        detail = next(
            (f"{t.row.failure}: {t.row.detail}" for t in group.trajectories if t.row.failure), ""
        )
        self.drop(group, "failed", outcome, detail=detail)
        self._failed_in_row += 1
        if self._failed_in_row >= self._rules.failed_groups_max and not self.failure:
            self.failure = (
                f"{self._failed_in_row} groups in a row failed and none succeeded in between; "
                f"the last one, of task {group.row.task_id!r}, with: {detail or 'no message'}; "
                "mend the cause, then resume the run"
            )

    def drop(self, group: Group, reason: str, outcome: Outcome, *, detail: str = "") -> None:
        """Give the group up and its place back; its task is filtered, tried again, or parked."""
        for trajectory in group.trajectories:
            if not trajectory.row.ended:
                self._leases.release(trajectory)
                trajectory.row = replace(trajectory.row, state=TrajectoryState.DROPPED.value)
                outcome.rows.append(trajectory.row)
        group.row = replace(group.row, state=GroupState.DROPPED.value, reason=reason)
        outcome.rows += [group.row, self._task_after_drop(group.row, reason, detail, outcome)]
        self.counts[f"groups/dropped/{reason}"] += 1
        self._forget(group)

    def _task_after_drop(
        self, row: GroupRow, reason: str, detail: str, outcome: Outcome
    ) -> TaskRow:
        attempts = row.attempt + 1
        if reason in FILTER_REASONS:
            return TaskRow(row.epoch, row.task_id, TaskState.FILTERED.value, attempts, reason)
        if attempts < self._rules.attempts_max:
            task = TaskRow(row.epoch, row.task_id, TaskState.RETRY.value, attempts, reason)
            self._retries.append(task)
            return task
        self.counts["tasks/parked"] += 1
        outcome.warn(
            "task.parked",
            task_id=row.task_id,
            epoch=row.epoch,
            attempts=attempts,
            reason=reason,
            detail=detail,
        )
        return TaskRow(row.epoch, row.task_id, TaskState.PARKED.value, attempts, reason)

    def take(self, group_ids: Sequence[str], lineage: int, step: int, outcome: Outcome) -> None:
        """Offer groups to one step."""
        for group_id in group_ids:
            group = self.alive[group_id]
            row = replace(group.row, state=GroupState.TAKEN.value, lineage=lineage, step=step)
            group.row = row
            outcome.rows.append(row)

    def train(self, groups: Sequence[Group], outcome: Outcome) -> None:
        """Their step is done; they and their tasks are, too."""
        for group in groups:
            row = replace(group.row, state=GroupState.TRAINED.value)
            group.row = row
            task = TaskRow(row.epoch, row.task_id, TaskState.TRAINED.value, row.attempt + 1)
            outcome.rows += [row, task]
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Free the memory; the ledger has it all."""
        del self.alive[group.row.group_id]
        self.ended_groups[group.row.state] += 1
        for trajectory in group.trajectories:
            del self.trajectories[trajectory.row.trajectory_id]
            self.ended_trajectories[trajectory.row.state] += 1

    def recall(self, groups: Sequence[Group], now: float, outcome: Outcome) -> None:
        """Make trained groups ready again, because their step is forgotten."""
        for group in groups:
            self.ended_groups[group.row.state] -= 1
            for trajectory in group.trajectories:
                self.ended_trajectories[trajectory.row.state] -= 1
            row = group.row
            outcome.rows.append(
                TaskRow(row.epoch, row.task_id, TaskState.ADMITTED.value, row.attempt + 1)
            )
            self._add(group, now)
        self.make_ready(groups, outcome)

    def make_ready(self, groups: Sequence[Group], outcome: Outcome) -> None:
        """Take groups back from the step that they were offered to."""
        for group in groups:
            group.row = replace(group.row, state=GroupState.READY.value, lineage=-1, step=0)
            outcome.rows.append(group.row)
