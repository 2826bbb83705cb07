"""What a simulated engine works on: jobs, and stretches of iterations that do the same."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from services.simulator.engine_cache import Claim


class Job(NamedTuple):
    """One turn's generation."""

    job_id: str
    trajectory_id: str
    group_id: str
    context_tokens: int
    """All tokens before this turn's output."""
    prompt_tokens: int
    """The first part of it, which siblings share."""
    new_tokens: int
    """To sample, at least 1."""


class Finished(NamedTuple):
    """A job that is done."""

    job_id: str
    trajectory_id: str
    submitted_s: float
    first_token_s: float
    finished_s: float
    prefill_tokens: int
    """Context tokens that were computed, those after preemptions included."""
    preemptions: int
    running: int
    """Requests in the batch when it finished, itself included."""
    kv_tokens_used: int
    """By running requests, then."""


@dataclass(slots=True, eq=False)
class Request:
    """A job in the engine."""

    job: Job
    submitted_s: float
    context_tokens: int
    """To be there before it samples again; grows when it is preempted."""
    new_tokens: int
    """Still to sample, when it was last admitted."""
    order: int = -1
    """Of admission; -1 when it is not running."""
    claim: Claim | None = None
    prefill_left: int = 0
    decoding_since: int = -1
    """The engine's iteration count when it sampled its first token since admission."""
    first_token_s: float = -1.0
    prefill_tokens: int = 0
    preemptions: int = 0
    version: int = 0

    @property
    def computed(self) -> int:
        """Of its context."""
        return self.context_tokens - self.prefill_left

    def admit(self, claim: Claim, order: int, version: int) -> None:
        """It is in the batch from now on, with what was cached."""
        self.claim, self.order, self.version = claim, order, version
        self.prefill_left = self.context_tokens - claim.cached_tokens

    def growth(self, chunk: int) -> int:
        """KV tokens that computing so much more of its context needs; its prompt has its own."""
        claim = self.claim
        assert claim is not None
        needed = self.context_tokens - self.prefill_left + chunk
        return max(0, needed - claim.own_tokens - claim.prompt_tokens)

    def compute(self, tokens: int) -> int:
        """So much more of its context is computed. Returns the KV tokens that it grew by."""
        assert self.claim is not None
        grown = self.growth(tokens)
        self.claim.own_tokens += grown
        self.prefill_left -= tokens
        self.prefill_tokens += tokens
        return grown

    def steady(self, chunk: int) -> bool:
        """Whether later iterations may compute as much, each growing by as much."""
        assert self.claim is not None
        return chunk < self.prefill_left and self.computed == self.claim.held_tokens


@dataclass(slots=True, eq=False)
class Segment:
    """Iterations that do the same: the batch and who gets how much prefill stay as they are."""

    end_s: float
    iterations: int
    """Left of it; a pause has none."""
    first_s: float
    """Of the next iteration."""
    growth_s: float
    """How much longer each iteration takes than the one before."""
    chunks: list[tuple[Request, int]]
    """Prefill per iteration. Several requests, or the end of one, only in single iterations."""

    def duration_s(self, iterations: int) -> float:
        """Of its next so many iterations."""
        return iterations * self.first_s + self.growth_s * (iterations * (iterations - 1) / 2)

    def whole_iterations(self, seconds: float) -> int:
        """How many end within so many seconds, itself excluded from the segment's last one."""
        linear, square = self.first_s - self.growth_s / 2, self.growth_s / 2
        root = math.sqrt(linear * linear + 4 * square * seconds)
        count = min(self.iterations - 1, int(2 * seconds / (linear + root)))
        while count < self.iterations - 1 and self.duration_s(count + 1) <= seconds:
            count += 1
        while count and self.duration_s(count) > seconds:
            count -= 1
        return count
