"""What a scheduling policy is: it says where a trajectory runs, and remembers what it learned.

A policy is a state machine without a clock, I/O or randomness. Whoever drives it (the book, in
production and in the simulator alike) tells it what happens and carries its decisions out.
"""

from typing import NamedTuple, Protocol

from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.route import Residual, Route


class Option(NamedTuple):
    """A worker that was weighed."""

    peer: str
    cost_s: float
    """Expected seconds until the trajectory's end there, with what it costs the others; policies
    that do not think in seconds put their own figure here (lower is better)."""
    move_s: float
    """Part of it that is the move itself."""


class Decision(NamedTuple):
    """Where a trajectory runs from now on."""

    peer: str
    """The worker that it is on already means: stay."""
    reason: str
    """One or two words for people and counters, such as `cheaper`, `full`, `draining`, `margin`."""
    residual: Residual | None = None
    options: tuple[Option, ...] = ()
    """What was weighed, best first; bounded."""
    kv_expected: int = 0
    """Context that it is expected to end with, observations included. Becomes the route's."""


class Predictor(Protocol):
    """Learns how much trajectories still sample after a tool return."""

    def begin(self, route: Route) -> None:
        """A trajectory was admitted (or is back after a restart, with its past turns)."""
        ...

    def predict(self, route: Route, *, tokens_since_return: int = 0) -> Residual:
        """How many tokens it will still sample. Learns nothing from being asked.

        Counted from its last outcome (or from its begin), or from `tokens_since_return` tokens
        after that, given that it has sampled those already.
        """
        ...

    def returned(self, route: Route) -> None:
        """The route has one outcome more. What it says of unfinished siblings is taken in here."""
        ...

    def end(self, route: Route, *, finished: bool) -> None:
        """It ended; all its routing points are learned if it finished by itself."""
        ...

    def dump(self) -> bytes:
        """All that was learned."""
        ...

    def load(self, dumped: bytes) -> None:
        """Take over what `dump` gave."""
        ...


class TurnMeasure(NamedTuple):
    """How fast one turn was on its worker."""

    peer: str
    bucket: str
    prefill_tokens: int
    """Context tokens that had to be computed, as far as known."""
    action_tokens: int
    queue_s: float
    """Until the first token; prefill included."""
    decode_s: float
    """From the first token to the last."""
    running: int
    """Requests in the engine's batch while it decoded."""
    kv_tokens_used: int
    """KV tokens of all of them."""


class MoveMeasure(NamedTuple):
    """What one move cost."""

    source_bucket: str
    target_bucket: str
    path: str
    """`kv` or `recompute`."""
    tokens: int
    """Context that was moved."""
    seconds: float
    reason: str = ""
    """Why it was not `kv`, or empty; `cheaper` when that was the worker's own choice."""


class Policy(Protocol):
    """One policy. Every method but `place` and `returned` may do nothing."""

    def begin(self, route: Route) -> None:
        """A trajectory was admitted, or comes back after a restart with its past turns."""
        ...

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        """Choose a worker for one that is on none; None when it must wait."""
        ...

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        """A tool returned; the route has the outcome. Stay, move, or None: wait for a worker.

        `route.worker` is the worker that it is on, which may be draining: then it cannot stay.
        """
        ...

    def end(self, route: Route, *, finished: bool) -> None:
        """The trajectory ended; `finished` when by itself, so that its length means something."""
        ...

    def turn_measured(self, measure: TurnMeasure) -> None:
        """How fast a turn was."""
        ...

    def move_measured(self, measure: MoveMeasure) -> None:
        """What a move cost."""
        ...

    def dump(self) -> bytes:
        """All that was learned; empty when nothing is."""
        ...

    def load(self, dumped: bytes) -> None:
        """Take over what `dump` gave.

        Raises:
            ValueError: it is not of this policy and version.
        """
        ...
