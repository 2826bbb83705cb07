"""Whatever happens in whatever order: nothing is lost, nothing is trained twice, all adds up."""

import random
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.scheduler import TrajectoryResult, TurnFinished
from common.weights import step_of
from services.scheduler.book import Book
from services.scheduler.line import key_of
from services.scheduler.records import ALIVE
from services.scheduler.routing.baselines import LeastLoad
from services.scheduler.rules import Rules
from tests.support.scheduling import (
    Desk,
    PendingMove,
    Restless,
    failure,
    reward,
    with_rules,
)

ACTIONS = {
    "nothing": 1,
    "report": 2,
    "work": 2,
    "turn": 2,
    "end": 2,
    "fail": 1,
    "hurry": 4,
    "repeat_turn": 1,
    "ghost_turn": 1,
    "kill": 1,
    "kill_unnoticed": 1,
    "lose_mail": 1,
    "settle": 3,
    "refuse_move": 1,
    "accept_late": 1,
    "drain": 1,
    "restart_scheduler": 1,
    "take": 3,
    "finish": 3,
    "skip": 1,
    "repeat_finish": 1,
    "restart_trainer": 1,
    "publish": 3,
    "wait": 1,
}
"""What may happen, and how often."""
WEIGHTED = [action for action, weight in ACTIONS.items() for _ in range(weight)]
scripts = st.lists(
    st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 1000)), min_size=50, max_size=100
)
rule_sets = st.builds(
    with_rules,
    groups_per_step=st.integers(1, 3),
    group_size=st.integers(2, 3),
    max_staleness_steps=st.integers(0, 3),
    attempts_max=st.integers(1, 3),
    placements_max=st.integers(1, 4),
    filters_zero_variance=st.booleans(),
)


@contextmanager
def desk(
    rules: Rules, tasks: int = 12, epochs: int = 2, *, restless: bool = True
) -> Generator[Desk]:
    policy = Restless if restless else LeastLoad
    made = Desk(rules, tasks=tasks, epochs=epochs, make_policy=policy, slow_moves=True)
    try:
        yield made
    finally:
        made.close()


class Chaos:
    """Interprets a script. What does not apply at the moment does nothing."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.last_turn: tuple[str, TurnFinished] | None = None
        self.batch: list[str] = []
        self.said = False
        self.peak = 0
        """The highest step ever done; a resume from an older one takes no place back."""

    def do(self, action: str, number: int) -> None:
        getattr(self, action)(number)
        book, rules = self.desk.book, self.desk.rules
        self.peak = max(self.peak, book.step)
        counted = book.step * rules.groups_per_step + len(book.groups.alive)
        allowed = (self.peak + rules.max_staleness_steps + 1) * rules.groups_per_step
        assert counted <= allowed
        check(self.desk)

    def nothing(self, _number: int) -> None:
        """What scripts shrink to."""

    def name(self, number: int) -> str:
        return f"w{number % 2}"

    def report(self, number: int) -> None:
        self.desk.report(self.name(number))

    def work(self, _number: int) -> None:
        self.desk.work()

    def _turn(self, number: int, result: TrajectoryResult | None) -> None:
        worker = self.desk.workers[self.name(number)]
        if worker.at_work:
            held = sorted(worker.at_work)
            chosen = held[number // 2 % len(held)]
            self.desk.turn(worker.name, chosen, result)

    def turn(self, number: int) -> None:
        self._turn(number, None)

    def end(self, number: int) -> None:
        self._turn(number, reward(float(number % 3 == 0)))

    def fail(self, number: int) -> None:
        self._turn(number, failure())

    def hurry(self, number: int) -> None:
        """What is on a worker ends, but for a few slow ones, and new work comes."""
        pick = random.Random(number)
        for name, worker in self.desk.workers.items():
            for trajectory_id in sorted(worker.at_work):
                slow = random.Random(trajectory_id.rpartition(".")[0]).random() < 0.3
                if pick.random() < (0.15 if slow else 0.95):
                    self.desk.turn(name, trajectory_id, reward(float(pick.randint(0, 1))))
            self.desk.report(name)
        self.desk.work()

    def ghost_turn(self, number: int) -> None:
        """A process that was thought dead, or is cut off, reports a turn."""
        if not self.desk.ghosts:
            return
        peer, turn = self.desk.ghosts[number % len(self.desk.ghosts)]
        known = self.desk.book.groups.trajectories.get(turn.trajectory_id)
        # Under an older lease only as the repetition of a turn whose move was taken back.
        holds = known is not None and known.row.worker == peer and turn.lease <= known.row.lease
        answer = self.desk.send_turn(peer, turn)
        assert holds or answer in ("not_found", "stale_fence")

    def repeat_turn(self, number: int) -> None:
        """The worker did not hear the answer and says its last turn again."""
        worker = self.desk.workers[self.name(number)]
        held = sorted(worker.at_work)
        if not held:
            return
        chosen = held[number // 2 % len(held)]
        turn = worker.held[chosen].turn
        first = self.desk.turn(worker.name, chosen)
        if first is True:
            held_now = worker.held[chosen]
            held_now.turn = turn
            assert self.desk.turn(worker.name, chosen) is True

    def _pending(self, number: int) -> list[PendingMove]:
        pending = self.desk.pending
        return [pending[number % len(pending)]] if pending else []

    def settle(self, number: int) -> None:
        for move in self._pending(number):
            self.desk.settle(move, accepted=True)

    def refuse_move(self, number: int) -> None:
        for move in self._pending(number):
            self.desk.settle(move, accepted=False)

    def accept_late(self, number: int) -> None:
        """The target has it, but the answer came too late: two workers hold it, one counts."""
        for move in self._pending(number):
            self.desk.settle(move, accepted=False, late=True)

    def drain(self, number: int) -> None:
        """The worker takes nothing new until it is killed."""
        self.desk.workers[self.name(number)].slots = 0

    def kill(self, number: int) -> None:
        self.desk.kill(self.name(number))

    def kill_unnoticed(self, number: int) -> None:
        self.desk.kill(self.name(number), noticed=False)

    def lose_mail(self, number: int) -> None:
        self.desk.lost ^= {self.name(number)}

    def restart_scheduler(self, _number: int) -> None:
        self.desk.open()

    def take(self, _number: int) -> None:
        if self.desk.book.lineage.number >= 0:
            self.batch = self.desk.take()

    def finish(self, _number: int) -> None:
        if self.batch:
            self.desk.finish(self.batch)
            self.batch, self.said = [], True

    def skip(self, number: int) -> None:
        if self.batch:
            self.desk.finish(self.batch, skipped=("nonfinite", "zero_variance")[number % 2])
            self.batch, self.said = [], True

    def repeat_finish(self, _number: int) -> None:
        if self.said:
            before = self.desk.book.step
            self.desk.say_finished(self.desk.finished)
            assert self.desk.book.step == before

    def restart_trainer(self, number: int) -> None:
        """It may have saved the step it died in, or an older one."""
        newest = self.desk.book.step + bool(self.batch)
        self.desk.begin(max(0, newest - number % 3))
        self.batch, self.said = [], False

    def publish(self, number: int) -> None:
        self.desk.publish(*[["w0"], ["w1"], []][number % 3])

    def wait(self, number: int) -> None:
        self.desk.now += number % 4


def check(desk: Desk) -> None:
    """Invariants that hold after every single event."""
    book, rules = desk.book, desk.rules
    alive = len(book.groups.alive)
    assert book.groups.counts["groups/dropped/stale"] == 0
    held = Counter(t for worker in book.leases.fleet.workers.values() for t in worker.routes)
    assert all(count == 1 for count in held.values())
    assert set(held) == {i for i, t in book.groups.trajectories.items() if t.running}
    for worker in book.leases.fleet.workers.values():
        if worker.reported_at and worker.heard and not worker.draining:
            refused = book.groups.counts["moves/refused"]  # It may have got others meanwhile.
            assert len(worker.routes) <= worker.slots + refused
    assert {t.row.trajectory_id for group in book.groups.needy() for t in group.trajectories} >= {
        i for i, t in book.groups.trajectories.items() if t.row.state == "waiting"
    }
    assert list(book.groups.in_line()) == sorted(book.groups.alive.values(), key=key_of)
    trained = desk.table("SELECT COUNT(*) FROM groups WHERE state = 'trained'")[0][0]
    assert trained == book.step * rules.groups_per_step
    assert trained + alive + book.groups.ended_groups["dropped"] == book.groups._admissions


def check_same(book: Book, again: Book) -> None:
    """Memory and ledger tell the same story."""
    assert again.step == book.step
    assert again.attempt == book.attempt
    assert again.lineage == book.lineage
    assert again.groups.tasks_left == book.groups.tasks_left
    assert {k: v.row for k, v in again.groups.alive.items()} == {
        k: v.row for k, v in book.groups.alive.items()
    }
    assert {k: v.row for k, v in again.groups.trajectories.items()} == {
        k: v.row for k, v in book.groups.trajectories.items()
    }
    assert +again.groups.ended_groups == +book.groups.ended_groups
    assert +again.groups.ended_trajectories == +book.groups.ended_trajectories


def check_each_task_once(desk: Desk) -> None:
    """Every task of every epoch was trained in one group, or has a reason why not."""
    ends = {
        (epoch, task_id): (state, reason)
        for epoch, task_id, state, reason in desk.table(
            "SELECT epoch, task_id, state, reason FROM tasks"
        )
    }
    assert set(ends) == {(e, i) for e in range(desk.epochs) for i in desk.ids}
    trained = Counter(desk.table("SELECT epoch, task_id FROM groups WHERE state = 'trained'"))
    assert all(count == 1 for count in trained.values())
    assert set(trained) == {task for task, (state, _) in ends.items() if state == "trained"}
    for state, reason in ends.values():
        assert state == "trained" or (state in ("filtered", "parked") and reason)
    alive = [str(state) for state in ALIVE]
    assert not [row for row in desk.table("SELECT state FROM groups") if row[0] in alive]


def check_journal(desk: Desk) -> None:
    """What trajectories say of their tokens is what was journaled."""
    assert not desk.table(
        "SELECT trajectory_id, t.turns, t.action_tokens, COUNT(u.turn) AS turns_found,"
        " COALESCE(SUM(LENGTH(u.action_tokens)) / 4, 0) AS tokens_found"
        " FROM trajectories t LEFT JOIN turns u USING (trajectory_id) GROUP BY trajectory_id"
        " HAVING t.turns <> turns_found OR t.action_tokens <> tokens_found"
    )


def check_staleness(desk: Desk) -> None:
    """No trained trajectory was made by weights older than allowed."""
    for step, oldest in desk.table(
        "SELECT g.step, t.oldest_version FROM trajectories t JOIN groups g USING (group_id) "
        "WHERE g.state = 'trained' AND t.state = 'finished'"
    ):
        assert step - 1 - step_of(oldest) <= desk.rules.max_staleness_steps


@given(scripts, rule_sets, st.integers(0, 1000))
@settings(max_examples=100)
def test_no_order_of_events_loses_a_trajectory_or_trains_one_twice(
    script: list[tuple[str, int]], rules: Rules, seed: int
) -> None:
    with desk(rules) as made:
        made.start()
        chaos = Chaos(made)
        for action, number in script:
            chaos.do(action, number)
        made.lost.clear()
        for worker in made.workers.values():
            worker.slots = 8
        made.begin(made.book.step)
        made.publish()
        made.run_to_end(random.Random(seed))
        check(made)
        check_each_task_once(made)
        check_staleness(made)
        check_journal(made)


@given(scripts, rule_sets)
@settings(max_examples=50)
def test_a_book_rebuilt_from_the_ledger_equals_the_one_in_memory(
    script: list[tuple[str, int]], rules: Rules
) -> None:
    with desk(rules) as made:
        made.start()
        chaos = Chaos(made)
        for action, number in script:
            chaos.do(action, number)
        before = made.book
        made.open()
        check_same(before, made.book)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_50_random_points_each_task_is_trained_exactly_once(seed: int) -> None:
    pick = random.Random(seed)
    with desk(with_rules(filters_zero_variance=False), tasks=60, epochs=2) as made:
        made.start()
        for _ in range(50):
            for _ in range(pick.randint(0, 2)):
                made.round(pick)
            made.take()
            match pick.choice(["scheduler", "trainer", "worker", "all"]):
                case "scheduler":
                    made.open()
                case "trainer":
                    made.begin(max(0, made.book.step - pick.randint(0, 2)))
                    made.publish()
                case "worker":
                    made.kill("w0", noticed=pick.random() < 0.5)
                case _:
                    made.open()
                    made.kill("w0", noticed=False)
                    made.kill("w1", noticed=False)
                    made.begin(made.book.step)
                    made.publish()
        made.run_to_end(pick)
        check_each_task_once(made)
        check_staleness(made)
        check_journal(made)
        states = Counter(made.table("SELECT state, reason FROM tasks"))
        assert states == {("trained", ""): 120}
