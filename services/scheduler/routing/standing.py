"""Where each worker stands: its expected step time and cache use, kept as the fleet changes.

A decision looks at the best worker of each bucket, not at all workers. That one is found in a
list of scores that is updated for the workers that changed; a search through such a list is one
call and costs less than keeping a heap.
"""

from math import inf

from common.weights import NO_VERSION, lineage_of, step_of
from services.scheduler.routing.fleet import Fleet, Terms, Worker
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.speeds import Speeds, StepTime

GROWTH_SHARE = 0.6
"""Of the growth still expected of all trajectories on a worker, what it must hold at once: they
do not all reach their ends together."""
PRESSED_FROM = 0.85
"""Share of the cache from which an engine is taken to be slowed by preemption now and then…"""
PRESSED_BY = 4.0
"""…by so much times the square of what is beyond it."""
DUTY_GUESS = 0.8
"""Share of its trajectories that are in an engine's batch, the others being at their tools."""
DUTY_WEIGHT = 0.02
REFRESHED_EVERY = 16
"""New speed estimates between two looks at every worker; changed ones are looked at anyway."""


class Standing:
    """One worker as the costs see it."""

    __slots__ = (
        "bucket",
        "closed",
        "kv_tokens",
        "lineage",
        "peer",
        "position",
        "running",
        "share",
        "slower",
        "spoken",
        "step",
        "step_s",
        "version",
        "worker",
    )

    def __init__(self, worker: Worker, bucket: "BucketStanding", position: int) -> None:
        self.worker = worker
        self.peer = worker.peer
        self.bucket = bucket
        self.position = position
        self.closed = False
        """Gets nothing new until its cache has emptied to `kv_low`."""
        self.running = 0.0
        """Requests that are expected in its batch."""
        self.step_s = 0.0
        """Of a decoding step as things are."""
        self.slower = 1.0
        self.spoken = 0.0
        """KV tokens used or spoken for."""
        self.kv_tokens = 1
        self.share = 0.0
        """`spoken` by all."""
        self.version = NO_VERSION
        self.lineage = self.step = -1
        """Of its weights."""

    def fulfils(self, terms: Terms) -> bool:
        """What `Worker.takes` asks beyond what its score says already: news and weights."""
        return (
            self.worker.reported_at >= terms.heard_since
            and self.lineage == terms.lineage
            and self.step >= terms.oldest_step
        )


class BucketStanding:
    """The workers of one bucket."""

    __slots__ = ("duty", "name", "scores", "time", "workers")

    def __init__(self, name: str, time: StepTime) -> None:
        self.name = name
        self.time = time
        self.duty = DUTY_GUESS
        self.workers: list[Standing] = []
        self.scores: list[float] = []
        """By position in `workers`, lower is better; infinite for one that takes nothing."""

    def best(self, terms: Terms) -> Standing | None:
        """The worker with the best score that may be given a trajectory under these terms."""
        scores = self.scores
        score = min(scores) if scores else inf
        if score == inf:
            return None
        found = self.workers[scores.index(score)]
        if found.fulfils(terms):
            return found
        for score, position in sorted(zip(scores, range(len(scores)), strict=True)):
            found = self.workers[position]
            if score < inf and found.fulfils(terms):
                return found
        return None

    def better(self, terms: Terms, here: Standing) -> Standing | None:
        """As `best`, but only one that is faster than `here`, which is of this bucket, too."""
        scores, position = self.scores, here.position
        own, scores[position] = scores[position], inf
        found = self.best(terms)
        scores[position] = own
        # What joins makes it slower still, so one that is no faster now never pays.
        return found if found is not None and found.step_s < here.step_s else None


class Standings:
    """All workers by bucket, and by peer."""

    def __init__(self, params: RoutingParams, speeds: Speeds) -> None:
        self._params = params
        self._speeds = speeds
        self._refreshed_at = -1
        self._fleet: Fleet | None = None
        self.buckets: list[BucketStanding] = []
        self.by_peer: dict[str, Standing] = {}

    def follow(self, fleet: Fleet) -> None:
        """Take in what changed since the last look."""
        if fleet is not self._fleet:
            self._rebuild(fleet)
        if fleet.changed:
            for peer, worker in fleet.changed.items():
                standing = self.by_peer.get(peer)
                if (
                    standing is None
                    or standing.worker is not worker
                    or standing.bucket.name != worker.bucket
                    or peer not in fleet.workers
                ):
                    self._rebuild(fleet)
                    break
                self._refresh(standing)
            fleet.changed.clear()
        if self._speeds.revision >= self._refreshed_at:
            self._refresh_all()

    def requests_seen(self, peer: str, running: int) -> None:
        """So many requests were in the worker's batch: learn the share of those at their tools."""
        standing = self.by_peer.get(peer)
        if standing is not None and standing.worker.routes:
            duty = min(1.0, running / len(standing.worker.routes))
            standing.bucket.duty += DUTY_WEIGHT * (duty - standing.bucket.duty)

    def _rebuild(self, fleet: Fleet) -> None:
        """Workers came, left or changed sides; rare."""
        if fleet is not self._fleet:
            self._fleet = fleet
            self._speeds.add(fleet.buckets)
        old = {bucket.name: bucket for bucket in self.buckets}
        closed = {peer for peer, standing in self.by_peer.items() if standing.closed}
        self._speeds.forget(peer for peer in self.by_peer if peer not in fleet.workers)
        self.by_peer = {}
        buckets: dict[str, BucketStanding] = {}
        for shape in fleet.buckets:
            bucket = buckets[shape.name] = BucketStanding(shape.name, self._speeds.of(shape.name))
            if shape.name in old:
                bucket.duty = old[shape.name].duty
        for worker in sorted(fleet.workers.values(), key=lambda w: (w.name, w.peer)):
            bucket = buckets.get(worker.bucket)
            if bucket is None:
                bucket = buckets[worker.bucket] = BucketStanding(
                    worker.bucket, self._speeds.of(worker.bucket)
                )
            standing = Standing(worker, bucket, len(bucket.workers))
            standing.closed = worker.peer in closed
            bucket.workers.append(standing)
            bucket.scores.append(inf)
            self.by_peer[worker.peer] = standing
        self.buckets = list(buckets.values())
        self._refresh_all()

    def _refresh_all(self) -> None:
        revision = self._speeds.revision
        self._refreshed_at = revision + min(REFRESHED_EVERY, 1 + revision // 4)
        for bucket in self.buckets:
            bucket.time = self._speeds.of(bucket.name)
            for standing in bucket.workers:
                standing.slower = self._speeds.slower.get(standing.peer, 1.0)
                self._refresh(standing)

    def _refresh(self, standing: Standing) -> None:
        worker, bucket = standing.worker, standing.bucket
        time, context = bucket.time, worker.context_tokens
        held = len(worker.routes)
        duty = bucket.duty
        standing.running = running = duty * held
        standing.step_s = step_s = (
            time.fixed_s + time.per_request_s * running + time.per_kv_token_s * duty * context
        ) * standing.slower
        version = worker.version
        if version != standing.version:
            standing.version = version
            if version != NO_VERSION:  # Without weights it sleeps, and takes no work.
                standing.lineage, standing.step = lineage_of(version), step_of(version)
        standing.kv_tokens = kv_tokens = worker.kv_tokens or 1
        standing.spoken = spoken = context + GROWTH_SHARE * (worker.kv_expected - context)
        standing.share = share = spoken / kv_tokens
        if standing.closed:
            standing.closed = share > self._params.kv_low and held > 0
        elif share > self._params.kv_high:
            standing.closed = True
        if standing.closed or held >= worker.slots or not worker.willing:
            bucket.scores[standing.position] = inf
            return
        pressed = share - PRESSED_FROM
        if pressed > 0:
            step_s *= 1 + PRESSED_BY * pressed * pressed
        bucket.scores[standing.position] = step_s
