"""Carries the planner's measurements to it, and its split to the coordinator."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import structlog

from common.config import Config
from common.errors import RequestRefused, TransportError
from common.membership import Membership
from common.messages.coordinator import Fleet, SetSplit, SlotStatus
from services.scheduler.planner import (
    Plan,
    PlannerState,
    PlanRules,
    Reason,
    Verdict,
    advance,
    begin,
    order_placed,
    put_off,
)
from services.scheduler.records import GroupState
from services.scheduler.rules import bucket_shapes
from services.scheduler.splits import Costs, Forecast, Split, StepMeasure
from services.scheduler.status import Standing

log = structlog.get_logger()

ORDER_TIMEOUT_S = 5.0
ABSENT_S = 60.0
"""A slot that has been between two sides for so long is on neither; the others go on."""
FILTERED_SHARE_MAX = 0.9
"""Of the groups of one step; where all are dropped, what a step needs is unknown."""
TRAIN, ROLLOUT = "train", "rollout"
ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The run at the end of a step."""

    slots: tuple[SlotStatus, ...]
    busy_s: Mapping[str, float]
    """By rollout worker, counted since the process began."""
    made_tokens: Mapping[str, int]
    """By name, counted since the process began."""
    metrics: Mapping[str, float]
    """The step's row."""
    ready_groups: int
    groups_per_step: int
    steps_left: int

    @property
    def split(self) -> Split:
        """Whose the slots are, or are becoming."""
        train = sum(slot.side == TRAIN for slot in self.slots)
        return Split(train, len(self.slots) - train)

    @property
    def switch_s(self) -> float | None:
        """Mean of the last change of each slot that has changed sides."""
        seconds = [s.drain_s + s.release_s + s.load_s for s in self.slots if s.switches]
        return sum(seconds) / len(seconds) if seconds else None


def snapshot(fleet: Fleet, book: Standing) -> Snapshot:
    """What counts of the fleet and the book."""
    return Snapshot(
        slots=tuple(fleet.slots),
        busy_s={m.member.peer: m.busy_s for m in fleet.members if m.member.role == ROLLOUT},
        made_tokens={w.name: w.decode_tokens for w in book.leases.fleet.statuses()},
        metrics=book.last_metrics,
        ready_groups=book.groups.count(GroupState.READY),
        groups_per_step=book.rules.groups_per_step,
        steps_left=book.rules.max_steps - book.step,
    )


def plan_rules(config: Config) -> PlanRules:
    """What the configuration says of the slots."""
    hybrid = [bucket for bucket in config.buckets if bucket.hybrid]
    fixed = [bucket for bucket in config.buckets if not bucket.hybrid]
    return PlanRules(
        hybrid=sum(bucket.workers for bucket in hybrid),
        fixed=sum(bucket.workers for bucket in fixed),
        hold_steps=config.elastic.hold_steps,
        gain_min=config.elastic.gain_min,
        switch_s=config.elastic.drain_timeout_s,
        replica_speed=1 / config.training.ranks,
        rollout_min=_rollout_min(config),
        overlapped=config.scheduler.max_staleness_steps > 0,
    )


def _rollout_min(config: Config) -> int:
    """Slots that must roll out so that the longest contexts find a worker.

    The coordinator lets slots train in the order of the configuration, so those from the last one
    of the longest bucket on must not.
    """
    longest = max(shape.context_tokens_max for shape in bucket_shapes(config))
    able = {s.name for s in bucket_shapes(config) if s.context_tokens_max == longest}
    if any(bucket.name in able and not bucket.hybrid for bucket in config.buckets):
        return 0
    slots = [b.name for b in config.buckets if b.hybrid for _ in range(b.workers)]
    last = max(number for number, name in enumerate(slots) if name in able)
    return len(slots) - last


class Planning:
    """The planner of one run; without hybrid slots it has nothing to do."""

    def __init__(self, membership: Membership, config: Config) -> None:
        self._membership = membership
        self._rules = plan_rules(config)
        self._acts = config.elastic.planner
        self._state: PlannerState | None = None
        self._last: Snapshot | None = None
        self._plan: Plan | None = None
        self._steps = 0
        """Counted here: those of the run go back with a new lineage."""
        self._asking = False

    @property
    def metrics(self) -> dict[str, float]:
        """For the row of the step that ends: the split in force, and what was foreseen of it."""
        if self._last is None or not self._last.slots:
            return {}
        split = self._last.split
        metrics: dict[str, float] = {
            "slots/train": split.train,
            "slots/rollout": split.rollout,
            "slots/switches": sum(slot.switches for slot in self._last.slots),
        }
        if self._plan is not None and self._plan.split == split:
            for forecast in self._plan.forecasts:
                if forecast.split == split and isfinite(forecast.step_s):
                    metrics["slots/step_foreseen_s"] = forecast.step_s
        return metrics

    def step_finished(self, fleet: Fleet, book: Standing, tasks: asyncio.TaskGroup) -> None:
        """Take in the step that the book has just recorded; order another split if it is worth it.

        Args:
            fleet: as the coordinator saw it last.
            book: for reading.
            tasks: where the order is carried out.
        """
        now = snapshot(fleet, book)
        before, self._last = self._last, now
        if not now.slots:
            return
        self._steps += 1
        if self._state is None or before is None or not before.slots:
            self._state = begin(now.split, self._steps, self._rules)
            return
        measure = step_measure(before, now, self._steps)
        self._state, self._plan = advance(self._state, measure, self._rules)
        _tell(self._plan, self._state.costs, measure, book.step)
        if self._plan.reason is Reason.BETTER and self._acts and not self._asking:
            self._asking = True
            tasks.create_task(self._carry_out(self._plan), name="set split")

    async def _carry_out(self, plan: Plan) -> None:
        """Order a split. Without an answer the next step decides anew."""
        assert self._state is not None
        order = SetSplit(train=plan.target.train, rollout=plan.target.rollout, by="planner")
        try:
            await self._membership.ask_coordinator(order, timeout_s=ORDER_TIMEOUT_S)
        except RequestRefused as error:
            self._state = put_off(self._state, plan.step)
            log.info("split.refused", reason=error.refusal.value, detail=str(error))
        except TransportError as error:
            log.warning("split.unordered", reason=type(error).__name__)
        else:
            self._state = order_placed(self._state, plan)
        finally:
            self._asking = False


def step_measure(before: Snapshot, now: Snapshot, step: int) -> StepMeasure:
    """A step between two looks at the run; `step` numbers it."""
    metrics = now.metrics
    trajectories = metrics.get("trajectories/trained", 0.0)
    filtered = min(FILTERED_SHARE_MAX, metrics.get("groups/zero_variance_share", 0.0))
    return StepMeasure(
        step=step,
        split=now.split,
        train_s=metrics.get("time/train", 0.0),
        wait_s=metrics.get("time/wait_batch", 0.0),
        step_s=metrics.get("time/step", 0.0),
        train_tokens=metrics.get("tokens/context_mean", 0.0) * trajectories,
        needed_tokens=metrics.get("tokens/trained", 0.0) / (1 - filtered),
        made_tokens=_grown(before.made_tokens, now.made_tokens),
        busy_s=_grown(before.busy_s, now.busy_s),
        steps_left=now.steps_left,
        settled=_settled(before.slots, now.slots),
        ready_groups=now.ready_groups,
        starved=before.ready_groups < now.groups_per_step,
        replica_share=_replica_share(metrics),
        switch_s=now.switch_s,
    )


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """What was added to counters; one that fell belongs to a process that is new."""
    return sum(
        value - before.get(name, 0.0) if value >= before.get(name, 0.0) else value
        for name, value in now.items()
    )


def _settled(before: Sequence[SlotStatus], now: Sequence[SlotStatus]) -> bool:
    """Whether no slot was between two sides, then, now or meanwhile."""
    stood = {slot.slot: (slot.side, slot.fence) for slot in before}
    return all(
        (slot.phase == ACTIVE or slot.phase_s > ABSENT_S)
        and stood.get(slot.slot) == (slot.side, slot.fence)
        for slot in now
    )


def _replica_share(metrics: Mapping[str, float]) -> float | None:
    """Share of a step's micro-batches that replicas have run."""
    theirs = metrics.get("replicas/micro_batches", 0.0)
    own = metrics.get("replicas/own_micro_batches")
    if own is None or theirs + own <= 0:
        return None
    return theirs / (theirs + own)


# ── what is told ─────────────────────────────────────────────────────────────────────────────


def _tell(plan: Plan, costs: Costs, measure: StepMeasure, step: int) -> None:
    """A change is news; that all stays as it is, is for who looks for it."""
    if plan.verdict is not None:
        log.info("split.measured", step=step, **_verdict(plan.verdict))
    report = log.info if plan.reason is Reason.BETTER else log.debug
    report(
        "split.planned",
        step=step,
        reason=plan.reason.value,
        train=plan.split.train,
        rollout=plan.split.rollout,
        target_train=plan.target.train,
        target_rollout=plan.target.rollout,
        gain_s=_rounded(plan.gain_s),
        gain_share=_rounded(plan.gain_share),
        needed_share=_rounded(plan.needed_share),
        horizon_steps=_rounded(plan.horizon_steps),
        cost_s=_rounded(plan.cost_s),
        alternatives=[_alternative(forecast) for forecast in plan.forecasts],
        inputs=_inputs(costs, measure),
    )


def _verdict(verdict: Verdict) -> dict[str, object]:
    return {
        "source": [verdict.source.train, verdict.source.rollout],
        "target": [verdict.target.train, verdict.target.rollout],
        "foreseen_gain_s": _rounded(verdict.foreseen_gain_s),
        "measured_gain_s": _rounded(verdict.measured_gain_s),
        "before_s": _rounded(verdict.before_s),
        "after_s": _rounded(verdict.after_s),
    }


def _alternative(forecast: Forecast) -> dict[str, float | None]:
    return {
        "train": forecast.split.train,
        "rollout": forecast.split.rollout,
        "train_s": _rounded(forecast.train_s),
        "rollout_s": _rounded(forecast.rollout_s),
        "step_s": _rounded(forecast.step_s),
    }


def _inputs(costs: Costs, measure: StepMeasure) -> dict[str, float | None]:
    """What the plan was made from, smoothed."""
    switch_s = measure.switch_s
    return {
        "step_s": _rounded(costs.step_s.value),
        "train_s": _rounded(costs.train_s.value),
        "overhead_s": _rounded(costs.overhead_s.value),
        "wait_share": _rounded(costs.wait_share.value),
        "latency_s": _rounded(costs.latency_s.value),
        "needed_tokens": _rounded(costs.needed_tokens.value),
        "token_cost_s": _rounded(costs.token_cost_s),
        "replica_speed": _rounded(costs.replica_speed),
        "noise": _rounded(costs.noise.value),
        "switch_s": None if switch_s is None else _rounded(switch_s),
        "ready_groups": measure.ready_groups,
        "steps_left": measure.steps_left,
    }


def _rounded(value: float) -> float | None:
    """Four figures; None where there is no number, which JSON does not have."""
    return float(f"{value:.4g}") if isfinite(value) else None
