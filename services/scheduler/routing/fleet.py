"""The rollout workers as the scheduler knows them: by their reports, and by what it gave them.

All sums are kept as things change, so that a decision costs the same however much is running.
"""

from collections import Counter
from dataclasses import dataclass, field

from common.messages.scheduler import ReportWorker, WorkerStatus
from common.weights import NO_VERSION, lineage_of, step_of
from services.scheduler.routing.route import Route

MEAN_WEIGHT = 0.05
"""Of the newest trajectory in the running mean of final context lengths: about the last 20."""


@dataclass(frozen=True, slots=True)
class BucketShape:
    """A bucket as configured."""

    name: str
    tensor_parallel: int
    context_tokens_max: int
    """It is meant for trajectories that end with at most so long a context."""
    kv_tokens: int
    """KV cache of one worker."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a worker must fulfil to be given a trajectory now."""

    now: float
    heard_since: float
    """Workers that have not reported since get nothing new."""
    lineage: int
    oldest_step: int
    """The worker's weights must have seen so many optimizer steps of this lineage."""


@dataclass(slots=True, eq=False)
class Worker:
    """A rollout worker. Changed by the fleet only; policies read it."""

    peer: str
    name: str
    bucket: str = ""
    version: int = NO_VERSION
    slots: int = 0
    kv_tokens: int = 0
    """KV cache in all, by its last report."""
    kv_tokens_used: int = 0
    """By its last report."""
    running: int = 0
    """Requests in its engine's batch, by its last report."""
    waiting: int = 0
    """Requests that wait in its engine, by its last report."""
    decode_tokens: int = 0
    reporting: frozenset[str] = frozenset()
    """Trajectories that it said it holds."""
    draining: bool = False
    """It said that it takes no work any more; what it holds goes elsewhere."""
    refused: bool = False
    """It refused work, or cannot be sent any yet; it gets none until its next report, or until
    it is a member."""
    reported_at: float = 0.0
    routes: dict[str, Route] = field(default_factory=dict[str, Route])
    """What was placed on it and not taken back, by trajectory id, in order of placement."""
    context_tokens: int = 0
    """Sum over `routes`."""
    kv_expected: int = 0
    """Sum over `routes` of what their contexts will be at their ends."""
    groups: Counter[str] = field(default_factory=Counter[str])
    """Routes by group: siblings share the cached prompt."""

    @property
    def heard(self) -> bool:
        """Whether it has reported; after a restart it may be known by its trajectories only."""
        return self.slots > 0 or self.draining or self.version != NO_VERSION

    @property
    def willing(self) -> bool:
        """Whether it takes work at all, whatever weights are asked for."""
        return not self.draining and not self.refused and self.version >= 0

    @property
    def load(self) -> float:
        """Share of its KV cache that is, or will come to be, in use."""
        return self.kv_expected / max(1, self.kv_tokens)

    def takes(self, terms: Terms) -> bool:
        """Whether it may be given one more trajectory under these terms."""
        return (
            len(self.routes) < self.slots
            and self.willing
            and self.reported_at >= terms.heard_since
            and lineage_of(self.version) == terms.lineage
            and step_of(self.version) >= terms.oldest_step
        )


class Fleet:
    """All workers that hold something or have reported, by peer and by bucket."""

    def __init__(self, buckets: tuple[BucketShape, ...], tokens_expected: int) -> None:
        self.buckets = buckets
        """Shortest context range first."""
        self.workers: dict[str, Worker] = {}
        self.mean_context_tokens = float(tokens_expected)
        """Running mean of contexts at the end of a trajectory."""
        self.changed: dict[str, Worker] = {}
        """Workers, by peer, of which anything changed since the policy last looked; also those
        that are gone. The policy empties it; so a decision looks at few workers, not at all."""

    def put(self, route: Route, peer: str, name: str = "") -> None:
        """The worker holds the trajectory from now on. It must be on no other."""
        worker = self.workers.get(peer)
        if worker is None:
            worker = self.workers[peer] = Worker(peer, name or peer)
        assert route.trajectory_id not in worker.routes, route.trajectory_id
        route.worker = peer
        worker.routes[route.trajectory_id] = route
        worker.groups[route.group_id] += 1
        route.context_counted = route.kv_counted = 0
        self._count(route, worker)

    def take(self, route: Route) -> None:
        """No worker holds the trajectory any more. Fine when none did."""
        worker = self.workers.get(route.worker)
        route.worker = ""
        if worker is None or worker.routes.pop(route.trajectory_id, None) is None:
            return
        worker.context_tokens -= route.context_counted
        worker.kv_expected -= route.kv_counted
        siblings = worker.groups[route.group_id] - 1
        if siblings:
            worker.groups[route.group_id] = siblings
        else:
            del worker.groups[route.group_id]
        self.changed[worker.peer] = worker

    def recount(self, route: Route) -> None:
        """The trajectory has grown, or is expected to end elsewhere. Fine when none holds it."""
        worker = self.workers.get(route.worker)
        if worker is not None and route.trajectory_id in worker.routes:
            self._count(route, worker)

    def _count(self, route: Route, worker: Worker) -> None:
        context = route.prompt_tokens + route.action_tokens + route.observation_tokens
        expected = route.kv_expected
        if expected < context:  # Not by `max`: this runs twice for every tool return.
            route.kv_expected = expected = context
        worker.context_tokens += context - route.context_counted
        worker.kv_expected += expected - route.kv_counted
        route.context_counted, route.kv_counted = context, expected
        self.changed[worker.peer] = worker

    def remove(self, peer: str) -> list[Route]:
        """Forget a worker; returns what it held, which is on no worker now."""
        worker = self.workers.pop(peer, None)
        if worker is None:
            return []
        self.changed[peer] = worker
        for route in worker.routes.values():
            route.worker = ""
        return list(worker.routes.values())

    def report(self, peer: str, name: str, report: ReportWorker, now: float) -> Worker:
        """Note what a worker says of itself."""
        worker = self.workers.get(peer)
        if worker is None:
            worker = self.workers[peer] = Worker(peer, name)
        worker.bucket = report.bucket
        worker.version = report.version
        worker.slots = report.slots
        worker.kv_tokens = report.kv_tokens_used + report.kv_tokens_free
        worker.kv_tokens_used = report.kv_tokens_used
        worker.running = report.running
        worker.waiting = report.waiting
        worker.decode_tokens = report.decode_tokens
        worker.reporting = frozenset(report.holding)
        worker.draining = report.slots == 0
        worker.refused = False
        worker.reported_at = now
        self.changed[peer] = worker
        return worker

    def refuse(self, peer: str) -> None:
        """The worker took no work; it gets none until it reports again."""
        worker = self.workers.get(peer)
        if worker is not None:
            worker.refused = True
            self.changed[peer] = worker

    def welcome(self, peer: str) -> None:
        """It can be sent work from now on."""
        worker = self.workers.get(peer)
        if worker is not None:
            worker.refused = False
            self.changed[peer] = worker

    def forget(self, *, silent_since: float) -> None:
        """Forget workers that hold nothing and have not reported for long."""
        silent = [
            worker.peer
            for worker in self.workers.values()
            if not worker.routes and worker.reported_at < silent_since
        ]
        for peer in silent:
            self.remove(peer)

    @property
    def has_room(self) -> bool:
        """Whether some worker has a free slot."""
        return any(len(worker.routes) < worker.slots for worker in self.workers.values())

    def statuses(self) -> list[WorkerStatus]:
        """For people, by name."""
        return [
            WorkerStatus(
                name=worker.name,
                bucket=worker.bucket,
                version=worker.version,
                holding=len(worker.routes),
                kv_tokens_used=worker.kv_tokens_used,
                kv_tokens_free=worker.kv_tokens - worker.kv_tokens_used,
                decode_tokens=worker.decode_tokens,
            )
            for worker in sorted(self.workers.values(), key=lambda w: (w.name, w.peer))
            if worker.heard
        ]

    def learn_length(self, context_tokens: int) -> None:
        """Note how long a trajectory was at its end."""
        self.mean_context_tokens += MEAN_WEIGHT * (context_tokens - self.mean_context_tokens)

    def room_for(self, route: Route) -> int:
        """KV tokens that a trajectory of average length is expected to need at its end."""
        return max(1, round(self.mean_context_tokens), route.context_tokens)
