"""The simulated scheduler process: the desk's messages with the time that they take.

A reply leaves when its rows are durable, work is done when something changed and at every tick, and
a move is offered to its target while the worker that reported the turn waits: as in production.
"""

from collections.abc import Callable

from common.messages.scheduler import BatchOffer, ReportWorker, TurnFinished
from services.scheduler.rules import GATHER_S
from services.scheduler.state import Assign, TurnReply
from services.simulator.desk import Desk
from services.simulator.measures import Measures
from services.simulator.network import Network
from services.simulator.scripts import Scripts
from services.simulator.timeline import Timeline
from services.simulator.worker import SimWorker

COMMIT_S = 0.002
"""Until rows are durable, with the others that share the transaction."""
TICK_S = 1.0
HANGS_AFTER_S = 20_000.0
"""Without any turn: longer than all turns, tools and train steps."""
MOVE_TIMEOUT_S = 2.0
"""A target that has not answered by then is silent."""
ASSIGN_TIMEOUT_S = 5.0


class Office:
    """See the module."""

    node = 0

    def __init__(
        self, timeline: Timeline, network: Network, desk: Desk, scripts: Scripts, measures: Measures
    ) -> None:
        self.workers: dict[str, SimWorker] = {}
        self.last_turn_at = 0.0
        self._timeline = timeline
        self._network = network
        self._desk = desk
        self._scripts = scripts
        self._measures = measures
        self._work_set = False
        self._work_after = 0.0
        self._asked: Callable[[BatchOffer], None] | None = None
        self._seen_changes = -1
        """Of groups, when the batch that was asked for was last looked for."""

    # ── work ─────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """Look after the leases, once a second."""
        if self._timeline.now - self.last_turn_at > HANGS_AFTER_S:
            self._timeline.stop()
        self._timeline.after(TICK_S, self.tick)
        self._desk.expire(self._timeline.now)
        self.beat(GATHER_S)

    def beat(self, gather_s: float = 0.0) -> None:
        """Something has changed: work, but not before the last work is durable."""
        if not self._work_set:
            self._work_set = True
            self._timeline.at(max(self._work_after, self._timeline.now + gather_s), self._work)

    def _work(self) -> None:
        self._work_set = False
        self._work_after = self._timeline.now + COMMIT_S
        for order in self._desk.work(self._timeline.now):
            route = self._desk.route(order.trajectory.trajectory_id)
            self._measures.placed(order, route)
            worker = self.workers[order.peer]
            delay_s = COMMIT_S + self._latency_s(worker)
            self._timeline.after(delay_s, self._assign, order, worker)
        if self._asked is not None and self._desk.group_changes > self._seen_changes:
            self._offer_batch()

    def _latency_s(self, worker: SimWorker) -> float:
        return self._network.latency_s(self.node, worker.plan.node)

    def _assign(self, order: Assign, worker: SimWorker) -> None:
        if worker.dead:
            self._timeline.after(ASSIGN_TIMEOUT_S, self._unplaced, order, "unreachable")
            return
        refusal = worker.assign(order, self._scripts.of(order.trajectory.trajectory_id))
        if refusal is not None:
            self._timeline.after(self._latency_s(worker), self._unplaced, order, refusal.value)

    def _unplaced(self, order: Assign, reason: str) -> None:
        self._desk.assignment_failed(order, reason, self._timeline.now)
        self.beat()

    # ── workers ──────────────────────────────────────────────────────────────────────────────

    def worker_reported(self, worker: SimWorker, report: ReportWorker) -> None:
        """A report has arrived."""
        now = self._timeline.now
        drop = self._desk.report(worker.plan.peer, worker.plan.name, report, now)
        if drop:
            self._timeline.after(self._latency_s(worker), worker.let_go, drop)
        self.beat(GATHER_S)

    def worker_gone(self, worker: SimWorker) -> None:
        """The coordinator has noticed that a worker ended."""
        self._desk.worker_gone(worker.plan.peer, self._timeline.now)
        self.beat()

    def turn_finished(self, worker: SimWorker, turn: TurnFinished) -> None:
        """A turn has arrived: answer once it is durable and, if it moves, somebody has it."""
        self.last_turn_at = self._timeline.now
        reply = self._desk.turn(worker.plan.peer, turn, self._timeline.now)
        if reply is None:
            self._reply(worker, turn.trajectory_id, TurnReply(go_on=False), 0.0)
            return
        script, route = self._scripts.of(turn.trajectory_id), self._desk.route(turn.trajectory_id)
        self._measures.returned(turn, script, route, worker.plan.peer)
        if reply.move is not None:
            target = self.workers[reply.move.peer]
            delay_s = COMMIT_S + self._latency_s(target)
            self._timeline.after(delay_s, self._offer_move, reply.move, worker, target)
            return
        self._reply(worker, turn.trajectory_id, reply, COMMIT_S)
        if not reply.go_on:
            self.beat()

    def _reply(
        self, worker: SimWorker, trajectory_id: str, reply: TurnReply, delay_s: float
    ) -> None:
        delay_s += self._latency_s(worker)
        self._timeline.after(delay_s, worker.answered, trajectory_id, reply)

    def _offer_move(self, order: Assign, source: SimWorker, target: SimWorker) -> None:
        if target.dead:
            self._timeline.after(MOVE_TIMEOUT_S, self._move_refused, order, source, "unreachable")
            return
        refusal = target.assign(order, self._scripts.of(order.trajectory.trajectory_id))
        latency_s = self._latency_s(target)
        if refusal is None:
            self._timeline.after(latency_s, self._move_accepted, order, source)
        else:
            self._timeline.after(latency_s, self._move_refused, order, source, refusal.value)

    def _move_accepted(self, order: Assign, source: SimWorker) -> None:
        row = order.trajectory
        reply = self._desk.move_accepted(order, self._timeline.now)
        if not reply.go_on:
            self._measures.moved(row)
        self._reply(source, row.trajectory_id, reply, COMMIT_S)

    def _move_refused(self, order: Assign, source: SimWorker, reason: str) -> None:
        reply = self._desk.move_refused(order, reason, self._timeline.now)
        self._reply(source, order.trajectory.trajectory_id, reply, COMMIT_S)
        self.beat()

    # ── the trainer ──────────────────────────────────────────────────────────────────────────

    def take_batch(self, told: Callable[[BatchOffer], None]) -> None:
        """The trainer asks for its next batch; it is told when there is one, or never will be."""
        self._asked = told
        self._offer_batch()

    def _offer_batch(self) -> None:
        assert self._asked is not None
        self._seen_changes = self._desk.group_changes
        offer = self._desk.take_batch(self._timeline.now)
        if offer.group_ids or offer.exhausted:
            told, self._asked = self._asked, None
            self._timeline.after(COMMIT_S + self._network.across_s, told, offer)
            self.beat()

    def step_finished(self, group_ids: list[str], told: Callable[[bool], None]) -> None:
        """A step was trained; the trainer is told whether it was the last."""
        stop = self._desk.step_finished(group_ids, self._timeline.now)
        self._timeline.after(COMMIT_S + self._network.across_s, told, stop)
        self.beat()
