"""A book with its ledger, workers and trainer in memory: no loop, no network, time as a number."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from common.errors import RequestRefused
from common.messages.scheduler import (
    ReportWorker,
    StepFinished,
    StepRecorded,
    TrajectoryResult,
    TurnFinished,
)
from common.trajectory import FailureKind, StopReason, ToolStatus, pack_logprobs, pack_tokens
from common.weights import version_id
from services.scheduler.book import Book
from services.scheduler.ledger import MemoryLedger, trained_after
from services.scheduler.routing.baselines import LeastLoad, least_loaded, may_stay
from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.policy import Decision, Policy
from services.scheduler.routing.route import Route
from services.scheduler.rules import Rules
from services.scheduler.state import Assign, Notice, Outcome, TurnReply
from services.scheduler.tasks import TaskOrder

RULES = Rules(
    seed=0,
    max_steps=1000,
    failed_groups_max=1000,
    groups_per_step=2,
    group_size=2,
    group_usable_min=2,
    filters_zero_variance=True,
    max_staleness_steps=1,
    placements_max=1000,
    attempts_max=3,
    lease_s=5.0,
    turn_timeout_s=100.0,
    tokens_expected=10,
)


def make_turn(
    trajectory_id: str,
    lease: int,
    turn: int = 0,
    *,
    version: int = 0,
    result: TrajectoryResult | None = None,
    versions: list[int] | None = None,
) -> TurnFinished:
    """A turn of two action tokens; one with an observation unless it is the last."""
    made = versions or [version, version]
    return TurnFinished(
        trajectory_id=trajectory_id,
        lease=lease,
        turn=turn,
        prompt_tokens=pack_tokens([1, 2, 3]) if turn == 0 else b"",
        session_id=f"session-{trajectory_id}",
        tool_server="tools",
        action_tokens=pack_tokens([10 + turn] * len(made)),
        action_logprobs=pack_logprobs([-0.5] * len(made)),
        action_versions=pack_tokens(made),
        observation_tokens=b"" if result else pack_tokens([7]),
        tool="" if result else "calculator",
        tool_status=None if result else ToolStatus.OK,
        tool_latency_s=0.1,
        decode_s=0.2,
        queue_s=0.0,
        result=result,
    )


def reward(value: float) -> TrajectoryResult:
    return TrajectoryResult(stop_reason=StopReason.ANSWERED, reward=value)


def failure(kind: FailureKind = FailureKind.TOOL, detail: str = "it broke") -> TrajectoryResult:
    return TrajectoryResult(stop_reason=None, reward=None, failure=kind, detail=detail)


def make_report(holding: list[str], *, version: int = 0, slots: int = 8) -> ReportWorker:
    return ReportWorker(
        bucket="short",
        version=version,
        kv_tokens_used=10 * len(holding),
        kv_tokens_free=1000 - 10 * len(holding),
        slots=slots,
        holding=holding,
        decode_tokens=0,
    )


@dataclass
class Held:
    """A trajectory on a worker: its lease, the turn to do next, the weights it began that with."""

    lease: int
    turn: int
    version: int
    waits: bool = False
    """It has reported its turn, and waits for the end of a move."""

    def finish(
        self, trajectory_id: str, version: int, result: TrajectoryResult | None = None
    ) -> TurnFinished:
        """The turn, begun with one version and ended with a maybe newer one."""
        versions = [self.version, version]
        return make_turn(trajectory_id, self.lease, self.turn, versions=versions, result=result)


@dataclass
class SimWorker:
    """What a rollout worker remembers."""

    name: str
    incarnation: int = 0
    version: int = -1
    slots: int = 8
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        return f"run/rollout/{self.name}/{self.incarnation:04d}"

    @property
    def at_work(self) -> list[str]:
        """What it may report a turn of."""
        return [trajectory_id for trajectory_id, held in self.held.items() if not held.waits]


@dataclass
class PendingMove:
    """A move that its target has not answered, with the turn that its source waits for."""

    order: Assign
    source: str
    turn: TurnFinished


class Restless(LeastLoad):
    """Moves whatever can be moved, at most tool returns."""

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        others = [w for w in fleet.workers.values() if w.takes(terms) and w.peer != route.worker]
        target = least_loaded(others, 1)
        stays = may_stay(route, fleet)
        luck = random.Random(f"{route.trajectory_id}/{route.turns}").random()
        if target is None or (stays and luck < 0.3):
            return Decision(route.worker, "stay") if stays else None
        return Decision(target.peer, "restless" if stays else "draining")


class Desk:
    """The scheduler without its service: events in, rows into the ledger, orders to the workers."""

    def __init__(
        self,
        rules: Rules = RULES,
        *,
        tasks: int = 20,
        epochs: int = 1,
        make_policy: Callable[[], Policy] = LeastLoad,
        slow_moves: bool = False,
    ) -> None:
        self.slow_moves = slow_moves
        """Moves stay pending until `settle`."""
        self.pending: list[PendingMove] = []
        self.rules = rules
        self.make_policy = make_policy
        self.ids = [f"t{number}" for number in range(tasks)]
        self.epochs = epochs
        self.ledger = MemoryLedger()
        self.now = 0.0
        self.workers = {name: SimWorker(name) for name in ("w0", "w1")}
        self.notices: list[Notice] = []
        self.lines: list[dict[str, float]] = []
        self.lost: set[str] = set()
        """Workers that do not get what is sent to them."""
        self.trainers = 0
        self.ghosts: list[tuple[str, TurnFinished]] = []
        """Turns that killed workers may still report, with their peer."""
        self.open()

    def open(self) -> None:
        """Start, or start again after a kill: all memory is gone, the ledger is there."""
        order = TaskOrder(self.ids, seed=self.rules.seed, epochs=self.epochs)
        self.book = Book(
            self.rules, order, self.ledger.snapshot(), self.make_policy(), now=self.now
        )
        pending, self.pending = self.pending, []
        for move in pending:
            self._retry(move)

    def close(self) -> None:
        self.ledger.close()

    def carry_out(self, outcome: Outcome) -> None:
        self.ledger.apply(outcome.rows)
        self.notices += outcome.notices
        if outcome.line:
            self.lines.append(json.loads(outcome.line))
        for order in outcome.orders:
            self._deliver(order)

    def _deliver(self, order: Assign) -> None:
        worker = self.worker_at(order.peer)
        if worker is not None and worker.name not in self.lost:
            row = order.trajectory
            worker.held[row.trajectory_id] = Held(row.lease, row.turns, worker.version)

    def worker_at(self, peer: str) -> SimWorker | None:
        return next((w for w in self.workers.values() if w.peer == peer), None)

    # ── workers ──────────────────────────────────────────────────────────────────────────────

    def report(self, name: str) -> list[str]:
        worker = self.workers[name]
        message = make_report(list(worker.held), version=worker.version, slots=worker.slots)
        drop, outcome = self.book.worker_reported(worker.peer, name, message, self.now)
        self.carry_out(outcome)
        for trajectory_id in drop:
            del worker.held[trajectory_id]
        return drop

    def send_turn(self, peer: str, turn: TurnFinished) -> bool | str:
        """Whether to go on, or the code of the refusal, or `moving`."""
        try:
            reply, outcome = self.book.turn_finished(peer, turn, self.now)
        except RequestRefused as refused:
            return refused.refusal.value
        self.carry_out(outcome)
        if reply.move is not None:
            move = PendingMove(reply.move, peer, turn)
            if self.slow_moves:
                self.pending.append(move)
                return "moving"
            reply = self.end_move(move, accepted=self.reachable(reply.move))
        held = self.holding(peer, turn.trajectory_id)
        if reply.go_on and held is not None:
            held.lease = reply.lease
        return reply.go_on

    def reachable(self, order: Assign) -> bool:
        target = self.worker_at(order.peer)
        return target is not None and target.name not in self.lost and target.slots > 0

    def end_move(self, move: PendingMove, *, accepted: bool, late: bool = False) -> TurnReply:
        """The target accepts, refuses, or (`late`) accepts when nobody waits for it any more."""
        if (accepted or late) and self.reachable(move.order):
            self._deliver(move.order)
        if accepted:
            reply, outcome = self.book.move_accepted(move.order, self.now)
        else:
            reply, outcome = self.book.move_refused(move.order, "silent", self.now)
        self.carry_out(outcome)
        return reply

    def settle(self, move: PendingMove, *, accepted: bool, late: bool = False) -> None:
        """End a pending move and tell its source."""
        self.pending.remove(move)
        accepted = accepted and self.reachable(move.order)
        self._tell(move, self.end_move(move, accepted=accepted, late=late))

    def settle_all(self) -> None:
        for move in list(self.pending):
            self.settle(move, accepted=True)

    def _tell(self, move: PendingMove, reply: TurnReply) -> None:
        held = self.holding(move.source, move.turn.trajectory_id)
        worker = self.worker_at(move.source)
        if worker is None or held is None or not held.waits:
            return
        if reply.go_on:
            worker.held[move.turn.trajectory_id] = Held(
                reply.lease, move.turn.turn + 1, worker.version
            )
        else:
            del worker.held[move.turn.trajectory_id]

    def _retry(self, move: PendingMove) -> None:
        """The scheduler died while the source waited: the turn is said again to the new one."""
        answer = self.send_turn(move.source, move.turn)
        self._tell(move, TurnReply(answer is True, move.turn.lease))

    def holding(self, peer: str, trajectory_id: str) -> Held | None:
        worker = self.worker_at(peer)
        return None if worker is None else worker.held.get(trajectory_id)

    def turn(self, name: str, trajectory_id: str, result: TrajectoryResult | None = None) -> object:
        """The worker finishes a turn with its present weights."""
        worker = self.workers[name]
        held = worker.held[trajectory_id]
        turn = held.finish(trajectory_id, worker.version, result)
        answer = self.send_turn(worker.peer, turn)
        if answer is True:
            held.turn, held.version = held.turn + 1, worker.version
        elif answer == "moving":
            held.waits = True
        else:
            worker.held.pop(trajectory_id, None)
        return answer

    def kill(self, name: str, *, noticed: bool = True) -> None:
        """SIGKILL and restart: a new incarnation with the newest weights and no memory."""
        old = self.workers[name]
        self.ghosts += [(old.peer, held.finish(i, old.version)) for i, held in old.held.items()]
        self.workers[name] = SimWorker(name, old.incarnation + 1, old.version, old.slots)
        if noticed:
            self.carry_out(self.book.worker_gone(old.peer, self.now))

    def work(self) -> None:
        """What the service does when something changed."""
        self.carry_out(self.book.expire(self.now))
        self.carry_out(self.book.advance(self.now))

    def publish(self, *names: str) -> None:
        """Workers, or all of them, apply the newest version."""
        newest = version_id(max(0, self.book.lineage.number), self.book.step)
        for name in names or self.workers:
            self.workers[name].version = newest

    # ── the trainer ──────────────────────────────────────────────────────────────────────────

    def begin(self, step: int = 0) -> None:
        """A new trainer loads the state after `step`."""
        self.trainers += 1
        trainer = f"run/trainer/trainer/{self.trainers:04d}"
        later = trained_after(step)(self.ledger._store)
        self.carry_out(self.book.begin_lineage(trainer, step, later, self.now))

    def take(self, step: int | None = None, lineage: int | None = None) -> list[str]:
        number = self.book.lineage.number if lineage is None else lineage
        wanted = self.book.step + 1 if step is None else step
        self.offer, outcome = self.book.take_batch(number, wanted, self.now)
        self.carry_out(outcome)
        return self.offer.group_ids

    def finish(self, group_ids: list[str], *, skipped: str = "") -> StepRecorded:
        self.finished = StepFinished(
            lineage=self.book.lineage.number,
            step=self.book.step + 1,
            attempt=self.book.attempt,
            skipped=skipped,
            group_ids=group_ids,
            metrics={"loss/mean": 0.5},
        )
        return self.say_finished(self.finished)

    def say_finished(self, finished: StepFinished) -> StepRecorded:
        reply, outcome = self.book.step_finished(finished, {}, self.now)
        self.carry_out(outcome)
        return reply

    # ── to the end ───────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Trainer begun, workers ready, first work placed."""
        self.begin()
        self.publish()
        for name in self.workers:
            self.report(name)
        self.work()

    def round(self, pick: random.Random, *, failing: float = 0.0) -> None:
        """Everybody does a bit of everything."""
        self.now += 1.0
        for name in list(self.workers):
            self.report(name)
        self.work()
        self.settle_all()
        for name, worker in self.workers.items():
            for trajectory_id in worker.at_work:
                if pick.random() < 0.6:
                    continue
                result = None
                if pick.random() < 0.5:
                    result = failure() if pick.random() < failing else reward(pick.randint(0, 1))
                self.turn(name, trajectory_id, result)
        self.work()
        groups = self.take()
        if groups:
            self.finish(groups)
            self.publish()

    def run_to_end(self, pick: random.Random, *, rounds: int = 2000) -> None:
        """Play fair until no batch can come any more."""
        for _ in range(rounds):
            self.round(pick)
            if self.offer.exhausted:
                return
        raise AssertionError(f"did not end; waits for: {self.offer.waiting_for}")

    # ── what is in the ledger ────────────────────────────────────────────────────────────────

    def table(self, sql: str) -> list[tuple]:
        return self.ledger._store.rows(sql)

    def warnings(self, event: str) -> list[Notice]:
        return [notice for notice in self.notices if notice.event == event]


def with_rules(**changes: object) -> Rules:
    return replace(RULES, **changes)
