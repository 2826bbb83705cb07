"""Policies that look at the workers only, never at what a trajectory may still need.

Also what every policy does when a trajectory cannot stay where it is.
"""

from collections.abc import Iterable

from services.scheduler.routing.fleet import Fleet, Terms, Worker
from services.scheduler.routing.policy import Decision, MoveMeasure, TurnMeasure
from services.scheduler.routing.route import Route


def may_stay(route: Route, fleet: Fleet) -> bool:
    """Whether the worker that the trajectory is on lives and does not drain."""
    worker = fleet.workers.get(route.worker)
    return worker is not None and not worker.draining and worker.slots > 0


def least_loaded(workers: Iterable[Worker], kv_tokens: int) -> Worker | None:
    """The worker that will have the smallest share of its KV cache in use; ties by name."""
    return min(
        workers,
        key=lambda worker: (
            (worker.kv_expected + kv_tokens) / max(1, worker.kv_tokens),
            worker.name,
            worker.peer,
        ),
        default=None,
    )


class Unlearned:
    """The part of a policy that learns nothing, keeps nothing and never moves what may stay."""

    def begin(self, route: Route) -> None:
        """Nothing to note."""

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        """Left to the policies."""
        raise NotImplementedError

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        if may_stay(route, fleet):
            return Decision(route.worker, "stay", kv_expected=fleet.room_for(route))
        decision = self.place(route, fleet, terms)
        return None if decision is None else decision._replace(reason="draining")

    def end(self, route: Route, *, finished: bool) -> None:
        """Nothing to learn."""

    def turn_measured(self, measure: TurnMeasure) -> None:
        """Nothing to learn."""

    def move_measured(self, measure: MoveMeasure) -> None:
        """Nothing to learn."""

    def dump(self) -> bytes:
        return b""

    def load(self, dumped: bytes) -> None:
        if dumped:
            raise ValueError("this policy learns nothing, so this is not its memory")


class LeastLoad(Unlearned):
    """The worker with the smallest share of its KV cache used or spoken for; never moves."""

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        needed = fleet.room_for(route)
        fitting = (worker for worker in fleet.workers.values() if worker.takes(terms))
        worker = least_loaded(fitting, needed)
        return None if worker is None else Decision(worker.peer, "load", kv_expected=needed)


class RoundRobin(Unlearned):
    """The workers in turn, by name, those that take nothing left out; never moves."""

    def __init__(self) -> None:
        self._last = ("", "")

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        fitting = sorted((w.name, w.peer) for w in fleet.workers.values() if w.takes(terms))
        if not fitting:
            return None
        self._last = next((worker for worker in fitting if worker > self._last), fitting[0])
        return Decision(self._last[1], "turn", kv_expected=fleet.room_for(route))
