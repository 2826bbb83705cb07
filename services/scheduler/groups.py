"""Tasks and their groups: admitted in order, closed when all members ended, tried again or not."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.accuracy import Accuracy
from services.scheduler.leases import Leases
from services.scheduler.line import Line, key_of
from services.scheduler.records import (
    ALIVE,
    DecisionKind,
    GroupRecord,
    GroupRow,
    GroupState,
    Past,
    Snapshot,
    TaskRow,
    TaskState,
    TrajectoryRow,
    TrajectoryState,
)
from services.scheduler.rules import Rules
from services.scheduler.state import Group, Outcome, Trajectory
from services.scheduler.tasks import TaskOrder
from services.scheduler.turns import grow_route

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
        self._line = Line()
        self._needy = Line()
        self._by_state: dict[str, dict[str, Group]] = {state.value: {} for state in ALIVE}
        self.trajectories: dict[str, Trajectory] = {}
        self.changes = 0
        """Grows whenever a group is admitted or changes its state."""
        self.failure = ""
        """Why the run cannot go on, or empty."""
        self.counts: Counter[str] = Counter()
        """What happened since the last recorded step; names as in `metrics.jsonl`."""
        self.accuracy = Accuracy()
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
        self._admitted_at_failure = 0
        """Groups that were ever admitted when the last failure was counted."""
        for record in snapshot.alive:
            group = Group.of(record, now)
            for trajectory in group.trajectories:
                _recall(trajectory, snapshot.past.get(trajectory.row.trajectory_id, Past()), rules)
            self._add(group, now)

    def _add(self, group: Group, now: float) -> None:
        self.changes += 1
        self.alive[group.row.group_id] = group
        self._by_state[group.row.state][group.row.group_id] = group
        for trajectory in group.trajectories:
            self.trajectories[trajectory.row.trajectory_id] = trajectory
            if not trajectory.row.ended:
                trajectory.route.waiting_since = now
                self._leases.policy.begin(trajectory.route)
                self._leases.resume(trajectory, now)
        self._leases.touched[group.row.group_id] = None

    @property
    def tasks_left(self) -> int:
        """Tasks that wait for their first or next group, over all epochs."""
        return len(self._retries) + self._order.length - self._place

    # ── indexes ──────────────────────────────────────────────────────────────────────────────

    def in_line(self) -> Line:
        """Living groups in the order in which they must be trained at the latest."""
        self._settle()
        return self._line

    def needy(self) -> Line:
        """Those of which a member is on no worker."""
        self._settle()
        return self._needy

    def in_state(self, state: GroupState) -> list[Group]:
        """Living groups of one state, in order of admission."""
        return sorted(self._by_state[state.value].values(), key=lambda group: group.row.admission)

    def count(self, state: GroupState) -> int:
        """How many living groups are in one state."""
        return len(self._by_state[state.value])

    def _settle(self) -> None:
        """Put groups that changed where they belong now."""
        touched = self._leases.touched
        for group_id in touched:
            group = self.alive.get(group_id)
            if group is None:
                continue
            waiting = TrajectoryState.WAITING
            group.waiting = sum(t.row.state == waiting for t in group.trajectories)
            key = key_of(group)
            if key != group.key:
                self._line.discard(group)
                self._needy.discard(group)
                group.key = key
            self._line.add(group)
            if group.waiting:
                self._needy.add(group)
            else:
                self._needy.discard(group)
        touched.clear()

    def _set(self, group: Group, row: GroupRow) -> None:
        """Give a living group another state."""
        self.changes += 1
        del self._by_state[group.row.state][row.group_id]
        if row.state in self._by_state:
            self._by_state[row.state][row.group_id] = group
        group.row = row
        self._leases.touched[row.group_id] = None

    # ── from admission to the end ────────────────────────────────────────────────────────────

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
        self._add(Group.of(GroupRecord(row, members), now), now)
        task_row = TaskRow(epoch, task_id, TaskState.ADMITTED.value, attempt + 1)
        outcome.rows += [task_row, row, *members]

    def end(self, trajectory: Trajectory, now: float, outcome: Outcome) -> None:
        """The trajectory has its result; the last one of a group closes the group."""
        row = trajectory.row
        assert row.ended
        self._leases.release(trajectory)
        self._leases.policy.end(trajectory.route, finished=row.usable)
        if row.usable:
            self.accuracy.note(trajectory.predicted, row.action_tokens)
        outcome.rows.append(row)
        reason = row.failure or row.stop_reason or ""
        self._leases.record(DecisionKind.ENDED, trajectory, now, outcome, reason)
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
        self._set(group, replace(group.row, state=GroupState.READY.value))
        outcome.rows.append(group.row)

    def _fail(self, group: Group, outcome: Outcome) -> None:
        detail = next(
            (f"{t.row.failure}: {t.row.detail}" for t in group.trajectories if t.row.failure), ""
        )
        self.drop(group, "failed", outcome, detail=detail)
        # A lost tool server fails all groups that run at that moment: that is one failure. Only a
        # group admitted after the last counted one shows that the cause is still there.
        if group.row.admission <= self._admitted_at_failure:
            return
        self._admitted_at_failure = self._admissions
        self._failed_in_row += 1
        if self._failed_in_row >= self._rules.failed_groups_max and not self.failure:
            self.failure = (
                f"{self._failed_in_row} groups in a row failed, each admitted after the failure of "
                "the one before it, and none succeeded in between; "
                f"the last one, of task {group.row.task_id!r}, with: {detail or 'no message'}; "
                "mend the cause, then resume the run"
            )

    def drop(self, group: Group, reason: str, outcome: Outcome, *, detail: str = "") -> None:
        """Give the group up and its place back; its task is filtered, tried again, or parked."""
        for trajectory in group.trajectories:
            if not trajectory.row.ended:
                self._leases.release(trajectory)
                self._leases.policy.end(trajectory.route, finished=False)
                trajectory.row = replace(trajectory.row, state=TrajectoryState.DROPPED.value)
                outcome.rows.append(trajectory.row)
        self._set(group, replace(group.row, state=GroupState.DROPPED.value, reason=reason))
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
            self._set(group, row)
            outcome.rows.append(row)

    def train(self, groups: Sequence[Group], outcome: Outcome) -> None:
        """Their step is done; they and their tasks are, too."""
        for group in groups:
            row = replace(group.row, state=GroupState.TRAINED.value)
            self._set(group, row)
            task = TaskRow(row.epoch, row.task_id, TaskState.TRAINED.value, row.attempt + 1)
            outcome.rows += [row, task]
            self._forget(group)

    def _forget(self, group: Group) -> None:
        """Free the memory; the ledger has it all."""
        del self.alive[group.row.group_id]
        self._line.discard(group)
        self._needy.discard(group)
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
            group.row = replace(row, state=GroupState.READY.value, lineage=-1, step=0)
            outcome.rows.append(group.row)
            self._add(group, now)

    def make_ready(self, groups: Sequence[Group], outcome: Outcome) -> None:
        """Take groups back from the step that they were offered to."""
        for group in groups:
            self._set(group, replace(group.row, state=GroupState.READY.value, lineage=-1, step=0))
            outcome.rows.append(group.row)


def _recall(trajectory: Trajectory, past: Past, rules: Rules) -> None:
    """Tell a trajectory that goes on after a restart what it has behind it."""
    trajectory.decisions = past.decisions
    trajectory.route.moves = past.moves
    for turn in past.turns:
        grow_route(trajectory.route, turn, rules.payload_sizes)
        trajectory.turn_lease = turn.lease
