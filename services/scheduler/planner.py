"""Names the split of the hybrid slots that makes the run fastest: pure, one step after the other.

A change is worth it when what it gains in the steps until the next change is more than it costs.
Gains are foreseen from noisy measurements, so a change must promise a share of the step and more
than steps differ anyway, and one that takes back the last change twice that share; after each
there is a hold, twice as long after each reversal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isinf

from services.scheduler.splits import (
    Costs,
    Forecast,
    Split,
    StepMeasure,
    compare_speed,
    forecast,
    learn,
    under,
)

STEPS_MIN = 2
"""Measured before anything is decided."""
REVERSAL = 2.0
"""So many times `gain_min` must a change promise that takes back the last one."""
NOISE_MAX = 0.1
"""By which noise raises what a change must promise; more is a change of the run itself."""
HOLD_DOUBLINGS_MAX = 6
INTERVALS_PRIOR = 4
"""Holds until the next change, before any change was seen."""
UNDONE_MAX = 4
"""Holds after which an order that nobody carries out is forgotten."""
REMEMBERED_HOLDS = 16
"""So long it is remembered what a split came to, while the run's work stays the same."""
SAME_WORK = 1.3
"""Work that is so many times as much, or less, is not the same."""


class Reason(StrEnum):
    """Why a split is kept or changed."""

    MOVING = "moving"
    """Slots are between two sides."""
    LEARNING = "learning"
    """Too few steps have been measured."""
    HELD = "held"
    """The last change is too recent."""
    BEST = "best"
    """No other split is faster."""
    GAIN_SMALL = "gain_small"
    COST = "cost"
    """The change costs more than it gains until the next one."""
    BETTER = "better"
    """Another split is worth the change."""


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What the run has and wants, from its configuration."""

    hybrid: int
    """Slots that may change sides."""
    fixed: int
    """Rollout workers that never do."""
    hold_steps: int
    gain_min: float
    switch_s: float
    """Of one slot, until one has been measured."""
    replica_speed: float = 1.0
    """Of one replica in shares of the core's, until measured."""
    rollout_min: int = 0
    """Hybrid slots that must roll out: no other worker takes the longest contexts."""
    overlapped: bool = True
    """Rollouts go on while the trainer trains."""

    def splits(self) -> list[Split]:
        """All that are allowed, the fewest replicas first."""
        return [Split(n, self.hybrid - n) for n in range(self.hybrid - self.rollout_min + 1)]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a split came to while it was in force."""

    split: Split
    step: int
    """Its last one."""
    step_s: float
    train_work_s: float
    rollout_work_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A change of the split, and what became of it so far."""

    source: Split
    target: Split
    before_s: float
    """A step before."""
    foreseen_s: float
    """A step after, as foreseen."""
    train_token_s: float
    """Seconds of training per token before."""
    steps: int = 0
    step_s: float = 0.0
    train_s: float = 0.0
    train_tokens: float = 0.0
    """Sums since."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a change has brought."""

    source: Split
    target: Split
    foreseen_gain_s: float
    measured_gain_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision with what it was made from."""

    step: int
    split: Split
    """In force."""
    target: Split
    """The same, or the one that is worth a change."""
    reason: Reason
    forecasts: Sequence[Forecast] = ()
    """Of all splits that were weighed."""
    gain_s: float = 0.0
    """Of the best one, a step."""
    gain_share: float = 0.0
    needed_share: float = 0.0
    horizon_steps: float = 0.0
    """Expected until the next change."""
    cost_s: float = 0.0
    verdict: Verdict | None = None
    """On the last change, once it has been measured."""


@dataclass(frozen=True, slots=True)
class PlannerState:
    """All that the planner remembers."""

    costs: Costs
    since: int
    """The step after which the split in force has begun, or the planner."""
    started: int
    """The step after which the planner has begun."""
    changes: int = 0
    direction: int = 0
    """Of the last change: 1 towards training, -1 towards rollouts."""
    reversals: int = 0
    """Changes in a row that took back the one before."""
    ordered: Split | None = None
    """Named and not in force yet."""
    ordered_step: int = 0
    trial: Trial | None = None
    memories: tuple[Memory, ...] = ()
    """Of splits that were in force before, one each."""
    train_token_s: float = 0.0
    """Of the last settled step."""


def begin(split: Split, step: int, rules: PlanRules) -> PlannerState:
    """Know nothing but the split in force after `step`."""
    return PlannerState(Costs(split, rules.replica_speed), since=step, started=step)


def order_placed(state: PlannerState, plan: Plan) -> PlannerState:
    """Somebody carries the plan out from now on."""
    return replace(state, ordered=plan.target, ordered_step=plan.step)


def put_off(state: PlannerState, step: int) -> PlannerState:
    """The order was refused: keep what is, and hold."""
    return replace(state, ordered=None, since=step)


def advance(
    state: PlannerState, measure: StepMeasure, rules: PlanRules
) -> tuple[PlannerState, Plan]:
    """Take in one step and decide. Whoever carries the plan out says `order_placed`."""
    if not measure.settled:
        return state, _keep(measure, Reason.MOVING)
    if measure.split != state.costs.split:
        state = _changed(state, measure, rules)
    costs = learn(state.costs, measure, fixed=rules.fixed, overlapped=rules.overlapped)
    state = replace(state, costs=costs)
    state, verdict = _tried(state, measure, rules)
    if measure.train_tokens > 0:
        state = replace(state, train_token_s=measure.train_s / measure.train_tokens)
    plan = _decide(state, measure, rules)
    return state, replace(plan, verdict=verdict)


# ── changes that have happened ───────────────────────────────────────────────────────────────


def _changed(state: PlannerState, measure: StepMeasure, rules: PlanRules) -> PlannerState:
    """Another split is in force, whoever wanted it."""
    known, split = state.costs, measure.split
    direction = 1 if split.train > known.split.train else -1
    reversed_ = state.direction == -direction
    foreseen = forecast(known, split, fixed=rules.fixed, overlapped=rules.overlapped)
    trial = Trial(
        source=known.split,
        target=split,
        before_s=known.step_s.value,
        foreseen_s=foreseen.step_s,
        train_token_s=state.train_token_s,
    )
    return replace(
        state,
        costs=under(known, split),
        since=measure.step - 1,
        changes=state.changes + 1,
        direction=direction,
        reversals=min(HOLD_DOUBLINGS_MAX, state.reversals + 1) if reversed_ else 0,
        ordered=None if state.ordered == split else state.ordered,
        trial=trial if known.measured >= STEPS_MIN else None,
        memories=_remembered(state, measure.step - 1),
    )


def _remembered(state: PlannerState, step: int) -> tuple[Memory, ...]:
    """With the split that has just been left, if it was measured more than once."""
    costs = state.costs
    if costs.step_s.weight <= 1:
        return state.memories
    left = Memory(costs.split, step, costs.step_s.value, costs.train_work_s, costs.rollout_work_s)
    return (*(memory for memory in state.memories if memory.split != left.split), left)


def _tried(
    state: PlannerState, measure: StepMeasure, rules: PlanRules
) -> tuple[PlannerState, Verdict | None]:
    """Count a step for the trial; after a hold, say what it has brought."""
    if state.trial is None:
        return state, None
    trial = replace(
        state.trial,
        steps=state.trial.steps + 1,
        step_s=state.trial.step_s + measure.step_s,
        train_s=state.trial.train_s + measure.train_s,
        train_tokens=state.trial.train_tokens + measure.train_tokens,
    )
    if trial.steps < rules.hold_steps:
        return replace(state, trial=trial), None
    after_s = trial.step_s / trial.steps
    costs = state.costs
    if trial.train_token_s > 0 and trial.train_s > 0:
        ratio = trial.train_token_s * trial.train_tokens / trial.train_s
        costs = compare_speed(costs, trial.source, ratio)
    verdict = Verdict(
        source=trial.source,
        target=trial.target,
        foreseen_gain_s=trial.before_s - trial.foreseen_s,
        measured_gain_s=trial.before_s - after_s,
        before_s=trial.before_s,
        after_s=after_s,
    )
    return replace(state, trial=None, costs=costs), verdict


# ── the decision ─────────────────────────────────────────────────────────────────────────────


def _keep(measure: StepMeasure, reason: Reason) -> Plan:
    return Plan(measure.step, measure.split, measure.split, reason)


def _decide(state: PlannerState, measure: StepMeasure, rules: PlanRules) -> Plan:
    hold_steps = rules.hold_steps * 2**state.reversals
    if state.ordered is not None and measure.step - state.ordered_step < UNDONE_MAX * hold_steps:
        return _keep(measure, Reason.MOVING)
    if not _known(state.costs):
        return _keep(measure, Reason.LEARNING)
    plan = _weigh(state, measure, rules)
    reason = _objection(plan, held=measure.step - state.since < hold_steps)
    return replace(plan, target=plan.split, reason=reason) if reason else plan


def _known(costs: Costs) -> bool:
    smoothed = (costs.train_s, costs.needed_tokens, costs.made_tokens, costs.busy_s)
    return costs.measured >= STEPS_MIN and all(s.value > 0 for s in smoothed)


def _objection(plan: Plan, *, held: bool) -> Reason | None:
    """Why the plan's target is not worth a change, if so."""
    if plan.target == plan.split:
        return Reason.BEST
    if held:
        return Reason.HELD
    if plan.gain_share < plan.needed_share:
        return Reason.GAIN_SMALL
    if plan.gain_s * plan.horizon_steps <= plan.cost_s:
        return Reason.COST
    return None


def _weigh(state: PlannerState, measure: StepMeasure, rules: PlanRules) -> Plan:
    """The fastest split, and what changing to it would gain and cost.

    Among equally fast ones that with the fewest changes, then with the fewest replicas.
    """
    now = _foresee(state, measure, measure.split, rules)
    forecasts = [_foresee(state, measure, split, rules) for split in rules.splits()]
    best = min(
        [now, *forecasts],
        key=lambda f: (f.step_s, abs(f.split.train - now.split.train), f.split.train),
    )
    gain_s = now.step_s - best.step_s if best.step_s < now.step_s else 0.0  # Both may be inf.
    direction = 1 if best.split.train > now.split.train else -1
    opposite = direction == -state.direction
    return Plan(
        step=measure.step,
        split=now.split,
        target=best.split,
        reason=Reason.BETTER,
        forecasts=forecasts,
        gain_s=gain_s,
        gain_share=1.0 if isinf(gain_s) else gain_s / now.step_s,
        needed_share=rules.gain_min * (REVERSAL if opposite else 1.0)
        + min(NOISE_MAX, state.costs.noise.value),
        horizon_steps=_horizon_steps(state, measure, rules),
        cost_s=_cost_s(state.costs, now, best, measure.switch_s, rules),
    )


def _foresee(state: PlannerState, measure: StepMeasure, split: Split, rules: PlanRules) -> Forecast:
    """By the model, unless the split was in force lately and came to worse: no mistake twice."""
    costs = state.costs
    foreseen = forecast(costs, split, fixed=rules.fixed, overlapped=rules.overlapped)
    since = measure.step - REMEMBERED_HOLDS * rules.hold_steps
    for memory in state.memories:
        known = memory.split == split != costs.split and memory.step >= since
        if known and memory.step_s > foreseen.step_s and _same_work(costs, memory):
            return replace(foreseen, step_s=memory.step_s)
    return foreseen


def _same_work(costs: Costs, memory: Memory) -> bool:
    pairs = (
        (costs.train_work_s, memory.train_work_s),
        (costs.rollout_work_s, memory.rollout_work_s),
    )
    return all(now < SAME_WORK * then and then < SAME_WORK * now for now, then in pairs)


def _horizon_steps(state: PlannerState, measure: StepMeasure, rules: PlanRules) -> float:
    """Steps until the next change: as between those so far, and never past the end."""
    prior = INTERVALS_PRIOR * rules.hold_steps
    passed = measure.step - state.started
    expected = (prior + passed) / (1 + state.changes)
    return min(float(measure.steps_left), max(float(rules.hold_steps), expected))


def _cost_s(
    costs: Costs, now: Forecast, best: Forecast, switch_s: float | None, rules: PlanRules
) -> float:
    """Of the slots that change, one after the other: meanwhile each works for neither side.

    At least the slot's own share of the machine, although the losing side may have time to spare:
    work that is handed back is partly done again.
    """
    moved = abs(best.split.train - now.split.train)
    if not moved:
        return 0.0
    if best.split.train > now.split.train:
        without = Split(now.split.train, now.split.rollout - 1)
    else:
        without = Split(now.split.train - 1, now.split.rollout)
    slower = forecast(costs, without, fixed=rules.fixed, overlapped=rules.overlapped)
    slowed = slower.step_s / now.step_s - 1
    share = 1 / (1 + rules.fixed + rules.hybrid)
    each_s = rules.switch_s if switch_s is None else switch_s
    return moved * each_s * min(1.0, max(share, slowed))
