"""Finds the lengths of a preset's dial: the mean output that its drift declares, at both ends."""

import math
from dataclasses import replace
from statistics import fmean

from services.simulator.workload_presets import Dial, Preset
from services.simulator.workloads import ParametricWorkload

GROUPS = 150
"""Of each seed: with eight seeds the mean is known within a percent or so."""
ROUNDS = 3
"""Contexts that get cut bend the mean a little; three corrections leave nothing of it."""


def mean_output(preset: Preset, dial: Dial, *, step: int, seeds: int = 8) -> float:
    """Tokens that a trajectory samples at that step of training."""
    only = replace(preset, dials=(dial,))
    return fmean(
        member.output_tokens
        for seed in range(seeds)
        for workload in [ParametricWorkload(only, seed=seed, strength=dial.strength)]
        for index in range(GROUPS)
        for member in workload.group(index, step)
    )


def fit_lengths(preset: Preset, dial: Dial) -> Dial:
    """The dial with the level and growth that give the means of the preset's drift."""
    drift = preset.drift
    for _ in range(ROUNDS):
        low = mean_output(preset, dial, step=0)
        high = mean_output(preset, dial, step=int(drift.steps))
        level = math.log(drift.mean_from / low)
        growth = math.log(drift.mean_to / high) - level
        dial = replace(dial, log_mean=dial.log_mean + level, log_growth=dial.log_growth + growth)
    return dial
