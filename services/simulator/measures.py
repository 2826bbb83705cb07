"""What one run shows: counted while it runs, summed up at its end, checked all the way."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

from common.messages.scheduler import TurnFinished
from common.weights import step_of
from services.scheduler.records import (
    GroupRow,
    GroupState,
    Row,
    TrajectoryRow,
    TrajectoryState,
)
from services.scheduler.routing.route import Route
from services.scheduler.state import Assign
from services.simulator.scripts import Script, Scripts
from services.simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run in figures. Seconds are virtual unless they are called real."""

    policy: str
    seed: int
    makespan_s: float
    """Until the last step was recorded."""
    tokens_per_s: float
    """Tokens sampled by all engines, over the makespan."""
    trained_tokens_per_s: float
    """Sampled tokens of what was trained, over the makespan."""
    trajectory_p50_s: float
    """From the first placement to the result."""
    trajectory_p99_s: float
    waiting_p50_s: float
    """From admission to the first placement."""
    waiting_p99_s: float
    moved_share: float
    """Context tokens that moved between workers, over the context tokens at the end of all
    trajectories. A trajectory that moves twice counts twice, so it can pass 1."""
    moved_share_of_generated: float
    """The same over the sampled tokens."""
    moves: int
    moves_kv: int
    """Those whose cache came along."""
    routing_accuracy: float
    """Share of tool returns at which the bucket of the length that was last expected (the median;
    the present length, where the policy never expects one) is that of the length at the end."""
    placement_accuracy: float
    """Share of tool returns after which it is in the bucket of its length at the end."""
    idle: dict[str, float]
    """Share of the makespan in which the engines of a bucket had nothing to do."""
    preemptions: int
    prefill_tokens: int
    step_p50_s: float
    step_max_s: float
    trainer_idle: float
    """Share of the makespan in which the trainer waited for a batch."""
    staleness_mean: float
    staleness_max: int
    steps: int
    trajectories: int
    cut: int
    """Trajectories that ended at the cluster's longest context instead of by themselves."""
    turns: int
    iterations: int
    """Of all engines."""
    events: int
    real_s: float
    """Of processor time: what the run takes on a core that it has for itself."""
    trace: str
    """Equal for runs in which everything happened equally."""

    @property
    def events_per_s(self) -> float:
        """Real speed of the simulation."""
        return self.events / max(1e-9, self.real_s)

    def to_json(self) -> dict[str, Any]:
        """Nested plain values."""
        return {**asdict(self), "events_per_s": self.events_per_s}


@dataclass(slots=True)
class Measures:
    """Sees all rows and all turns of one run."""

    timeline: Timeline
    scripts: Scripts
    bounds: Sequence[int]
    """Longest context of each bucket but the last, shortest first."""
    bucket_of: dict[str, int]
    """Place among the buckets, by worker's peer."""
    staleness_max_allowed: int
    admitted_at: dict[str, float] = field(default_factory=dict[str, float])
    placed_at: dict[str, float] = field(default_factory=dict[str, float])
    trajectory_s: list[float] = field(default_factory=list[float])
    waiting_s: list[float] = field(default_factory=list[float])
    staleness: Counter[int] = field(default_factory=Counter[int])
    moved_tokens: int = 0
    moves: int = 0
    paths: Counter[str] = field(default_factory=Counter[str])
    returns: int = 0
    returns_expected: int = 0
    returns_placed: int = 0
    turns: int = 0
    context_tokens: int = 0
    """Of trajectories at their ends."""
    output_tokens: int = 0
    trained_tokens: int = 0
    expected: dict[str, int] = field(default_factory=dict[str, int])
    """Context at its end as last expected, at the median, by trajectory; of policies that expect
    one."""
    trained: dict[str, int] = field(default_factory=dict[str, int])
    """Step of each trained group."""
    ended: dict[str, TrajectoryRow] = field(default_factory=dict[str, TrajectoryRow])
    _hasher: Any = field(default_factory=lambda: blake2b(digest_size=12))

    def rows(self, rows: list[Row]) -> None:
        """The book has written rows."""
        for row in rows:
            if type(row) is TrajectoryRow:
                if row.ended:
                    self._ended(row)
            elif type(row) is GroupRow:
                self._group(row)

    def _group(self, row: GroupRow) -> None:
        if row.state == GroupState.RUNNING:
            self.admitted_at[row.group_id] = self.timeline.now
        elif row.state == GroupState.TRAINED:
            self._group_trained(row)
        elif row.state == GroupState.DROPPED:
            self._forget(row.group_id)

    def _group_trained(self, row: GroupRow) -> None:
        assert row.group_id not in self.trained, f"{row.group_id} was trained twice"
        self.trained[row.group_id] = row.step
        for script in self.scripts.group(row.group_id):
            trajectory = self.ended.get(script.trajectory_id)
            if trajectory is None or trajectory.state != TrajectoryState.FINISHED:
                continue
            assert trajectory.turns == len(script.trace.turns), trajectory
            assert trajectory.context_tokens == script.final_context_tokens, trajectory
            self.trained_tokens += trajectory.action_tokens
            stale = max(0, row.step - 1 - step_of(trajectory.oldest_version))
            assert stale <= self.staleness_max_allowed, trajectory
            self.staleness[stale] += 1
        self._forget(row.group_id)

    def _forget(self, group_id: str) -> None:
        self.admitted_at.pop(group_id, None)
        for script in self.scripts.group(group_id):
            self.ended.pop(script.trajectory_id, None)
            self.placed_at.pop(script.trajectory_id, None)
            self.expected.pop(script.trajectory_id, None)
        self.scripts.forget(group_id)

    def _ended(self, row: TrajectoryRow) -> None:
        assert row.trajectory_id not in self.ended, f"{row.trajectory_id} ended twice"
        self.ended[row.trajectory_id] = row
        placed_at = self.placed_at.get(row.trajectory_id, self.timeline.now)
        self.trajectory_s.append(self.timeline.now - placed_at)
        self.context_tokens += row.context_tokens
        self.output_tokens += row.action_tokens

    def placed(self, order: Assign, route: Route | None) -> None:
        """One that waited is on its way to a worker."""
        self._note_expected(route)
        row, now = order.trajectory, self.timeline.now
        self._hasher.update(
            b"%s %s %.6f\n" % (row.trajectory_id.encode(), order.peer.encode(), now)
        )
        if row.turns and order.kv_source != order.peer:
            self.moved(row)
        if row.trajectory_id not in self.placed_at:
            self.placed_at[row.trajectory_id] = now
            self.waiting_s.append(now - self.admitted_at[row.group_id])

    def returned(self, turn: TurnFinished, script: Script, route: Route | None, peer: str) -> None:
        """A turn was recorded; the route, if there is one, has the decision after it."""
        self.turns += 1
        self._hasher.update(
            b"%s %d %s %.6f\n"
            % (turn.trajectory_id.encode(), turn.turn, peer.encode(), self.timeline.now)
        )
        if turn.move is not None:
            self.paths[turn.move.path] += 1
        if turn.result is not None or route is None:
            return
        self._note_expected(route)
        final = bisect_left(self.bounds, script.final_context_tokens)
        expected = self.expected.get(route.trajectory_id, route.context_tokens)
        self.returns += 1
        self.returns_expected += bisect_left(self.bounds, expected) == final
        self.returns_placed += self.bucket_of.get(route.worker or peer, -1) == final

    def _note_expected(self, route: Route | None) -> None:
        """What was expected at the start counts until something else is.

        Policies give the mean of the lengths that they hold possible, which costs are made of. The
        bucket is that of the median: a few very long ones pull the mean over a border that most
        stay below.
        """
        if route is None or route.residual is None:
            return
        context, residual = route.context_tokens, route.residual
        median = residual.p50 / residual.mean if residual.mean > 0 else 1.0
        growth = (route.kv_expected - context) * median
        self.expected[route.trajectory_id] = context + round(growth)

    def moved(self, row: TrajectoryRow) -> None:
        """A move was taken by its target."""
        self.moves += 1
        self.moved_tokens += row.context_tokens

    @property
    def trace(self) -> str:
        """Digest of all placements and turns, with their moments."""
        return self._hasher.hexdigest()


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share does not exceed; 0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
