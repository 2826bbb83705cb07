"""A1: how rollout and training grow when sequences get longer.

Published: from 1K to 32K tokens a sequence, rollout takes 95 times as long and training 3.9 times.
Rollout grows more than linearly since the cache gets full, with requests preempted at the end of
the range; training less, since a large part of a step does not depend on length.
"""

from collections.abc import Sequence

from services.simulator.costs import TrainLayout, train_step_s
from services.simulator.devices import A800, QWEN3_14B
from services.simulator.experiments.result import BandCheck, ExperimentResult, Progress
from services.simulator.experiments.rollouts import batch_s

LENGTHS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
REQUESTS = 8
"""Of each engine at TP 1: as many as just outgrow its cache at the longest length."""
SEQUENCES = 128
TRAIN_DEVICES = 32


def run(seeds: Sequence[int], progress: Progress) -> ExperimentResult:
    """Nothing is drawn: all seeds give the same."""
    del seeds
    rollout: list[float] = []
    train: list[float] = []
    for number, length in enumerate(LENGTHS):
        rollout.append(batch_s([length] * REQUESTS, 1))
        layout = TrainLayout(TRAIN_DEVICES)
        tokens = SEQUENCES * length
        train.append(train_step_s(QWEN3_14B, A800, layout, tokens=tokens, context_tokens=length))
        progress((number + 1) / len(LENGTHS))
    names = [str(length) for length in LENGTHS]
    return ExperimentResult(
        "A1",
        {
            "rollout_s": dict(zip(names, rollout, strict=True)),
            "train_s": dict(zip(names, train, strict=True)),
        },
        [
            BandCheck("rollout_growth", rollout[-1] / rollout[0], "x", 60, 140),
            BandCheck("train_growth", train[-1] / train[0], "x", 2.5, 6),
        ],
    )
