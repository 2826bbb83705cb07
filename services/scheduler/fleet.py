"""The rollout workers as the scheduler knows them: by their reports, and by what it gave them."""

from dataclasses import dataclass, field

from common.messages.scheduler import ReportWorker, WorkerStatus
from common.weights import NO_VERSION
from services.scheduler.placement import WorkerView
from services.scheduler.state import Trajectory

MEAN_WEIGHT = 0.05
"""Of the newest trajectory in the running mean of final context lengths: about the last 20."""


@dataclass(slots=True)
class Worker:
    """A rollout worker by its last report."""

    peer: str
    name: str
    bucket: str = ""
    version: int = NO_VERSION
    slots: int = 0
    kv_tokens_used: int = 0
    kv_tokens_free: int = 0
    decode_tokens: int = 0
    held: frozenset[str] = frozenset()
    """What it said it holds."""
    assigned: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """What was placed on it and not taken back, in order of placement."""
    draining: bool = False
    """It refused work; until its next report."""
    reported_at: float = 0.0

    @property
    def heard(self) -> bool:
        """Whether it has reported; after a restart it may be known by its trajectories only."""
        return self.slots > 0 or self.version != NO_VERSION


class Fleet:
    """All workers that hold something or have reported."""

    def __init__(self, tokens_expected: int) -> None:
        self.workers: dict[str, Worker] = {}
        self._tokens_mean = float(tokens_expected)

    def report(self, peer: str, name: str, report: ReportWorker, now: float) -> Worker:
        """Note what a worker says of itself."""
        worker = self._get(peer, name)
        worker.bucket = report.bucket
        worker.version = report.version
        worker.slots = report.slots
        worker.kv_tokens_used = report.kv_tokens_used
        worker.kv_tokens_free = report.kv_tokens_free
        worker.decode_tokens = report.decode_tokens
        worker.held = frozenset(report.holding)
        worker.draining = False
        worker.reported_at = now
        return worker

    def hold(self, trajectory: Trajectory) -> None:
        """Count the trajectory as held by the worker that its row names."""
        peer = trajectory.row.worker
        name = peer.split("/")[2] if peer.count("/") == 3 else peer
        self._get(peer, name).assigned[trajectory.row.trajectory_id] = trajectory

    def release(self, trajectory: Trajectory) -> None:
        """The trajectory is on no worker any more."""
        worker = self.workers.get(trajectory.row.worker)
        if worker is not None:
            worker.assigned.pop(trajectory.row.trajectory_id, None)

    def remove(self, peer: str) -> list[Trajectory]:
        """Forget a worker; returns what it held."""
        worker = self.workers.pop(peer, None)
        return list(worker.assigned.values()) if worker is not None else []

    def forget(self, *, silent_since: float) -> None:
        """Forget workers that hold nothing and have not reported for long."""
        for peer in [
            w.peer for w in self.workers.values() if not w.assigned and w.reported_at < silent_since
        ]:
            del self.workers[peer]

    def learn_length(self, context_tokens: int) -> None:
        """Note how long a trajectory was at its end."""
        self._tokens_mean += MEAN_WEIGHT * (context_tokens - self._tokens_mean)

    def expected_tokens(self, trajectory: Trajectory) -> int:
        """KV tokens that the trajectory is expected to need at its end."""
        return max(1, round(self._tokens_mean), trajectory.row.context_tokens)

    @property
    def has_room(self) -> bool:
        """Whether some worker has a free slot."""
        return any(len(worker.assigned) < worker.slots for worker in self.workers.values())

    def views(self, *, heard_since: float) -> dict[str, WorkerView]:
        """Workers with free slots, for placement, by peer. Silent ones get nothing new."""
        return {
            worker.peer: self._view(worker)
            for worker in self.workers.values()
            if worker.heard
            and worker.reported_at >= heard_since
            and len(worker.assigned) < worker.slots
        }

    def _view(self, worker: Worker) -> WorkerView:
        to_come = 0
        for trajectory_id, trajectory in worker.assigned.items():
            to_come += self.expected_tokens(trajectory)
            if trajectory_id in worker.held:  # The report counts what it uses already.
                to_come -= trajectory.row.context_tokens
        return WorkerView(
            peer=worker.peer,
            name=worker.name,
            bucket=worker.bucket,
            version=worker.version,
            slots_free=worker.slots - len(worker.assigned),
            kv_tokens=worker.kv_tokens_used + worker.kv_tokens_free,
            kv_tokens_used=worker.kv_tokens_used,
            kv_tokens_expected=to_come,
            draining=worker.draining,
        )

    def _get(self, peer: str, name: str) -> Worker:
        return self.workers.setdefault(peer, Worker(peer, name))

    def statuses(self) -> list[WorkerStatus]:
        """For people, by name."""
        return [
            WorkerStatus(
                name=worker.name,
                bucket=worker.bucket,
                version=worker.version,
                holding=len(worker.assigned),
                kv_tokens_used=worker.kv_tokens_used,
                kv_tokens_free=worker.kv_tokens_free,
                decode_tokens=worker.decode_tokens,
            )
            for worker in sorted(self.workers.values(), key=lambda w: (w.name, w.peer))
            if worker.heard
        ]
