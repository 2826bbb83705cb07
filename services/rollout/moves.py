"""What a move of a trajectory tells about itself. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from common.messages.scheduler import MoveReport
from services.rollout.engine import EngineLoad


class Miss(StrEnum):
    """Why a KV cache did not come along."""

    NO_SOURCE = "no_source"
    """No worker was named that may have it."""
    LOCAL = "local"
    """It comes back to the worker that had it: what is left of its cache is here."""
    SOURCE_GONE = "source_gone"
    """The worker left, died, or cannot be connected to."""
    VERSION = "version"
    """The two engines decode with different versions."""
    NOT_KEPT = "not_kept"
    """The source's engine has it no longer, or cannot give it."""
    REFUSED = "refused"
    """The source has too much to do."""
    TOO_SLOW = "too_slow"
    """It was not here in time."""
    TOO_LARGE = "too_large"
    CORRUPT = "corrupt"
    """The bytes are not what the source said they are."""
    ENGINE = "engine"
    """An engine failed at it, or the own one cannot take it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the cache of a trajectory came, or why it did not."""

    miss: Miss | None
    seconds: float

    def report(self, *, context_tokens: int, queue_s: float) -> MoveReport:
        """As the scheduler gets it, once the first generation says how long a prefill took."""
        computed_s = queue_s if self.miss else 0.0
        return MoveReport(
            path="recompute" if self.miss else "kv",
            tokens=context_tokens,
            seconds=self.seconds + computed_s,
            reason=self.miss.value if self.miss else "",
        )


@dataclass(frozen=True, slots=True)
class Company:
    """How busy an engine was while it decoded one turn: means over that time."""

    running: int = 0
    kv_tokens_used: int = 0


def company(before: EngineLoad, after: EngineLoad) -> Company:
    """Mean load between two moments. The engine was busy all the time: the turn itself ran."""
    busy_s = after.busy_s - before.busy_s
    if busy_s <= 0:
        return Company(max(1, after.running), after.kv_tokens_used)
    running_s = after.running_s - before.running_s
    used_s = after.kv_tokens_used_s - before.kv_tokens_used_s
    return Company(max(1, round(running_s / busy_s)), round(used_s / busy_s))
