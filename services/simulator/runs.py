"""Many runs: each asked for as a plain value, played one by one or in several processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from common.service import die_with_parent
from services.simulator.cluster import CLUSTERS, Cluster
from services.simulator.measures import RunResult
from services.simulator.scripts import Workload
from services.simulator.workloads import make_workload
from services.simulator.world import Scenario, World

SAMPLED_GROUPS = 64
"""Whose lengths decide the context ranges of buckets for a recorded workload."""
BOUND_SHARES = (0.5, 0.85)
"""Of final contexts under the bound of each bucket but the last."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run. A value, so that another process can play it."""

    workload: str
    policy: str
    seed: int = 0
    trace: str = ""
    """File, for the workload `trace`."""
    strength: float | None = None
    scale: float = 1.0
    cluster: str = "paper"
    steps: int = 8
    groups_per_step: int = 0
    """0 takes the cluster's."""
    max_staleness_steps: int = 1

    def build(self) -> World:
        """The world of this run."""
        workload = make_workload(
            self.workload,
            seed=self.seed,
            trace=self.trace,
            strength=self.strength,
            scale=self.scale,
        )
        cluster = CLUSTERS[self.cluster]
        if self.trace:
            cluster = fit_bounds(cluster, workload)
        scenario = Scenario(
            cluster=cluster,
            policy=self.policy,
            seed=self.seed,
            steps=self.steps,
            groups_per_step=self.groups_per_step or cluster.groups_per_step(workload.group_size),
            max_staleness_steps=self.max_staleness_steps,
        )
        return World(scenario, workload)

    def play(self) -> RunResult:
        """Build and run it."""
        return self.build().run()


def fit_bounds(cluster: Cluster, workload: Workload) -> Cluster:
    """Context ranges of the buckets as somebody who knows the workload's lengths would set them."""
    lengths = sorted(
        trace.context_tokens
        for index in range(SAMPLED_GROUPS)
        for trace in workload.group(index, 0)
    )
    return cluster.with_bounds([lengths[int(share * len(lengths))] for share in BOUND_SHARES])


def play_all(
    specs: Sequence[RunSpec], *, processes: int, on_done: Callable[[RunSpec], None] | None = None
) -> list[RunResult]:
    """Play all; results in the order of the specs, whatever order they end in."""
    results: list[RunResult | None] = [None] * len(specs)
    with closing(_played(specs, processes)) as played:
        for index, result in played:
            results[index] = result
            if on_done is not None:
                on_done(specs[index])
    return [result for result in results if result is not None]


def _played(specs: Sequence[RunSpec], processes: int) -> Generator[tuple[int, RunResult]]:
    if processes <= 1 or len(specs) == 1:
        for index, spec in enumerate(specs):
            yield index, spec.play()
        return
    # Started afresh: a forked child would inherit the progress bar's thread and locks.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        min(processes, len(specs)), context, die_with_parent, (os.getpid(),)
    ) as pool:
        try:
            with _interrupts_held():
                futures = {pool.submit(spec.play): index for index, spec in enumerate(specs)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # Leaving the pool would wait for the runs under way, and a queue.
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _interrupts_held() -> Generator[None]:
    """Keep Ctrl-C until afterwards. Children started meanwhile never get it: they are ended."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def seeds_of(spec: RunSpec, policies: Iterable[str], seeds: int) -> list[RunSpec]:
    """The same run for every policy and seed; the seeds of one policy lie together."""
    return [replace(spec, policy=policy, seed=seed) for policy in policies for seed in range(seeds)]
