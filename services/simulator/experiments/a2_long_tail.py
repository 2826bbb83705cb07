"""A2: the long tail of software repair, and how its lengths drift.

Published, for R2E-Gym: the longest tenth of the trajectories takes more than half of the rollout
time, and the mean length grows from about 2.5K to about 11.5K tokens over the run of 500 steps.
"""

from collections.abc import Sequence
from statistics import fmean, median

from services.simulator.experiments.result import BandCheck, ExperimentResult, Progress, spread
from services.simulator.experiments.rollouts import trajectories_s
from services.simulator.traces import TraceTrajectory
from services.simulator.workloads import Workload, make_workload

STEPS = (0, 100, 200, 300, 400, 500)
GROUPS = 48
"""Sampled for a mean length: half a per cent of its deviation, times the number of seeds."""
ENGINES = 8
"""At TP 2, with an equal share of one step's trajectories each."""
STEP_GROUPS = 16


def run(seeds: Sequence[int], progress: Progress) -> ExperimentResult:
    """Lengths and synchronous rollouts of the preset, at its published-like outcome strength."""
    lengths: dict[int, list[float]] = {step: [] for step in STEPS}
    shares: list[float] = []
    tails: list[float] = []
    for number, seed in enumerate(seeds):
        workload = make_workload("r2e", seed=seed)
        for step in STEPS:
            lengths[step].append(_mean_length(workload, step))
        share, tail = _tail(_step(workload, 0))
        shares.append(share)
        tails.append(tail)
        progress((number + 1) / len(seeds))
    first, last = median(lengths[STEPS[0]]), median(lengths[STEPS[-1]])
    return ExperimentResult(
        "A2",
        {
            "mean_output_tokens": {str(step): spread(lengths[step]) for step in STEPS},
            "longest_tenth_time_share": spread(shares),
            "makespan_share_after_nine_tenths": spread(tails),
        },
        [
            BandCheck("longest_tenth_time_share", median(shares), "", 0.45, 0.65),
            BandCheck("mean_length_first_step", first, "tokens", 2_500 * 0.85, 2_500 * 1.15),
            BandCheck("mean_length_last_step", last, "tokens", 11_500 * 0.85, 11_500 * 1.15),
        ],
    )


def _mean_length(workload: Workload, step: int) -> float:
    """Tokens that the policy samples, per trajectory."""
    groups = [workload.group(index, step) for index in range(GROUPS)]
    return fmean(member.output_tokens for group in groups for member in group)


def _step(workload: Workload, step: int) -> list[TraceTrajectory]:
    return [member for index in range(STEP_GROUPS) for member in workload.group(index, step)]


def _tail(trajectories: Sequence[TraceTrajectory]) -> tuple[float, float]:
    """Measure a synchronous rollout.

    Returns:
        Share of all trajectories' time that the longest tenth takes, and of the makespan that is
        left when nine tenths have ended.
    """
    ends = sorted(
        end for engine in range(ENGINES) for end in trajectories_s(trajectories[engine::ENGINES], 2)
    )
    tenth = len(ends) // 10
    return sum(ends[-tenth:]) / sum(ends), 1 - ends[-tenth - 1] / ends[-1]
