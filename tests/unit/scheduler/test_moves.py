"""Moves between two turns, one claim at a time. Orders of events are in `test_book_properties`."""

from collections.abc import Iterator

import pytest

from common.errors import Refusal
from services.scheduler.decisions import unpack_options
from services.scheduler.routing.baselines import LeastLoad
from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.policy import Decision, Option
from services.scheduler.routing.route import Residual, Route
from tests.support.scheduling import Desk, PendingMove, make_turn, reward, with_rules

FIRST = "t0.e0.a0.0"


class Mover(LeastLoad):
    """Moves what is on one worker to the other, and says why."""

    wait = False

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        if self.wait:
            return None
        other = next(w.peer for w in fleet.workers.values() if w.peer != route.worker)
        reason = "draining" if fleet.workers[route.worker].draining else "cheaper"
        options = (Option(other, 1.5, 0.25), Option(route.worker, 2.5, 0.0))
        return Decision(other, reason, Residual(40.0, 30.0, 90.0, 5.0), options, kv_expected=50)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(with_rules(group_size=2), tasks=1, make_policy=Mover, slow_moves=True)
    made.start()
    yield made
    made.close()


def row_of(desk: Desk, trajectory_id: str = FIRST):  # noqa: ANN201
    return desk.book.groups.trajectories[trajectory_id].row


def holder(desk: Desk, trajectory_id: str = FIRST) -> str:
    return next(w.name for w in desk.workers.values() if trajectory_id in w.held)


def other(name: str) -> str:
    return {"w0": "w1", "w1": "w0"}[name]


def begin_move(desk: Desk) -> tuple[str, PendingMove]:
    name = holder(desk)
    assert desk.turn(name, FIRST) == "moving"
    return name, desk.pending[0]


def kinds(desk: Desk, trajectory_id: str = FIRST) -> list[str]:
    return [row.kind for row in desk.ledger._store.decisions(trajectory_id)]


def test_a_move_is_in_the_ledger_before_the_target_is_asked(desk: Desk) -> None:
    source, move = begin_move(desk)
    target = desk.workers[other(source)]
    (found,) = desk.table(f"SELECT worker, lease FROM trajectories WHERE trajectory_id = '{FIRST}'")
    assert found == (target.peer, 2)
    assert (move.order.peer, move.order.kv_source) == (target.peer, desk.workers[source].peer)
    assert FIRST in desk.book.leases.fleet.workers[target.peer].routes


def test_the_source_is_not_told_to_let_go_while_it_waits(desk: Desk) -> None:
    source, move = begin_move(desk)
    assert desk.report(source) == []
    desk.settle(move, accepted=False)
    assert desk.report(source) == []


def test_after_an_accepted_move_the_source_stops_and_the_target_goes_on(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.settle(move, accepted=True)
    assert FIRST not in desk.workers[source].held
    held = desk.workers[other(source)].held[FIRST]
    assert (held.lease, held.turn) == (2, 1)
    assert desk.book.groups.trajectories[FIRST].route.moves == 1
    assert desk.book.groups.counts["moves/cheaper"] == 1
    assert desk.book.groups.counts["moves/tokens"] == 6
    again = desk.send_turn(desk.workers[source].peer, move.turn)
    assert again == Refusal.STALE_FENCE


def test_a_refused_move_leaves_the_trajectory_where_it_was_under_a_newer_lease(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.settle(move, accepted=False)
    held = desk.workers[source].held[FIRST]
    assert (held.lease, held.turn) == (3, 1)
    assert row_of(desk).worker == desk.workers[source].peer
    assert row_of(desk).losses == 0
    assert desk.book.groups.trajectories[FIRST].route.moves == 0
    assert kinds(desk) == ["placed", "moved", "move_refused"]


def test_a_target_that_accepts_too_late_is_told_to_let_go_and_cannot_report(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.settle(move, accepted=False, late=True)
    target = desk.workers[other(source)]
    late = target.held[FIRST].finish(FIRST, target.version)
    assert desk.send_turn(target.peer, late) == Refusal.STALE_FENCE
    assert desk.report(target.name) == [FIRST]
    assert desk.send_turn(desk.workers[source].peer, make_turn(FIRST, 3, 1)) == "moving"


def test_a_turn_said_again_after_a_refused_move_gets_the_new_lease(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.settle(move, accepted=False)
    peer = desk.workers[source].peer
    reply, outcome = desk.book.turn_finished(peer, move.turn, desk.now)
    assert (reply.go_on, reply.lease, outcome.rows) == (True, 3, [])
    desk.open()  # A restarted scheduler knows it from the journal.
    reply, _ = desk.book.turn_finished(peer, move.turn, desk.now)
    assert (reply.go_on, reply.lease) == (True, 3)


def test_a_late_answer_of_an_older_move_changes_nothing(desk: Desk) -> None:
    _, move = begin_move(desk)
    desk.settle(move, accepted=False)
    before = row_of(desk)
    for end in (desk.book.move_accepted, lambda o, n: desk.book.move_refused(o, "late", n)):
        reply, outcome = end(move.order, desk.now)
        assert (reply.go_on, reply.lease) == (True, 3)
        assert outcome.rows == []
    assert row_of(desk) == before


def test_a_target_that_dies_before_it_answers_costs_nothing(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.kill(other(source))
    assert row_of(desk).worker == desk.workers[source].peer
    desk.settle(move, accepted=True)
    assert desk.workers[source].held[FIRST].lease == 3
    assert row_of(desk).losses == 0


def test_a_source_that_dies_while_it_waits_leaves_the_target_at_work(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.kill(source)
    desk.settle(move, accepted=True)
    assert holder(desk) == other(source)
    assert row_of(desk).losses == 0


def test_when_the_source_is_dead_and_the_target_refuses_the_trajectory_waits(desk: Desk) -> None:
    source, move = begin_move(desk)
    desk.kill(source)
    desk.settle(move, accepted=False)
    assert (row_of(desk).state, row_of(desk).losses) == ("waiting", 1)
    assert kinds(desk) == ["placed", "moved", "lost"]
    desk.report("w0")
    desk.report("w1")
    desk.work()
    assert desk.workers[holder(desk)].held[FIRST].turn == 1


def test_a_move_off_a_draining_worker_does_not_count_for_the_trajectory(desk: Desk) -> None:
    source = holder(desk)
    desk.workers[source].slots = 0
    desk.report(source)
    _, move = begin_move(desk)
    desk.settle(move, accepted=True)
    assert desk.book.groups.trajectories[FIRST].route.moves == 0
    assert desk.book.groups.counts["moves/draining"] == 1
    desk.open()
    assert desk.book.groups.trajectories[FIRST].route.moves == 0


def test_a_draining_source_whose_target_refuses_is_told_to_stop(desk: Desk) -> None:
    source = holder(desk)
    desk.workers[source].slots = 0
    desk.report(source)
    _, move = begin_move(desk)
    desk.settle(move, accepted=False)
    assert FIRST not in desk.workers[source].held
    assert (row_of(desk).state, row_of(desk).losses) == ("waiting", 0)


def test_what_a_worker_was_told_to_stop_is_not_taken_for_its_own_again(desk: Desk) -> None:
    name = holder(desk)
    worker = desk.workers[name]
    desk.book.leases.policy.wait = True  # type: ignore[attr-defined]
    turn = worker.held[FIRST].finish(FIRST, 0)
    assert desk.send_turn(worker.peer, turn) is False
    assert desk.send_turn(worker.peer, turn) is False  # Its reply was lost.
    assert FIRST in desk.report(name)
    assert row_of(desk).state == "waiting"


def test_a_waiting_trajectory_says_who_may_have_its_cache(desk: Desk) -> None:
    name = holder(desk)
    desk.book.leases.policy.wait = True  # type: ignore[attr-defined]
    desk.turn(name, FIRST)
    desk.workers[name].slots = 0
    desk.report(name)
    (order,) = desk.book.advance(desk.now).orders
    assert order.kv_source == desk.workers[name].peer
    assert order.peer != order.kv_source


def test_a_dead_worker_has_no_cache(desk: Desk) -> None:
    name = holder(desk)
    desk.book.leases.policy.wait = True  # type: ignore[attr-defined]
    desk.turn(name, FIRST)
    desk.kill(name)
    orders = {o.trajectory.trajectory_id: o for o in desk.book.advance(desk.now).orders}
    assert orders[FIRST].kv_source == ""


def test_every_decision_is_written_down_with_what_it_was_made_of(desk: Desk) -> None:
    desk.now = 7.0
    source, move = begin_move(desk)
    desk.settle(move, accepted=True)
    desk.turn(other(source), FIRST, reward(1.0))
    placed, moved, ended = desk.ledger._store.decisions(FIRST)
    assert (placed.number, placed.at, placed.kind, placed.reason) == (0, 0.0, "placed", "load")
    assert (moved.number, moved.at, moved.turn, moved.lease) == (1, 7.0, 1, 2)
    assert (moved.mean, moved.p50, moved.p90) == (40.0, 30.0, 90.0)
    assert (moved.action_tokens, moved.context_tokens) == (2, 6)
    target, stay = unpack_options(moved.options)
    assert (moved.target, moved.source) == (target.peer, stay.peer)
    assert target == Option(moved.target, 1.5, 0.25)
    assert (ended.kind, ended.reason, ended.target) == ("ended", "answered", "")


def test_a_restarted_scheduler_knows_what_routing_had_seen(desk: Desk) -> None:
    _, move = begin_move(desk)
    desk.settle(move, accepted=True)
    before = desk.book.groups.trajectories[FIRST]
    desk.open()
    after = desk.book.groups.trajectories[FIRST]
    assert after.route.outcomes == before.route.outcomes
    assert after.route.context_tokens_at == before.route.context_tokens_at == [6]
    assert (after.route.moves, after.decisions) == (1, 2)
    assert after.route.worker == before.route.worker
