"""How much a trajectory may still sample, and why it must stop. Pure.

The limit of one turn and that of all turns together are different things: a turn ends at its own
limit even when the trajectory has tokens left, and the other way round.
"""

from dataclasses import dataclass
from typing import Self

from common.config import Config
from common.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one trajectory."""

    turns_max: int
    turn_tokens_max: int
    """Sampled in one turn."""
    trajectory_tokens_max: int
    """Sampled in all turns together."""
    context_tokens_max: int
    """Prompt, actions and observations together."""

    @classmethod
    def of(cls, config: Config, *, engine_context_tokens: int) -> Self:
        """Read them from the configuration; the engine may hold less than is asked for."""
        return cls(
            turns_max=config.sampling.turns_max,
            turn_tokens_max=config.sampling.turn_tokens_max,
            trajectory_tokens_max=config.sampling.trajectory_tokens_max,
            context_tokens_max=min(config.model.context_tokens, engine_context_tokens),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a trajectory has come."""

    turns: int
    sampled_tokens: int
    context_tokens: int


def next_budget(limits: Limits, progress: Progress) -> int | StopReason:
    """Tokens that the next turn may sample, or why there is no next turn."""
    sampled_left = limits.trajectory_tokens_max - progress.sampled_tokens
    context_left = limits.context_tokens_max - progress.context_tokens
    if progress.turns >= limits.turns_max:
        return StopReason.TURNS_MAX
    if sampled_left <= 0:
        return StopReason.TOKENS_MAX
    if context_left <= 0:
        return StopReason.CONTEXT_OVERFLOW
    return min(limits.turn_tokens_max, sampled_left, context_left)


def why_cut(limits: Limits, progress: Progress) -> StopReason:
    """Which limit cut a turn that was not finished; `progress` is the one before that turn."""
    context_left = limits.context_tokens_max - progress.context_tokens
    sampled_left = limits.trajectory_tokens_max - progress.sampled_tokens
    if context_left < min(limits.turn_tokens_max, sampled_left):
        return StopReason.CONTEXT_OVERFLOW
    return StopReason.TOKENS_MAX
