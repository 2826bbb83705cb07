"""How well anybody could route a parametric workload: the limit that its own randomness sets."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from services.simulator.workloads import ParametricWorkload

DRAWS = 64
"""Of each trajectory's end: the likeliest bucket is missed where two are nearly as likely only."""


def attainable_accuracy(
    workload: ParametricWorkload, bounds: Sequence[int], groups: Iterable[int], *, step: int = 0
) -> float:
    """Share of tool returns at which the likeliest bucket is that of the length at the end.

    The likeliest by the law that the trajectories are drawn from, given the prompt and all that
    the trajectory has shown. No predictor, however much it has seen, is right more often but by
    luck; one that must learn the law and the prompt is right less often.
    """
    right = returns = 0
    for index in groups:
        for context, drawn in workload.endings(index, step, draws=DRAWS):
            buckets = Counter(bisect_left(bounds, ending) for ending in drawn)
            ((likeliest, _),) = buckets.most_common(1)
            right += likeliest == bisect_left(bounds, context)
            returns += 1
    return right / max(1, returns)
