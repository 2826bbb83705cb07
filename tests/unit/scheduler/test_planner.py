"""The planner against measurements of our own making, and in a closed loop with a toy run."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.planner import (
    Plan,
    PlannerState,
    PlanRules,
    Reason,
    advance,
    begin,
    order_placed,
    put_off,
)
from services.scheduler.splits import Split, StepMeasure

RULES = PlanRules(hybrid=4, fixed=2, hold_steps=4, gain_min=0.05, switch_s=2.0)


@dataclass
class ToyRun:
    """A run whose step times follow from its split: what the planner has to find out."""

    rules: PlanRules = RULES
    train_work_s: float = 8.0
    """Of the core alone."""
    rollout_work_s: float = 24.0
    """Worker-seconds."""
    latency_s: float = 0.5
    overhead_s: float = 0.2
    replica_speed: float = 0.7
    noise: float = 0.0
    half_empty: float = 1.0
    """How much busier workers are than they need be while the trainer holds them up."""
    split: Split = field(default_factory=lambda: Split(0, 4))
    counts_replicas: bool = True
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    step: int = 0
    steps_max: int = 1000
    plans: list[Plan] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    state: PlannerState | None = None

    def times(self, split: Split) -> tuple[float, float]:
        replicas, workers = split.train, self.rules.fixed + split.rollout
        train_s = self.train_work_s / (1 + self.replica_speed * replicas)
        return train_s, self.latency_s + self.rollout_work_s / max(1, workers)

    def step_s(self, split: Split) -> float:
        train_s, rollout_s = self.times(split)
        return max(train_s + self.overhead_s, rollout_s)

    def best_s(self) -> float:
        return min(map(self.step_s, self.rules.splits()))

    def measure(self) -> StepMeasure:
        train_s, rollout_s = (seconds * self._noise() for seconds in self.times(self.split))
        step_s = max(train_s + self.overhead_s, rollout_s)
        waits = rollout_s > train_s + self.overhead_s
        speed = self.replica_speed * self.split.train
        return StepMeasure(
            step=self.step,
            split=self.split,
            train_s=train_s,
            wait_s=step_s - train_s - self.overhead_s if waits else 0.0,
            step_s=step_s,
            train_tokens=self.train_work_s * 1000,
            needed_tokens=self.rollout_work_s * 500,
            made_tokens=self.rollout_work_s * 500 * self._noise(),
            busy_s=self.rollout_work_s * self._noise() * (1.0 if waits else self.half_empty),
            steps_left=self.steps_max - self.step,
            starved=waits,
            replica_share=speed / (1 + speed) if self.counts_replicas else None,
        )

    def run(self, steps: int, each: Callable[["ToyRun"], None] = lambda _run: None) -> None:
        self.state = self.state or begin(self.split, self.step, self.rules)
        for _ in range(steps):
            self.step += 1
            each(self)
            self.state, plan = advance(self.state, self.measure(), self.rules)
            self.plans.append(plan)
            if plan.target != plan.split:
                self.state = order_placed(self.state, plan)
                self.split = plan.target
            self.splits.append(self.split)

    @property
    def changes(self) -> list[tuple[int, Split]]:
        return [(p.step, p.target) for p in self.plans if p.target != p.split]

    def _noise(self) -> float:
        return self.dice.lognormvariate(0.0, self.noise)


def reversals(run: ToyRun) -> int:
    directions = [
        1 if p.target.train > p.split.train else -1 for p in run.plans if p.target != p.split
    ]
    return sum(a != b for a, b in pairwise(directions))


# ── one decision ─────────────────────────────────────────────────────────────────────────────


def test_nothing_is_decided_before_two_steps_and_a_hold() -> None:
    run = ToyRun(train_work_s=20.0)
    run.run(10)
    assert [plan.reason for plan in run.plans[:4]] == [
        Reason.LEARNING,
        Reason.HELD,
        Reason.HELD,
        Reason.BETTER,
    ]


def test_a_slow_trainer_gets_the_slots_and_the_plan_says_what_was_weighed() -> None:
    run = ToyRun(train_work_s=20.0)
    run.run(20)
    first = next(plan for plan in run.plans if plan.reason is Reason.BETTER)
    assert first.split == Split(0, 4)
    assert first.target.train > 0
    assert {forecast.split for forecast in first.forecasts} == set(RULES.splits())
    chosen = next(f for f in first.forecasts if f.split == first.target)
    assert chosen.step_s == min(f.step_s for f in first.forecasts)
    assert first.gain_s * first.horizon_steps > first.cost_s > 0
    assert run.step_s(run.split) == run.best_s()


def test_slow_rollouts_get_the_slots_back() -> None:
    run = ToyRun(rollout_work_s=60.0, split=Split(4, 0))
    run.run(30)
    assert run.step_s(run.split) == run.best_s()
    assert run.split.train == 0


def test_what_a_change_has_brought_is_told_after_a_hold() -> None:
    run = ToyRun(train_work_s=20.0)
    run.run(20)
    verdict = next(plan.verdict for plan in run.plans if plan.verdict)
    (step, target), *_ = run.changes
    assert (verdict.source, verdict.target) == (Split(0, 4), target)
    assert verdict.measured_gain_s == pytest.approx(
        run.step_s(Split(0, 4)) - run.step_s(target), rel=1e-6
    )
    assert verdict.foreseen_gain_s > 0
    assert next(p.step for p in run.plans if p.verdict) == step + RULES.hold_steps


def test_among_equally_fast_splits_the_one_in_force_stays() -> None:
    """The trainer is the slower side and replicas do nothing, so rollout workers are idle."""
    rules = replace(RULES, replica_speed=0.0)
    run = ToyRun(rules=rules, train_work_s=50.0, replica_speed=0.0, split=Split(2, 2))
    run.run(19)
    assert not run.changes
    assert {plan.reason for plan in run.plans} == {Reason.LEARNING, Reason.BEST}


def test_no_change_is_worth_it_when_the_run_is_about_to_end() -> None:
    run = ToyRun(train_work_s=12.0, steps_max=6, rules=replace(RULES, switch_s=100.0))
    run.run(6)
    assert run.plans[-2].reason is Reason.COST
    assert not run.changes


def test_a_measured_switch_replaces_the_assumed_one() -> None:
    run = ToyRun(train_work_s=20.0)
    run.run(3)
    assert run.state is not None
    measure = replace(run.measure(), step=4)
    _, cheap = advance(run.state, replace(measure, switch_s=0.1), RULES)
    _, dear = advance(run.state, replace(measure, switch_s=1e6), RULES)
    assert (cheap.reason, dear.reason) == (Reason.BETTER, Reason.COST)


def test_slots_between_two_sides_teach_and_decide_nothing() -> None:
    run = ToyRun(train_work_s=20.0)
    run.run(6)
    assert run.state is not None
    measure = replace(run.measure(), step=7, settled=False, step_s=1000.0)
    state, plan = advance(run.state, measure, RULES)
    assert state == run.state
    assert plan.reason is Reason.MOVING


def orders(steps: int, answer: Callable[[PlannerState, Plan], PlannerState]) -> list[int]:
    """Steps at which a split is ordered that never comes."""
    run, ordered = ToyRun(train_work_s=20.0), list[int]()
    state = begin(run.split, 0, RULES)
    for run.step in range(1, steps):
        state, plan = advance(state, run.measure(), RULES)
        if plan.reason is Reason.BETTER:
            ordered.append(run.step)
            state = answer(state, plan)
    return ordered


def test_an_order_under_way_is_not_given_again_until_it_is_forgotten() -> None:
    assert orders(40, order_placed) == [4, 20, 36]


def test_a_refused_order_is_held_back() -> None:
    assert orders(14, lambda state, plan: put_off(state, plan.step)) == [4, 8, 12]


def test_a_change_by_somebody_else_begins_a_hold() -> None:
    run = ToyRun()
    run.run(10)
    run.split = Split(4, 0)
    run.run(RULES.hold_steps - 1)
    assert all(p.target == Split(4, 0) for p in run.plans[-(RULES.hold_steps - 1) :])


def test_one_stalled_step_changes_nothing() -> None:
    run = ToyRun(train_work_s=8.0, rollout_work_s=30.0, split=Split(2, 2))
    run.run(30)
    settled = run.split

    def stall(toy: ToyRun) -> None:
        toy.train_work_s = 800.0 if toy.step == 31 else 8.0

    run.run(20, stall)
    assert set(run.splits[-20:]) == {settled}


def test_a_trainer_that_waits_although_groups_are_ready_does_not_wait_for_rollouts() -> None:
    run = ToyRun(train_work_s=20.0, rollout_work_s=6.0)
    run.run(2)
    assert run.state is not None
    hiccup = replace(run.measure(), step=3, wait_s=3.0, step_s=23.2, starved=False)
    run.state, _ = advance(run.state, hiccup, RULES)
    run.step = 3
    run.run(12)
    assert run.step_s(run.split) == run.best_s()


def test_a_split_that_was_tried_and_was_slower_is_not_tried_again() -> None:
    """Latency shows at three replicas only, and is forgotten at two."""
    run = ToyRun(train_work_s=2.0, rollout_work_s=1.5, replica_speed=1.0)
    run.run(200)
    assert reversals(run) <= 1
    assert run.step_s(run.split) == run.best_s()


def test_the_longest_contexts_keep_a_worker() -> None:
    rules = replace(RULES, fixed=0, rollout_min=1)
    run = ToyRun(rules=rules, train_work_s=1000.0, rollout_work_s=0.1)
    run.run(30)
    assert run.split == Split(3, 1)


def test_half_empty_workers_are_not_taken_for_full_ones() -> None:
    """Workers that decode few trajectories each are as busy as full ones."""
    run = ToyRun(train_work_s=2.0, rollout_work_s=36.0, half_empty=3.0)
    run.run(10)
    run.train_work_s = 24.0
    run.run(60)
    assert run.step_s(run.split) <= 1.06 * run.best_s()


def test_without_overlap_the_two_sides_add_up() -> None:
    rules = replace(RULES, overlapped=False)
    run = ToyRun(rules=rules, train_work_s=30.0, rollout_work_s=6.0)
    train_s, rollout_s = run.times(run.split)
    step_s = train_s + run.overhead_s + rollout_s
    state, forecasts = begin(run.split, 0, rules), []
    for step in range(1, 4):
        waited = {"wait_s": rollout_s, "step_s": step_s, "starved": True}
        measure = replace(run.measure(), step=step, **waited)
        state, plan = advance(state, measure, rules)
        forecasts = plan.forecasts
    now = next(f for f in forecasts if f.split == run.split)
    assert now.step_s == pytest.approx(step_s)


# ── in a closed loop ─────────────────────────────────────────────────────────────────────────

TOY_RUNS = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 300
"""Each is two hundred steps."""


@settings(max_examples=TOY_RUNS)
@given(
    seed=st.integers(0, 2**32),
    train_s=st.floats(1.0, 60.0),
    rollout_s=st.floats(1.0, 200.0),
    speed=st.floats(0.1, 1.2),
    noise=st.floats(0.0, 0.1),
    start=st.integers(0, 4),
)
def test_constant_inputs_with_noise_make_it_turn_back_ever_more_rarely(
    seed: int, train_s: float, rollout_s: float, speed: float, noise: float, start: int
) -> None:
    run = ToyRun(
        train_work_s=train_s,
        rollout_work_s=rollout_s,
        replica_speed=speed,
        noise=noise,
        split=Split(start, 4 - start),
        dice=random.Random(seed),
    )
    run.run(200)
    # Near a tie noise may turn a change back; each time makes the next hold twice as long, and
    # 4 + 8 + … + 128 steps are more than there are.
    assert reversals(run) <= 6
    assert len(run.changes) <= 9
    assert len({split.train for split in run.splits[60:]}) <= 3


@settings(max_examples=TOY_RUNS)
@given(
    seed=st.integers(0, 2**32),
    train_s=st.floats(1.0, 60.0),
    rollout_s=st.floats(1.0, 200.0),
    speed=st.floats(0.1, 1.2),
    start=st.integers(0, 4),
)
def test_it_ends_near_the_fastest_split_from_any_other(
    seed: int, train_s: float, rollout_s: float, speed: float, start: int
) -> None:
    run = ToyRun(
        train_work_s=train_s,
        rollout_work_s=rollout_s,
        replica_speed=speed,
        noise=0.02,
        split=Split(start, 4 - start),
        dice=random.Random(seed),
    )
    run.run(120)
    slack = 2 * RULES.gain_min + 0.05  # A reversal must promise twice `gain_min`; noise.
    assert run.step_s(run.split) <= run.best_s() / (1 - slack)


@pytest.mark.parametrize("speed", [0.1, 0.3, 0.6, 1.0])
def test_what_replicas_do_is_found_out_where_nobody_counts_it(speed: float) -> None:
    run = ToyRun(train_work_s=40.0, replica_speed=speed, counts_replicas=False)
    run.run(60)
    assert run.state is not None
    assert run.state.costs.replica_speed == pytest.approx(speed, rel=0.05)
    assert run.step_s(run.split) <= 1.1 * run.best_s()


@pytest.mark.parametrize("seed", range(20))
def test_growing_trajectories_move_the_slots_to_the_rollouts(seed: int) -> None:
    """From 2.5K to 11.5K tokens: rollouts grow faster than training, as their KV cache does."""
    run = ToyRun(train_work_s=20.0, noise=0.05, dice=random.Random(seed))

    def grow(toy: ToyRun) -> None:
        tokens = 2500 + 9000 * min(1.0, toy.step / 200)
        toy.train_work_s = 20.0 * tokens / 2500
        toy.rollout_work_s = 24.0 * (tokens / 2500) ** 1.9

    run.run(12, grow)
    early = run.split
    run.run(250, grow)
    assert early.train > run.split.train
    assert run.step_s(run.split) <= 1.15 * run.best_s()
    assert reversals(run) <= 2


def test_the_same_measurements_give_the_same_plans() -> None:
    def plans() -> list[Plan]:
        run = ToyRun(train_work_s=20.0, noise=0.1, dice=random.Random(7))
        run.run(60)
        return run.plans

    assert plans() == plans()
