"""The way of one trajectory through the workers, as far as routing has seen it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.routing.outcomes import ToolOutcome


class Residual(NamedTuple):
    """How many tokens the policy will still sample, in short. From a distribution."""

    mean: float
    p50: float
    p90: float
    evidence: float
    """Observations behind it, after decay; 0 for a guess without any."""


@dataclass(slots=True, eq=False)
class Route:
    """One living trajectory. Changed by the book only; policies read it."""

    trajectory_id: str
    group_id: str
    """Trajectories of one group share a prompt."""
    task_id: str
    """Groups of one task share a prompt, too, in different epochs."""
    prompt_tokens: int = 0
    """0 until its first turn is reported."""
    action_tokens: int = 0
    observation_tokens: int = 0
    outcomes: list[ToolOutcome] = field(default_factory=list[ToolOutcome])
    """One per finished turn, oldest first."""
    action_tokens_at: list[int] = field(default_factory=list[int])
    """Action tokens sampled in all when each outcome came; as long as `outcomes`."""
    context_tokens_at: list[int] = field(default_factory=list[int])
    """Context with that outcome's observation in it; as long as `outcomes`."""
    siblings_at: Sequence[float] = ()
    """What was known of its siblings when it began and when each outcome came, one after the other,
    for whoever learns from it once more; kept by the predictor."""
    worker: str = ""
    """Peer that holds it, or empty while it waits."""
    moves: int = 0
    """Moves for balance; those forced by a drain or a failure do not count."""
    waiting_since: float = 0.0
    """Loop time at which it was admitted, or last taken from a worker."""
    kv_expected: int = 0
    """Context at its end as the last decision expected it, at least its present context."""
    residual: Residual | None = None
    """What the last decision predicted."""
    context_counted: int = 0
    """Its part of its worker's `context_tokens`; kept by the fleet."""
    kv_counted: int = 0
    """Its part of its worker's `kv_expected`; kept by the fleet."""

    @property
    def turns(self) -> int:
        """Turns finished."""
        return len(self.outcomes)

    @property
    def context_tokens(self) -> int:
        """Tokens that its next turn starts from."""
        return self.prompt_tokens + self.action_tokens + self.observation_tokens

    def returned(
        self, outcome: ToolOutcome, *, action_tokens: int, observation_tokens: int
    ) -> None:
        """A turn has finished: it sampled so many tokens and got so many back."""
        self.action_tokens += action_tokens
        self.observation_tokens += observation_tokens
        self.outcomes.append(outcome)
        self.action_tokens_at.append(self.action_tokens)
        self.context_tokens_at.append(self.context_tokens)
