"""A0: which tensor parallel degree is fastest for which length.

Published, for Qwen3-14B, 8 A800 and a batch of 512: TP 1 gives 3.13 times the throughput of TP 8
for lengths up to 2K, and TP 8 gives 2.84 times that of TP 1 for 16K to 32K.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median

from services.simulator.experiments.result import BandCheck, ExperimentResult, Progress, spread
from services.simulator.experiments.rollouts import sustained

DEVICES = 8
BATCH = 512
BINS = ((160, 2_048), (2_048, 4_096), (4_096, 8_192), (8_192, 16_384), (16_384, 32_768))
DEGREES = (1, 2, 4, 8)


def run(seeds: Sequence[int], progress: Progress) -> ExperimentResult:
    """Sustained throughput of each degree in each bin of total lengths."""
    rates: dict[tuple[int, int], list[float]] = {}
    cells = [(seed, length, degree) for seed in seeds for length in BINS for degree in DEGREES]
    for number, (seed, (shortest, longest), degree) in enumerate(cells):
        rate = _rate(degree, shortest, longest, seed)
        rates.setdefault((longest, degree), []).append(rate)
        progress((number + 1) / len(cells))
    ratios = {longest: _ratios(rates, longest) for _, longest in BINS}
    return ExperimentResult(
        "A0",
        {
            "tokens_per_s": {
                f"up to {longest}": {
                    f"TP {degree}": spread(rates[longest, degree]) for degree in DEGREES
                }
                for _, longest in BINS
            },
            "tp1_over_tp8": {
                f"up to {longest}": spread(values) for longest, values in ratios.items()
            },
        },
        [
            BandCheck("short_tp1_over_tp8", median(ratios[BINS[0][1]]), "x", 2.2, 3.8),
            BandCheck("long_tp8_over_tp1", 1 / median(ratios[BINS[-1][1]]), "x", 1.8, 3.6),
            BandCheck("crossover", _crossover(ratios), "tokens", 4_096, 16_384),
        ],
    )


def _rate(degree: int, shortest: int, longest: int, seed: int) -> float:
    """Tokens per second of all instances; each has its own part of the batch."""
    instances = DEVICES // degree
    random = Random(f"{seed}/{degree}/{longest}")
    return sum(
        sustained(degree, BATCH // instances, shortest, longest, random).tokens_per_s
        for _ in range(instances)
    )


def _ratios(rates: dict[tuple[int, int], list[float]], longest: int) -> list[float]:
    """Of TP 1 to TP 8, by seed."""
    pairs = zip(rates[longest, 1], rates[longest, 8], strict=True)
    return [one / eight for one, eight in pairs]


def _crossover(ratios: dict[int, list[float]]) -> float:
    """Length at which TP 1 and TP 8 are equally fast, between the middles of bins (log scale).

    Infinite when TP 1 stays ahead.
    """
    points = [
        (math.log((shortest + longest) / 2), math.log(median(ratios[longest])))
        for shortest, longest in BINS
    ]
    for (length, ratio), (next_length, next_ratio) in pairwise(points):
        if ratio >= 0 > next_ratio:
            return math.exp(length + (next_length - length) * ratio / (ratio - next_ratio))
    return math.inf
