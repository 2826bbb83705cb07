"""What a tool returned, as far as routing cares: which tool, how it went, how much, how long."""

from enum import StrEnum
from typing import NamedTuple

from common.trajectory import ToolStatus


class Payload(StrEnum):
    """Size class of what a tool returned."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


class PayloadSizes(NamedTuple):
    """Upper bounds of the classes, in tokens, themselves included."""

    small_max: int = 500
    medium_max: int = 5000

    def class_of(self, tokens: int) -> Payload:
        """The class of a payload."""
        if tokens <= self.small_max:
            return Payload.SMALL
        return Payload.MEDIUM if tokens <= self.medium_max else Payload.LARGE


class ToolOutcome(NamedTuple):
    """One tool return."""

    tool: str
    """Empty when the call could not be parsed."""
    status: ToolStatus
    payload: Payload
    payload_tokens: int
    latency_s: float
