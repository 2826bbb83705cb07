"""The one place of the simulator that talks to the scheduler's book.

It stands where `SchedulerService` stands in production: it hands messages to the book and carries
its decisions out, at once and without a loop. Nothing is decided here.
"""

from collections.abc import Callable

from common.errors import RequestRefused
from common.messages.scheduler import BatchOffer, ReportWorker, StepFinished, TurnFinished
from services.scheduler.book import Book
from services.scheduler.records import Row, Snapshot
from services.scheduler.routing.policy import Policy
from services.scheduler.routing.route import Route
from services.scheduler.rules import Rules
from services.scheduler.state import Assign, Outcome, TurnReply
from services.scheduler.tasks import TaskOrder

TRAINER = "sim/trainer/trainer/0001"


class Desk:
    """A book, and somebody who is shown all rows that it writes."""

    def __init__(
        self, rules: Rules, order: TaskOrder, policy: Policy, on_rows: Callable[[list[Row]], None]
    ) -> None:
        self.book = Book(rules, order, Snapshot(), policy, now=0.0)
        self._on_rows = on_rows
        self._note(self.book.begin_lineage(TRAINER, 0, ([], []), 0.0))

    def _note(self, outcome: Outcome) -> list[Assign]:
        if outcome.rows:
            self._on_rows(outcome.rows)
        return outcome.orders

    def report(self, peer: str, name: str, report: ReportWorker, now: float) -> list[str]:
        """Hand in a worker's report; returns what it must let go."""
        drop, outcome = self.book.worker_reported(peer, name, report, now)
        self._note(outcome)
        return drop

    def turn(self, peer: str, turn: TurnFinished, now: float) -> TurnReply | None:
        """Hand in a turn; None when it was refused."""
        try:
            reply, outcome = self.book.turn_finished(peer, turn, now)
        except RequestRefused:
            return None
        self._note(outcome)
        return reply

    def move_accepted(self, order: Assign, now: float) -> TurnReply:
        """The target of a move has the trajectory; returns what the source is told."""
        reply, outcome = self.book.move_accepted(order, now)
        self._note(outcome)
        return reply

    def move_refused(self, order: Assign, reason: str, now: float) -> TurnReply:
        """The target has not taken it; returns what the source is told."""
        reply, outcome = self.book.move_refused(order, reason, now)
        self._note(outcome)
        return reply

    def assignment_failed(self, order: Assign, reason: str, now: float) -> None:
        """A worker has not taken a trajectory that waited."""
        self._note(self.book.assignment_failed(order, reason, now, lost=False))

    def worker_gone(self, peer: str, now: float) -> None:
        """A worker's process has ended."""
        self._note(self.book.worker_gone(peer, now))

    def work(self, now: float) -> list[Assign]:
        """Admit and place; returns what is to be sent."""
        return self._note(self.book.advance(now))

    def expire(self, now: float) -> None:
        """Take back what nobody reports."""
        self._note(self.book.expire(now))

    def take_batch(self, now: float) -> BatchOffer:
        """Ask for the groups of the next step."""
        offer, outcome = self.book.take_batch(self.book.lineage_number, self.book.step + 1, now)
        self._note(outcome)
        return offer

    def step_finished(self, group_ids: list[str], now: float) -> bool:
        """Record a step; returns whether the run is at its end."""
        finished = StepFinished(
            lineage=self.book.lineage_number,
            step=self.book.step + 1,
            attempt=self.book.attempt,
            skipped="",
            group_ids=group_ids,
            metrics={},
        )
        reply, outcome = self.book.step_finished(finished, {}, now)
        self._note(outcome)
        return reply.stop

    @property
    def group_changes(self) -> int:
        """Grows whenever a group is admitted or changes its state."""
        return self.book.groups.changes

    def route(self, trajectory_id: str) -> Route | None:
        """What the scheduler's routing knows of a living trajectory."""
        trajectory = self.book.groups.trajectories.get(trajectory_id)
        return trajectory.route if trajectory is not None else None
