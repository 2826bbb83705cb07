"""Workloads: which trajectories there are, fixed by a seed before anything is scheduled.

A group depends on the seed, its index and its step alone, so every policy meets the same ones.
"""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from common.trajectory import ToolStatus
from services.simulator.latency import RECORDED
from services.simulator.traces import TraceTrajectory, TraceTurn, read_traces
from services.simulator.workload_presets import (
    PAPER_LIKE,
    PRESETS,
    Dial,
    Observation,
    Preset,
    ToolModel,
)


class Workload(Protocol):
    """Where trajectories come from."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def group_size(self) -> int:
        """Trajectories of one group."""
        ...

    def group(self, index: int, step: int) -> Sequence[TraceTrajectory]:
        """The trajectories of the group at that place of the order, at that step of training."""
        ...


def make_workload(
    name: str,
    *,
    seed: int = 0,
    trace: str = "",
    strength: float | None = None,
    scale: float = 1.0,
) -> Workload:
    """A workload by name: a preset's, or `trace` (with a file), or `trace:FILE`.

    Args:
        name: `search-r1`, `dapo`, `dapo-shrink`, `r2e`, `trace` or `trace:FILE`.
        seed: Of everything that is drawn.
        trace: File of recorded trajectories, for `trace`.
        strength: Outcome strength of a preset; its published-like value if None.
        scale: Factor on output and observation tokens.

    Raises:
        KeyError: there is no such preset.
    """
    kind, _, path = name.partition(":")
    if kind == "trace":
        return ReplayedWorkload(read_traces(Path(path or trace)), seed=seed, scale=scale)
    return ParametricWorkload(
        PRESETS[name], seed=seed, strength=PAPER_LIKE if strength is None else strength, scale=scale
    )


class ReplayedWorkload:
    """Recorded trajectories, group by group in an order that the seed decides, again and again.

    All groups have the commonest recorded size, since a step trains equally many from each: larger
    ones are cut up, and what is left over is not played (nobody's sibling may be a copy of it).
    Where no time of a tool was recorded, one is drawn.
    """

    def __init__(self, traces: Sequence[TraceTrajectory], *, seed: int, scale: float = 1.0) -> None:
        assert traces, "a trace without trajectories"
        groups: dict[str, list[TraceTrajectory]] = {}
        for trajectory in traces:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        self.name = "trace"
        sizes = Counter(len(members) for members in groups.values())
        size = self.group_size = max(sizes, key=lambda size: (sizes[size], size))
        self._groups = [
            members[start : start + size]
            for members in groups.values()
            for start in range(0, len(members) - size + 1, size)
        ]
        self._seed = seed
        self._scale = scale
        self._orders: dict[int, list[int]] = {}

    def group(self, index: int, step: int) -> list[TraceTrajectory]:
        """Recorded lengths do not drift: the step changes nothing."""
        del step
        epoch, place = divmod(index, len(self._groups))
        if epoch not in self._orders:
            order = list(range(len(self._groups)))
            Random(f"{self._seed}/order/{epoch}").shuffle(order)
            self._orders[epoch] = order
        members = self._groups[self._orders[epoch][place]]
        random = Random(f"{self._seed}/group/{index}")
        return [
            self._scaled(recorded, f"g{index}", number, random)
            for number, recorded in enumerate(members)
        ]

    def _scaled(
        self, recorded: TraceTrajectory, group_id: str, number: int, random: Random
    ) -> TraceTrajectory:
        turns = tuple(
            TraceTurn(
                output_tokens=max(1, round(turn.output_tokens * self._scale)),
                tool=turn.tool,
                status=turn.status,
                observation_tokens=round(turn.observation_tokens * self._scale),
                latency_s=RECORDED.draw_s(random) if turn.latency_s is None else turn.latency_s,
            )
            for turn in recorded.turns
        )
        return replace(
            recorded, trajectory_id=f"{group_id}.{number}", group_id=group_id, turns=turns
        )


@dataclass(slots=True)
class _Prompt:
    """What the siblings of a group have in common."""

    tokens: int
    difficulty: float
    log_output: float
    """Mean of log output per turn."""


class _Standing(NamedTuple):
    """Where a trajectory stands, at its start or at a tool return."""

    prompt: _Prompt
    log_output: float
    """Mean of its own log output per turn, but for the effects of outcomes."""
    turns: int
    context: int
    bad: bool | None
    """How the last call went."""


class ParametricWorkload:
    """Trajectories drawn from a preset."""

    def __init__(
        self, preset: Preset, *, seed: int, strength: float = PAPER_LIKE, scale: float = 1.0
    ) -> None:
        self.name = preset.name
        self.group_size = preset.group_size
        self._preset = preset
        self._dial: Dial = preset.dial(strength)
        self._seed = seed
        self._scale = scale
        self._shares_ok = list(accumulate(tool.share_ok for tool in preset.tools))
        self._shares_bad = list(accumulate(tool.share_bad for tool in preset.tools))
        self._bad_statuses = [status for status, _ in preset.bad_statuses]
        self._bad_shares = list(accumulate(share for _, share in preset.bad_statuses))

    def group(self, index: int, step: int) -> list[TraceTrajectory]:
        """Siblings share the prompt, its difficulty and its length."""
        random = self._random(index)
        prompt = self._prompt(step, random)
        return [
            self._trajectory(f"g{index}", number, prompt, random)
            for number in range(self.group_size)
        ]

    def endings(self, index: int, step: int, *, draws: int) -> Iterator[tuple[int, list[int]]]:
        """What could be known of the ends of a group's trajectories, at each of their tool returns.

        Yields the context at the end, and `draws` others that are as likely, by the law of this
        workload, for somebody who knows that law, the prompt with its difficulty, and what the
        trajectory has shown so far. No siblings can say more.
        """
        prompt, random = self._prompt(step, self._random(index)), Random(f"endings/{index}")
        for member in self.group(index, step):
            for point in self._points(member, prompt):
                drawn = [
                    point.context + _growth(self._turns(self._likely(point, random), random))
                    for _ in range(draws)
                ]
                yield member.context_tokens, drawn

    def _points(self, member: TraceTrajectory, prompt: _Prompt) -> Iterator[_Standing]:
        """Where a trajectory stands at each tool return, its own length the mean of its turns."""
        seen, bad, context = 0.0, None, member.prompt_tokens
        for number, turn in enumerate(member.turns[:-1], start=1):
            seen += math.log(turn.output_tokens) - self._lengthened(bad=bad)
            bad = turn.status is not ToolStatus.OK
            context += turn.output_tokens + turn.observation_tokens
            yield _Standing(prompt, seen / number, number, context, bad)

    def _likely(self, point: _Standing, random: Random) -> _Standing:
        """The same with an own length that may have shown itself so: normal, given a normal."""
        prior, shown = self._preset.sample_sd**-2, point.turns * self._preset.turn_sd**-2
        mean = (point.prompt.log_output * prior + point.log_output * shown) / (prior + shown)
        return point._replace(log_output=random.gauss(mean, (prior + shown) ** -0.5))

    def _random(self, index: int) -> Random:
        return Random(f"{self._seed}/{self._preset.name}/{index}")

    def _prompt(self, step: int, random: Random) -> _Prompt:
        preset, dial = self._preset, self._dial
        difficulty = random.gauss(0.0, 1.0)
        shift = dial.log_growth * preset.drift.share(step) + math.log(self._scale)
        return _Prompt(
            tokens=_tokens(preset.prompt, random, 1.0),
            difficulty=difficulty,
            log_output=dial.log_mean + shift + dial.group_sd * difficulty,
        )

    def _trajectory(
        self, group_id: str, number: int, prompt: _Prompt, random: Random
    ) -> TraceTrajectory:
        log_output = prompt.log_output + random.gauss(0.0, self._preset.sample_sd)
        start = _Standing(prompt, log_output, 0, prompt.tokens, None)
        turns = tuple(self._turns(start, random))
        return TraceTrajectory(f"{group_id}.{number}", group_id, prompt.tokens, turns)

    def _turns(self, start: _Standing, random: Random) -> Iterator[TraceTurn]:
        """The turns that follow, to the end."""
        preset = self._preset
        prompt, log_output, turns, context, bad = start
        while True:
            output = random.lognormvariate(log_output + self._lengthened(bad=bad), preset.turn_sd)
            left = preset.context_tokens_max - context
            sampled = max(1, min(int(output), left))
            context += sampled
            over = turns + 1 == preset.turns_max or sampled == left
            if over or random.random() < self._stops(turns, bad=bad):
                yield TraceTurn(sampled, "", None, 0, None)
                return
            bad = random.random() < self._goes_wrong(prompt.difficulty, bad=bad)
            turn = self._called(sampled, random, bad=bad)
            context += turn.observation_tokens
            if context >= preset.context_tokens_max:
                yield TraceTurn(sampled, "", None, 0, None)
                return
            yield turn
            turns += 1

    def _lengthened(self, *, bad: bool | None) -> float:
        """Effect of the last outcome on log output per turn."""
        if bad is None:
            return 0.0
        return self._dial.effect * self._preset.effects.length * (0.75 if bad else -0.25)

    def _stops(self, turns: int, *, bad: bool | None) -> float:
        """P(the turn calls no tool), after so many that did."""
        if bad is None:
            return self._preset.stop_first
        effect = self._dial.effect * self._preset.effects.hazard
        log_odds = -0.75 * effect if bad else 0.25 * effect
        if self._preset.stop_turns:
            log_odds += 2.0 * math.log(turns / self._preset.stop_turns)
        return _moved(self._preset.stop, log_odds)

    def _goes_wrong(self, difficulty: float, *, bad: bool | None) -> float:
        """P(the call does not go well): trouble clusters, and some prompts are harder."""
        preset, effect = self._preset, self._dial.effect
        harder = preset.effects.difficulty * effect * difficulty
        cluster = preset.effects.cluster * effect
        if bad is None:
            return _moved(preset.bad_first, harder)
        if bad:
            return _moved(preset.bad_after_bad, harder + cluster)
        return _moved(preset.bad_after_ok, harder - cluster)

    def _called(self, sampled: int, random: Random, *, bad: bool) -> TraceTurn:
        """One call, and what came back."""
        tool = self._tool(random, bad=bad)
        status = ToolStatus.OK
        if bad:
            (status,) = random.choices(self._bad_statuses, cum_weights=self._bad_shares)
        tokens = _tokens(tool.bad if bad else tool.ok, random, self._scale)
        timed_out = status is ToolStatus.TIMEOUT
        latency_s = tool.latency.timeout_s if timed_out else tool.latency.draw_s(random)
        return TraceTurn(sampled, tool.name, status, tokens, latency_s)

    def _tool(self, random: Random, *, bad: bool) -> ToolModel:
        shares = self._shares_bad if bad else self._shares_ok
        return self._preset.tools[min(bisect(shares, random.random()), len(shares) - 1)]


def _growth(turns: Iterable[TraceTurn]) -> int:
    return sum(turn.output_tokens + turn.observation_tokens for turn in turns)


def _tokens(law: Observation, random: Random, scale: float) -> int:
    drawn = random.lognormvariate(law.log_mean, law.log_sd) * scale
    return max(1, min(int(drawn), int(law.tokens_max * max(scale, 1.0))))


def _moved(probability: float, log_odds: float) -> float:
    """A probability moved in log-odds; 0 and 1 stay."""
    if not 0.0 < probability < 1.0:
        return probability
    odds = probability / (1.0 - probability) * math.exp(log_odds)
    return odds / (1.0 + odds)
