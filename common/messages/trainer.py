"""What the trainer receives: questions about where it stands."""

from common.messages.base import Message, Request


class TrainerStatus(Message):
    """Where the training loop is."""

    step: int
    phase: str
    """`loading`, `waiting`, `training`, `publishing` or `stopping`."""
    phase_s: float
    """Seconds in this phase."""


class GetTrainerStatus(Request[TrainerStatus]):
    """Read-only."""
