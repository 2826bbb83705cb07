"""What the outcome history says about what is left: how the dial of a workload is measured."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import fmean

from services.scheduler.routing.outcomes import PayloadSizes
from services.simulator.traces import TraceTrajectory, TraceTurn

HISTORY = 3
"""Last outcomes that a cell distinguishes."""
SIZES = PayloadSizes(100, 1_000)


def outcome_strength(groups: Sequence[Sequence[TraceTrajectory]]) -> float:
    """Share of the variance of log(1 + remaining output) that outcomes explain, the turn known.

    At every tool return that is followed by more generation: means by the last three statuses,
    the last tool and the class of its payload, learned on every second group and tried on the
    others, after the mean of each turn is taken off. May be slightly negative when it is nothing.
    """
    learned = _residuals(groups[0::2])
    tried = _residuals(groups[1::2])
    cells: dict[Hashable, list[float]] = defaultdict(list)
    for cell, residual in learned:
        cells[cell].append(residual)
    means = {cell: fmean(values) for cell, values in cells.items()}
    left = fmean((residual - means.get(cell, 0.0)) ** 2 for cell, residual in tried)
    return 1.0 - left / fmean(residual**2 for _, residual in tried)


def intra_group_correlation(groups: Sequence[Sequence[TraceTrajectory]]) -> float:
    """Of log total output, between siblings (analysis of variance, groups of one size)."""
    within, between = _variances(groups)
    return between / (between + within)


def _variances(groups: Sequence[Sequence[TraceTrajectory]]) -> tuple[float, float]:
    logs = [[math.log(member.output_tokens) for member in group] for group in groups]
    size = len(logs[0])
    means = [fmean(values) for values in logs]
    within = fmean(_spread(values) * size / (size - 1) for values in logs)
    between = _spread(means) * len(means) / (len(means) - 1) - within / size
    return within, between


def _spread(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values)


def _residuals(groups: Iterable[Sequence[TraceTrajectory]]) -> list[tuple[Hashable, float]]:
    """Cell and log remaining output, less the turn's mean, of every routing point."""
    points = [
        (number, _cell(trajectory.turns[: number + 1]), math.log1p(left))
        for group in groups
        for trajectory in group
        for number, left in enumerate(_left(trajectory))
    ]
    by_turn: dict[int, list[float]] = defaultdict(list)
    for number, _, value in points:
        by_turn[number].append(value)
    means = {number: fmean(values) for number, values in by_turn.items()}
    return [(cell, value - means[number]) for number, cell, value in points]


def _left(trajectory: TraceTrajectory) -> list[int]:
    """Output that follows each turn but the last."""
    left, total = list[int](), 0
    for turn in reversed(trajectory.turns[1:]):
        total += turn.output_tokens
        left.append(total)
    return left[::-1]


def _cell(turns: Sequence[TraceTurn]) -> Hashable:
    last = turns[-1]
    statuses = tuple(str(turn.status) for turn in turns[-HISTORY:])
    return statuses, last.tool, SIZES.class_of(last.observation_tokens)
