"""How long tools take: a lognormal body, a Pareto tail, and calls that never end in time.

Randomness is the caller's `random.Random`.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class LatencyLaw:
    """Seconds of one tool call that ends by itself."""

    log_mean: float
    log_sd: float
    tail_share: float = 0.0
    """Of calls whose time is from the tail instead."""
    tail_from_s: float = 0.0
    tail_exponent: float = 1.5
    """Of the Pareto tail; the smaller, the heavier."""
    timeout_s: float = 30.0
    """Calls are cut there, and one that is hangs until then."""

    def draw_s(self, random: Random) -> float:
        """One call, at most `timeout_s`."""
        if self.tail_share and random.random() < self.tail_share:
            seconds = self.tail_from_s * random.paretovariate(self.tail_exponent)
        else:
            seconds = random.lognormvariate(self.log_mean, self.log_sd)
        return min(seconds, self.timeout_s)


LOCAL_SEARCH = LatencyLaw(-1.6, 0.5)
"""A dense index beside the worker: 0.2 s."""
PYTHON = LatencyLaw(-1.5, 1.0, timeout_s=15.0)
"""A sandboxed interpreter."""
FILE_VIEW = LatencyLaw(-1.9, 0.6, timeout_s=90.0)
"""Viewing, searching and editing in a repository's sandbox."""
TEST_RUN = LatencyLaw(1.2, 1.0, tail_share=0.1, tail_from_s=10.0, tail_exponent=1.3, timeout_s=90.0)
"""Building and testing there; most of it is short, some of it is not."""
RECORDED = LatencyLaw(-2.15, 1.94, timeout_s=90.0)
"""For traces that recorded none. Source: fitted to the execution times of software agents."""
