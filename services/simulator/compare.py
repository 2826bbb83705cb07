"""Policies on equal footing: the same trajectories, seeds and cluster, medians and ranges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from services.simulator.measures import RunResult
from services.simulator.world import ORACLE

LIBRA = "libra"
SHOWN: dict[str, Callable[[RunResult], float]] = {
    "tokens/s": lambda run: run.tokens_per_s,
    "makespan s": lambda run: run.makespan_s,
    "p50 s": lambda run: run.trajectory_p50_s,
    "p99 s": lambda run: run.trajectory_p99_s,
    "moved": lambda run: run.moved_share,
    "routed right": lambda run: run.routing_accuracy,
    "preempted": lambda run: float(run.preemptions),
    "staleness": lambda run: run.staleness_mean,
}
"""Columns of the table. Idle shares follow, one column for each bucket."""


class Spread(NamedTuple):
    """A figure over several seeds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of several policies on the same seeds."""

    runs: dict[str, list[RunResult]]
    """By policy, in order of the seeds."""

    @classmethod
    def of(cls, results: Sequence[RunResult]) -> "Comparison":
        """Sort results by policy."""
        runs: dict[str, list[RunResult]] = {}
        for result in results:
            runs.setdefault(result.policy, []).append(result)
        return cls(runs)

    @property
    def policies(self) -> list[str]:
        """In the order in which they were asked for."""
        return list(self.runs)

    @property
    def others(self) -> list[str]:
        """All policies that could run in production, but for Libra's own."""
        return [policy for policy in self.runs if policy not in {LIBRA, ORACLE}]

    def spread(self, policy: str, value: Callable[[RunResult], float]) -> Spread:
        """A figure of a policy over the seeds."""
        return spread([value(run) for run in self.runs[policy]])

    def columns(self) -> dict[str, Callable[[RunResult], float]]:
        """What a table of these runs shows."""
        buckets = next(iter(self.runs.values()))[0].idle
        idle = {f"idle {bucket}": _idle_of(bucket) for bucket in buckets}
        return SHOWN | idle

    def ratio(self, policy: str, other: str) -> Spread:
        """Throughput of one policy over that of another, seed by seed."""
        pairs = zip(self.runs[policy], self.runs[other], strict=True)
        return spread([one.tokens_per_s / two.tokens_per_s for one, two in pairs])

    def best_other(self) -> str | None:
        """The policy, neither Libra's nor the oracle, with the highest median throughput."""
        return max(
            self.others,
            key=lambda policy: self.spread(policy, SHOWN["tokens/s"]).median,
            default=None,
        )

    def figures(self) -> dict[str, Any]:
        """For scripts: median, lowest and highest of every column, and every run."""
        return {
            policy: {
                name: self.spread(policy, value)._asdict() for name, value in self.columns().items()
            }
            | {"runs": [run.to_json() for run in self.runs[policy]]}
            for policy in self.policies
        }


def spread(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(median(values), min(values), max(values))


def _idle_of(bucket: str) -> Callable[[RunResult], float]:
    return lambda run: run.idle[bucket]
