"""A8: how well the policies route a search workload, and what that is worth.

Published, for Search-R1: 91.1 % of routings right, against 65.2 % for a predictor at the start and
44.8 % by present length; 8.2 % of tokens moved, against more than 100 % by present length. The
accuracy is that of a workload in which outcomes decide lengths; the preset has its published-like
outcome strength here, and the order is what must hold everywhere.

Among the figures is what accuracy is attainable: how often the likeliest bucket is right, for one
who knows the law that the trajectories are drawn from. It lies below the published accuracy, and
that is the workload's doing: it has the outcome strength that was published, and lengths of turns
that no outcome tells.
"""

import os
from collections.abc import Sequence

from services.simulator.attainable import attainable_accuracy
from services.simulator.cluster import CLUSTERS
from services.simulator.compare import LIBRA, SHOWN, Comparison
from services.simulator.experiments.result import (
    BandCheck,
    ExperimentResult,
    Progress,
    spread,
)
from services.simulator.runs import RunSpec, play_all
from services.simulator.workload_presets import SEARCH_R1
from services.simulator.workloads import ParametricWorkload
from services.simulator.world import ORACLE

POLICIES = (LIBRA, "mlfq", "length_aware", "cmlfq", "la_mlfq", ORACLE)
CLUSTER = "paper"
STEPS = 8
ATTAINABLE_GROUPS = 32
"""Of each seed; five seeds of them are right within one per cent or two."""
RATIO_MAX = 10.0
"""No bound: a ratio so large would be an error of the simulation."""


def run(seeds: Sequence[int], progress: Progress) -> ExperimentResult:
    """All policies on the same trajectories of the paper-like cluster."""
    specs = [
        RunSpec(SEARCH_R1.name, policy, seed=seed, cluster=CLUSTER, steps=STEPS)
        for policy in POLICIES
        for seed in seeds
    ]
    done = 0

    def on_done(spec: RunSpec) -> None:
        nonlocal done
        del spec
        done += 1
        progress(done / len(specs))

    cores = len(os.sched_getaffinity(0))
    comparison = Comparison.of(play_all(specs, processes=cores, on_done=on_done))
    figures = comparison.figures() | {"attainable": {"routed right": _attainable(seeds)}}
    return ExperimentResult("A8", figures, _checks(comparison))


def _attainable(seeds: Sequence[int]) -> dict[str, float]:
    bounds, groups = CLUSTERS[CLUSTER].bounds, range(ATTAINABLE_GROUPS)
    return spread(
        [
            attainable_accuracy(ParametricWorkload(SEARCH_R1, seed=seed), bounds, groups)
            for seed in seeds
        ]
    )


def _checks(comparison: Comparison) -> list[BandCheck]:
    routed = {p: comparison.spread(p, SHOWN["routed right"]).median for p in comparison.policies}
    moved = {p: comparison.spread(p, SHOWN["moved"]).median for p in comparison.policies}
    checks = [
        BandCheck(f"accuracy: libra less {other}", routed[LIBRA] - routed[other], "", 0.0, 1.0)
        for other in comparison.others
    ]
    best = comparison.best_other()
    assert best is not None
    return [
        *checks,
        BandCheck("accuracy: oracle less libra", routed[ORACLE] - routed[LIBRA], "", 0.0, 1.0),
        BandCheck("accuracy of libra", routed[LIBRA], "", 0.85, 1.0),
        BandCheck("moved by libra", moved[LIBRA], "of tokens", 0.0, 0.15),
        BandCheck("moved by mlfq over libra", moved["mlfq"] - moved[LIBRA], "", 0.0, RATIO_MAX),
        BandCheck(
            "throughput: libra / oracle",
            comparison.ratio(LIBRA, ORACLE).median,
            "ratio",
            0.90,
            RATIO_MAX,
        ),
        BandCheck(
            f"throughput: libra / {best}",
            comparison.ratio(LIBRA, best).median,
            "ratio",
            1.0,
            RATIO_MAX,
        ),
    ]
