"""Recorded trajectories: what each turn sampled, which tool it called and what came back."""

from dataclasses import dataclass

from common.trajectory import ToolStatus


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn."""

    output_tokens: int
    """Sampled by the policy."""
    tool: str
    status: ToolStatus | None
    """None on the turn that ended the trajectory without a tool call."""
    observation_tokens: int
    latency_s: float | None
    """Of the tool; None where it was not recorded."""


@dataclass(frozen=True, slots=True)
class TraceTrajectory:
    """One trajectory; those of one group share a prompt."""

    trajectory_id: str
    group_id: str
    prompt_tokens: int
    turns: tuple[TraceTurn, ...]
    """At least one."""
    reward: float | None = None

    @property
    def output_tokens(self) -> int:
        """Sampled in all."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """At the end."""
        observed = sum(turn.observation_tokens for turn in self.turns)
        return self.prompt_tokens + self.output_tokens + observed
