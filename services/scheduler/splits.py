"""What a step takes under each split of the hybrid slots, foreseen from the steps so far.

Training: a replica adds a share of the core's speed, so `k` of them make it `1 + k · speed` times
as fast. Rollouts: a step's tokens cost worker-seconds, which the awake workers share; what is
left when workers sit idle although the trainer waits (tools, the longest trajectory) is latency,
which no further worker shortens. A step takes as long as the slower side.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Self

KEPT = 0.7
"""Of a smoothed value, with each step: about the last three steps count."""
CARRIED = 0.5
"""Of what is known, by weight, when the split changes: the rest must be measured anew."""
OUTLIER = 3.0
"""Values beyond so many times the smoothed one are a stall; they count as this much."""
WAIT_SHARE_MIN = 0.005
"""A trainer that waits for more of the step than this is held up by the rollouts."""
HINT_WEIGHT = 0.05
"""Of a step that found its groups ready, as a hint that rollouts have no latency. Little, or what
makes a change a mistake would be forgotten, and the mistake made again."""
SPEED_MIN, SPEED_MAX = 0.02, 8.0
"""Bounds of a replica's speed in shares of the core's; beyond lies a torn measurement."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """How many hybrid slots train, and how many roll out."""

    train: int
    rollout: int


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """One optimizer step as it was."""

    step: int
    split: Split
    """In force from its beginning to its end, where `settled`."""
    train_s: float
    wait_s: float
    """The trainer waited so long for groups."""
    step_s: float
    train_tokens: float
    """Contexts that were trained."""
    needed_tokens: float
    """Tokens that must be sampled for a step, those of groups that are dropped included."""
    made_tokens: float
    """Tokens that were sampled meanwhile."""
    busy_s: float
    """Worker-seconds of decoding, of all awake rollout workers."""
    steps_left: int
    settled: bool = True
    """Whether no slot was between two sides."""
    ready_groups: int = 0
    """At its end."""
    starved: bool = True
    """Too few groups were ready at its beginning: else the trainer did not wait for rollouts."""
    replica_share: float | None = None
    """Of the step's tokens, what replicas computed; None where nobody counts."""
    switch_s: float | None = None
    """Mean time in which a slot changes sides; None where none has yet."""


@dataclass(frozen=True, slots=True)
class Smoothed:
    """A mean that forgets, and is the plain mean at first."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> Self:
        """One more step's value; high outliers are cut."""
        if self.value > 0:
            value = min(value, OUTLIER * self.value)
        total = KEPT * self.weight + weight
        if total <= 0:
            return self
        return replace(self, value=self.value + (value - self.value) * weight / total, weight=total)

    def doubted(self, weight: float) -> Self:
        """The same after a hint that it is nothing."""
        total = self.weight + weight
        return replace(self, value=self.value * self.weight / total, weight=total)

    def scaled(self, factor: float) -> Self:
        """The same under another split, to be trusted less."""
        return replace(self, value=self.value * factor, weight=self.weight * CARRIED)


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of the run, smoothed. Attributes are for reading."""

    split: Split
    """That `train_s` and `step_s` belong to."""
    replica_speed: float
    """Of one replica, in shares of the core's."""
    measured: int = 0
    """Settled steps."""
    step_s: Smoothed = Smoothed()
    train_s: Smoothed = Smoothed()
    noise: Smoothed = Smoothed()
    """Share by which a step differs from those before."""
    overhead_s: Smoothed = Smoothed()
    """Of a step, what is neither training nor waiting for rollouts: fetching, publishing."""
    wait_share: Smoothed = Smoothed()
    needed_tokens: Smoothed = Smoothed()
    busy_s: Smoothed = Smoothed()
    made_tokens: Smoothed = Smoothed()
    full_busy_s: Smoothed = Smoothed()
    full_made_tokens: Smoothed = Smoothed()
    """The last two of steps in which the trainer waited: then the workers were full. A worker that
    is half empty is as busy for fewer tokens."""
    latency_s: Smoothed = Smoothed()
    """Weighed by how much of the step the trainer waited: a lost message is no latency."""
    speed_counted: bool = False
    """Whether the trainer itself has said what replicas do."""

    @property
    def train_work_s(self) -> float:
        """Of a step, for the core alone."""
        return self.train_s.value * _core_speed(self, self.split.train)

    @property
    def rollout_work_s(self) -> float:
        """Worker-seconds of a step's tokens."""
        return self.needed_tokens.value * self.token_cost_s

    @property
    def token_cost_s(self) -> float:
        """Worker-seconds of a token, as far as is known where the workers are full."""
        costs = [
            busy.value / made.value
            for busy, made in (
                (self.busy_s, self.made_tokens),
                (self.full_busy_s, self.full_made_tokens),
            )
            if made.value > 0
        ]
        return min(costs, default=0.0)


def learn(costs: Costs, step: StepMeasure, *, fixed: int, overlapped: bool) -> Costs:
    """Take in one settled step.

    Args:
        costs: known so far, of the same split.
        step: the step.
        fixed: rollout workers that are no tenants of hybrid slots.
        overlapped: whether rollouts go on while the trainer trains.
    """
    assert step.settled
    assert step.split == costs.split
    workers = max(1, fixed + step.split.rollout)
    wait_s = step.wait_s if step.starved else 0.0
    share = wait_s / step.step_s if step.step_s > 0 else 0.0
    learned = replace(
        costs,
        measured=costs.measured + 1,
        step_s=costs.step_s.add(step.step_s),
        noise=_noise(costs, step.step_s),
        train_s=costs.train_s.add(step.train_s),
        overhead_s=costs.overhead_s.add(max(0.0, step.step_s - step.train_s - wait_s)),
        wait_share=costs.wait_share.add(share),
        needed_tokens=costs.needed_tokens.add(step.needed_tokens),
        busy_s=costs.busy_s.add(step.busy_s),
        made_tokens=costs.made_tokens.add(step.made_tokens),
    )
    if share > WAIT_SHARE_MIN or not overlapped:
        rollout_s = step.step_s if overlapped else wait_s
        learned = replace(
            learned,
            full_busy_s=costs.full_busy_s.add(step.busy_s),
            full_made_tokens=costs.full_made_tokens.add(step.made_tokens),
            latency_s=costs.latency_s.add(max(0.0, rollout_s - step.busy_s / workers), share),
        )
    elif not step.starved:
        learned = replace(learned, latency_s=costs.latency_s.doubted(HINT_WEIGHT))
    if step.replica_share is not None and step.split.train and 0 < step.replica_share < 1:
        speed = step.replica_share / (1 - step.replica_share) / step.split.train
        learned = _with_speed(learned, speed, counted=True)
    return learned


def _noise(costs: Costs, step_s: float) -> Smoothed:
    before_s = costs.step_s.value
    return costs.noise.add(abs(step_s / before_s - 1)) if before_s > 0 else costs.noise


def _with_speed(costs: Costs, speed: float, *, counted: bool) -> Costs:
    bounded = min(max(speed, SPEED_MIN), SPEED_MAX)
    mixed = KEPT * costs.replica_speed + (1 - KEPT) * bounded if costs.speed_counted else bounded
    return replace(costs, replica_speed=mixed, speed_counted=counted or costs.speed_counted)


def compare_speed(costs: Costs, before: Split, ratio: float) -> Costs:
    """Learn a replica's speed from training before and after a change of the split.

    Args:
        costs: known now.
        before: the split before.
        ratio: seconds of a trained token before, divided by those now.
    """
    replicas = costs.split.train - ratio * before.train
    if costs.speed_counted or (ratio - 1) * replicas <= 0:
        return costs  # Known better, or the change cannot have done it.
    return _with_speed(costs, (ratio - 1) / replicas, counted=False)


def under(costs: Costs, split: Split) -> Costs:
    """The same after a change of the split."""
    factor = _core_speed(costs, costs.split.train) / _core_speed(costs, split.train)
    return replace(
        costs,
        split=split,
        train_s=costs.train_s.scaled(factor),
        step_s=Smoothed(),
        wait_share=Smoothed(),
        busy_s=costs.busy_s.scaled(1.0),
        made_tokens=costs.made_tokens.scaled(1.0),
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step under one split."""

    split: Split
    train_s: float
    rollout_s: float
    step_s: float


def forecast(costs: Costs, split: Split, *, fixed: int, overlapped: bool) -> Forecast:
    """Foresee a step under a split; without any rollout worker it never ends."""
    train_s = (
        costs.train_s.value
        * _core_speed(costs, costs.split.train)
        / _core_speed(costs, split.train)
    )
    rollout_s = _rollout_s(costs, fixed + split.rollout)
    core_s = train_s + costs.overhead_s.value
    if not overlapped:
        return Forecast(split, train_s, rollout_s, core_s + rollout_s)
    rollout_s *= _corrected(costs, fixed)
    return Forecast(split, train_s, rollout_s, max(core_s, rollout_s))


def _core_speed(costs: Costs, replicas: int) -> float:
    return 1 + costs.replica_speed * replicas


def _rollout_s(costs: Costs, workers: int) -> float:
    if workers <= 0:
        return inf
    return costs.latency_s.value + costs.rollout_work_s / workers


def _corrected(costs: Costs, fixed: int) -> float:
    """The factor by which the rollouts' time is overrated, seen from the steps as they are.

    Rollouts that do not hold up the trainer take no longer than the step, whatever else is thought.
    """
    now_s = _rollout_s(costs, fixed + costs.split.rollout)
    measured = costs.step_s.weight > 0 and costs.wait_share.value <= WAIT_SHARE_MIN
    if not measured or now_s <= costs.step_s.value:
        return 1.0
    return costs.step_s.value / now_s
