"""Parametric workloads: search, mathematics with Python, and software repair, as numbers.

Each is a two-state chain of outcomes (it went well, or it did not), with lengths and a stop hazard
that may depend on the last outcome. How strongly they do is the *outcome strength*: the share of
the variance of log(1 + remaining output tokens) at tool returns, beyond what the turn's number
says, that the outcome history explains. Real traces lie between 0.02 and 0.2; `PAPER_LIKE` is the
world in which routing by outcomes does what was published of it.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from common.trajectory import ToolStatus
from services.simulator.latency import FILE_VIEW, LOCAL_SEARCH, PYTHON, TEST_RUN, LatencyLaw

PAPER_LIKE = 0.6
"""Outcome strength where none is asked for."""
INTRA_GROUP_CORRELATION = 0.4
"""Of log total output within a prompt; what `Dial.group_sd` was calibrated for."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens that a tool returns: lognormal, cut."""

    log_mean: float
    log_sd: float
    tokens_max: int


@dataclass(frozen=True, slots=True)
class ToolModel:
    """One tool of a workload."""

    name: str
    share_ok: float
    """Of the calls that go well."""
    share_bad: float
    """Of the calls that do not."""
    ok: Observation
    bad: Observation
    latency: LatencyLaw


@dataclass(frozen=True, slots=True)
class Dial:
    """Calibrated numbers that give one outcome strength.

    Found by simulating: strength as named, `INTRA_GROUP_CORRELATION`, and the preset's mean output.
    """

    strength: float
    effect: float
    """How much the last outcome changes what follows; 0 not at all."""
    group_sd: float
    """Of log output per turn, between prompts."""
    log_mean: float
    """Of output per turn, at step 0."""
    log_growth: float = 0.0
    """Change of it until the drift's end. More than the mean's, where contexts get cut."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What an effect of 1 changes. Bad outcomes take three quarters of it, good ones the rest."""

    length: float
    """Of log output per turn."""
    hazard: float
    """Of the stop hazard's log-odds."""
    cluster: float
    """Of the log-odds that a call after a bad one is bad, too, or after a good one good."""
    difficulty: float
    """Of the log-odds that a call is bad, per standard deviation of the prompt."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Mean output over training: log-logistic from one level to another."""

    mean_from: float
    mean_to: float
    steps: float
    """Where `mean_to` is reached."""
    middle: float
    width: float

    def share(self, step: int) -> float:
        """Of the way, 0 at step 0 and 1 at its end, in log output per turn."""
        first, last = self._logistic(0), self._logistic(self.steps)
        return (self._logistic(step) - first) / (last - first)

    def _logistic(self, step: float) -> float:
        return 1.0 / (1.0 + math.exp(-(step - self.middle) / self.width))


@dataclass(frozen=True, slots=True)
class Preset:
    """One workload."""

    name: str
    about: str
    prompt: Observation
    tools: tuple[ToolModel, ...]
    turns_max: int
    stop_first: float
    """P(the first turn calls no tool)."""
    stop: float
    """P(a later turn calls no tool), before the effect of the last outcome."""
    stop_turns: int
    """The turn at which that holds, its odds growing with the square of the turn; 0: at each."""
    bad_first: float
    """P(the first call goes wrong)."""
    bad_after_ok: float
    bad_after_bad: float
    bad_statuses: tuple[tuple[ToolStatus, float], ...]
    """Shares of what went wrong."""
    sample_sd: float
    """Of log output per turn, between siblings."""
    turn_sd: float
    """Of log output per turn, within a trajectory."""
    effects: Effects
    drift: Drift
    dials: tuple[Dial, ...]
    """By strength."""
    context_tokens_max: int = 40_960
    group_size: int = 16

    def dial(self, strength: float) -> Dial:
        """The numbers for an outcome strength, between those that were calibrated."""
        lowest, highest = self.dials[0], self.dials[-1]
        strength = min(max(strength, lowest.strength), highest.strength)
        for low, high in pairwise(self.dials):
            if strength <= high.strength:
                share = (strength - low.strength) / (high.strength - low.strength)
                return Dial(
                    strength,
                    low.effect + share * (high.effect - low.effect),
                    low.group_sd + share * (high.group_sd - low.group_sd),
                    low.log_mean + share * (high.log_mean - low.log_mean),
                    low.log_growth + share * (high.log_growth - low.log_growth),
                )
        return highest


SEARCH_R1 = Preset(
    name="search-r1",
    about="questions answered with a search tool",
    prompt=Observation(5.0, 0.35, 2_000),
    tools=(
        ToolModel(
            "search",
            1.0,
            1.0,
            Observation(6.15, 0.25, 600),
            Observation(3.6, 0.3, 60),
            LOCAL_SEARCH,
        ),
    ),
    turns_max=5,
    stop_first=0.05,
    stop=0.35,
    stop_turns=0,
    bad_first=0.3,
    bad_after_ok=0.24,
    bad_after_bad=0.56,
    bad_statuses=(
        (ToolStatus.EMPTY, 0.90),
        (ToolStatus.ERROR, 0.08),
        (ToolStatus.TIMEOUT, 0.02),
    ),
    sample_sd=0.3,
    turn_sd=0.5,
    effects=Effects(length=1.5, hazard=1.6, cluster=0.9, difficulty=0.7),
    drift=Drift(4_000, 6_000, 300, 150, 45),
    dials=(
        Dial(0.0, 0.000, 0.522, 6.799, 0.408),
        Dial(0.02, 0.166, 0.523, 6.777, 0.406),
        Dial(0.1, 0.330, 0.512, 6.736, 0.409),
        Dial(0.2, 0.485, 0.510, 6.677, 0.408),
        Dial(0.4, 0.791, 0.507, 6.487, 0.417),
        Dial(0.6, 1.190, 0.491, 6.131, 0.434),
    ),
)

DAPO = Preset(
    name="dapo",
    about="competition mathematics with Python, chains of thought that grow",
    prompt=Observation(4.8, 0.4, 2_000),
    tools=(
        ToolModel(
            "python", 1.0, 1.0, Observation(2.7, 0.8, 2_000), Observation(5.5, 0.6, 2_000), PYTHON
        ),
    ),
    turns_max=9,
    stop_first=0.1,
    stop=0.4,
    stop_turns=0,
    bad_first=0.2,
    bad_after_ok=0.15,
    bad_after_bad=0.5,
    bad_statuses=((ToolStatus.ERROR, 0.92), (ToolStatus.TIMEOUT, 0.08)),
    sample_sd=0.3,
    turn_sd=0.5,
    effects=Effects(length=1.5, hazard=1.6, cluster=0.9, difficulty=0.5),
    drift=Drift(2_500, 11_500, 400, 200, 60),
    dials=(
        Dial(0.0, 0.000, 0.594, 6.334, 1.561),
        Dial(0.02, 0.210, 0.590, 6.341, 1.586),
        Dial(0.1, 0.401, 0.589, 6.304, 1.625),
        Dial(0.2, 0.592, 0.599, 6.237, 1.663),
        Dial(0.4, 0.922, 0.607, 6.015, 1.828),
        Dial(0.6, 1.372, 0.609, 5.528, 2.234),
    ),
)

R2E = Preset(
    name="r2e",
    about="repair of software repositories with a shell, an editor and tests",
    prompt=Observation(7.2, 0.4, 4_000),
    tools=(
        ToolModel(
            "view",
            0.53,
            0.10,
            Observation(6.0, 0.9, 4_000),
            Observation(4.5, 0.8, 2_000),
            FILE_VIEW,
        ),
        ToolModel(
            "edit",
            0.23,
            0.10,
            Observation(4.5, 0.8, 2_000),
            Observation(4.5, 0.8, 2_000),
            FILE_VIEW,
        ),
        ToolModel(
            "test", 0.24, 0.80, Observation(5.2, 1.2, 4_000), Observation(6.5, 1.0, 4_000), TEST_RUN
        ),
    ),
    turns_max=40,
    stop_first=0.0,
    stop=0.2,
    stop_turns=8,
    bad_first=0.2,
    bad_after_ok=0.2,
    bad_after_bad=0.43,
    bad_statuses=((ToolStatus.ERROR, 0.97), (ToolStatus.TIMEOUT, 0.03)),
    sample_sd=0.2,
    turn_sd=0.5,
    effects=Effects(length=1.2, hazard=1.5, cluster=1.5, difficulty=0.5),
    drift=Drift(2_500, 11_500, 500, 200, 60),
    dials=(
        Dial(0.0, 0.0, 0.388, 5.361, 1.561),
        Dial(0.02, 0.286, 0.377, 5.353, 1.561),
        Dial(0.1, 0.550, 0.352, 5.320, 1.586),
        Dial(0.2, 0.765, 0.340, 5.255, 1.625),
        Dial(0.4, 1.230, 0.335, 4.985, 1.770),
        Dial(0.6, 2.363, 0.352, 3.700, 2.700),
    ),
)

DAPO_SHRINK = replace(
    DAPO,
    name="dapo-shrink",
    about="competition mathematics with Python, learning to call it instead of thinking long",
    drift=Drift(10_000, 6_000, 400, 200, 60),
    dials=(
        Dial(0.0, 0.000, 0.588, 7.708, -0.521),
        Dial(0.02, 0.231, 0.592, 7.714, -0.521),
        Dial(0.1, 0.465, 0.583, 7.722, -0.546),
        Dial(0.2, 0.702, 0.581, 7.680, -0.610),
        Dial(0.4, 1.177, 0.573, 7.556, -0.750),
        Dial(0.6, 1.726, 0.596, 7.333, -1.143),
    ),
)

PRESETS = {preset.name: preset for preset in (SEARCH_R1, DAPO, DAPO_SHRINK, R2E)}
