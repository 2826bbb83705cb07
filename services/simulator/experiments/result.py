"""What an experiment of the simulator reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

Progress = Callable[[float], None]
"""Called with the share of the work that is done."""


@dataclass(frozen=True, slots=True)
class BandCheck:
    """A measured value and the band that it must lie in."""

    name: str
    value: float
    unit: str
    low: float
    high: float

    @property
    def ok(self) -> bool:
        """Bounds included."""
        return self.low <= self.value <= self.high


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One experiment."""

    name: str
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """Nested tables of numbers, for people and scripts."""
    checks: list[BandCheck] = field(default_factory=list[BandCheck])


class Experiment(Protocol):
    """Runs for some seeds. Those of one seed are the same every time."""

    def __call__(self, seeds: Sequence[int], progress: Progress) -> ExperimentResult: ...


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range over seeds."""
    return {"median": median(values), "min": min(values), "max": max(values)}
