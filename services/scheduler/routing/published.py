"""The published policies over buckets of context ranges, as printed, to be compared with.

`cmlfq`: starts in the shortest bucket; at a tool return it moves to the bucket that holds both the
mean and the P90 of what trajectories with its history still sampled, whatever the move costs, and
else stays. `la_mlfq`: the same, but it starts in the bucket of the expected length.
`length_aware`: in the bucket of the expected length, never moved. `mlfq`: in the bucket of the
present length, so it is moved as it grows. Source: arXiv 2606.03077.

Within a bucket the least loaded worker is taken; when it has none, the next longer bucket is, then
the next shorter one. No clock, no I/O.
"""

from collections.abc import Sequence
from math import inf

from services.scheduler.routing.baselines import Unlearned, least_loaded, may_stay
from services.scheduler.routing.fleet import BucketShape, Fleet, Terms, Worker
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policy import Decision, Predictor
from services.scheduler.routing.route import Residual, Route
from services.scheduler.routing.tree import PrefixTree, residuals_of, state_of

FORMAT = b"prefix-tree-1\n"


def bucket_of(tokens: float, buckets: Sequence[BucketShape]) -> int:
    """Position of the bucket whose range holds so many tokens; the last one takes the rest."""
    for position, bucket in enumerate(buckets):
        if tokens <= (bucket.context_tokens_max or inf):
            return position
    return len(buckets) - 1


def bucket_of_both(residual: Residual, buckets: Sequence[BucketShape]) -> int | None:
    """Position of the bucket that holds mean and P90 alike; None when they fall into two."""
    position = bucket_of(residual.mean, buckets)
    return position if bucket_of(residual.p90, buckets) == position else None


class Bucketed(Unlearned):
    """Puts a trajectory into the bucket that the policy wants, or into the nearest with room."""

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        wanted, residual = self.wanted_at_start(route, fleet)
        needed = fleet.room_for(route)
        for position in _nearest(wanted, len(fleet.buckets)):
            worker = self._in_bucket(fleet, position, terms, needed)
            if worker is not None:
                reason = "bucket" if position == wanted else "overflow"
                return Decision(worker.peer, reason, residual, kv_expected=needed)
        return None

    def wanted_at_start(self, route: Route, fleet: Fleet) -> tuple[int, Residual | None]:
        """Position of the bucket for one that is on no worker, and why."""
        raise NotImplementedError

    def _in_bucket(self, fleet: Fleet, position: int, terms: Terms, needed: int) -> Worker | None:
        name = fleet.buckets[position].name
        return least_loaded(
            (w for w in fleet.workers.values() if w.bucket == name and w.takes(terms)), needed
        )

    def _stay(self, route: Route, fleet: Fleet, reason: str, residual: Residual | None) -> Decision:
        return Decision(route.worker, reason, residual, kv_expected=fleet.room_for(route))

    def _go(
        self, route: Route, fleet: Fleet, terms: Terms, wanted: int, residual: Residual | None
    ) -> Decision:
        """Move to the bucket if it is another one and has room."""
        name = fleet.buckets[wanted].name
        if fleet.workers[route.worker].bucket == name:
            return self._stay(route, fleet, "stay", residual)
        needed = fleet.room_for(route)
        worker = self._in_bucket(fleet, wanted, terms, needed)
        if worker is None:
            return self._stay(route, fleet, "full", residual)
        return Decision(worker.peer, "bucket", residual, kv_expected=needed)


class Cmlfq(Bucketed):
    """By the prefix tree; see the module."""

    def __init__(self) -> None:
        self.tree = PrefixTree()

    def wanted_at_start(self, route: Route, fleet: Fleet) -> tuple[int, Residual | None]:
        if not route.outcomes:
            return self.first_bucket(route, fleet)
        residual = self._residual(route)
        wanted = None if residual is None else bucket_of_both(residual, fleet.buckets)
        return wanted or 0, residual

    def first_bucket(self, route: Route, fleet: Fleet) -> tuple[int, Residual | None]:
        """Where one without any history starts: in the shortest bucket."""
        return 0, None

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        if not may_stay(route, fleet):
            return super().returned(route, fleet, terms)
        residual = self._residual(route)
        if residual is None:
            return self._stay(route, fleet, "unseen", None)
        wanted = bucket_of_both(residual, fleet.buckets)
        if wanted is None:
            return self._stay(route, fleet, "spread", residual)
        return self._go(route, fleet, terms, wanted, residual)

    def _residual(self, route: Route) -> Residual | None:
        states = [state_of(outcome) for outcome in route.outcomes]
        found = self.tree.estimate(route.task_id, states)
        return None if found is None else found.node.residual()

    def end(self, route: Route, *, finished: bool) -> None:
        if finished:
            states = [state_of(outcome) for outcome in route.outcomes]
            self.tree.insert(route.task_id, states, residuals_of(route), route.action_tokens)

    def dump(self) -> bytes:
        return FORMAT + self.tree.dump()

    def load(self, dumped: bytes) -> None:
        if not dumped:
            return
        if not dumped.startswith(FORMAT):
            raise ValueError("this is not the memory of a prefix tree of this version")
        self.tree.load(dumped[len(FORMAT) :])


class LaMlfq(Cmlfq):
    """As `Cmlfq`, but starts in the bucket of the expected length; see the module."""

    def first_bucket(self, route: Route, fleet: Fleet) -> tuple[int, Residual | None]:
        residual = self._residual(route)
        if residual is None:
            return 0, None
        return bucket_of(residual.mean, fleet.buckets), residual


class LengthAware(Bucketed):
    """By the length that the predictor expects at the start; see the module."""

    def __init__(self, params: RoutingParams, predictor: Predictor) -> None:
        self._params = params
        self._predictor = predictor

    def begin(self, route: Route) -> None:
        self._predictor.begin(route)

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        self._predictor.returned(route)
        return super().returned(route, fleet, terms)

    def wanted_at_start(self, route: Route, fleet: Fleet) -> tuple[int, Residual | None]:
        residual = self._params.possible(self._predictor.predict(route), route)
        expected = route.context_tokens + residual.mean
        return bucket_of(expected, fleet.buckets), residual

    def end(self, route: Route, *, finished: bool) -> None:
        self._predictor.end(route, finished=finished)

    def dump(self) -> bytes:
        return self._predictor.dump()

    def load(self, dumped: bytes) -> None:
        if dumped:
            self._predictor.load(dumped)


class Mlfq(Bucketed):
    """By the present length; see the module."""

    def wanted_at_start(self, route: Route, fleet: Fleet) -> tuple[int, Residual | None]:
        return bucket_of(route.context_tokens, fleet.buckets), None

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        if not may_stay(route, fleet):
            return super().returned(route, fleet, terms)
        wanted = bucket_of(route.context_tokens, fleet.buckets)
        names = [bucket.name for bucket in fleet.buckets]
        if wanted < names.index(fleet.workers[route.worker].bucket):  # Only ever down the queues.
            return self._stay(route, fleet, "stay", None)
        return self._go(route, fleet, terms, wanted, None)


def _nearest(wanted: int, count: int) -> list[int]:
    """Positions of buckets: the wanted one, the longer ones, then the shorter ones."""
    return [*range(wanted, count), *range(wanted - 1, -1, -1)]
