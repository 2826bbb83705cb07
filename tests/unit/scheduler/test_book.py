"""The book, one claim at a time. Orders of events are in `test_book_properties`."""

import json
import random
from collections.abc import Callable, Iterator

import pytest

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import MoveReport, StepFinished
from common.trajectory import FailureKind, pack_tokens
from common.weights import version_id
from services.scheduler.routing.fleet import BucketShape
from services.scheduler.rules import Rules
from services.scheduler.state import Assign
from services.scheduler.status import run_status, waiting_for
from tests.support.scheduling import (
    Desk,
    SimWorker,
    failure,
    make_report,
    make_turn,
    reward,
    with_rules,
)
from tests.support.sim import sim_config

Open = Callable[..., Desk]


@pytest.fixture
def open_desk() -> Iterator[Open]:
    desks: list[Desk] = []

    def opened(tasks: int = 20, epochs: int = 1, **rules: object) -> Desk:
        desk = Desk(with_rules(**rules), tasks=tasks, epochs=epochs)
        desks.append(desk)
        desk.start()
        return desk

    yield opened
    for desk in desks:
        desk.close()


def end_group(desk: Desk, group_id: str, *rewards: float | None) -> None:
    """All members end in one turn; None is a failure."""
    for number, value in enumerate(rewards):
        trajectory_id = f"{group_id}.{number}"
        name = next(w.name for w in desk.workers.values() if trajectory_id in w.held)
        desk.turn(name, trajectory_id, failure() if value is None else reward(value))


def fail_one_after_the_other(desk: Desk, times: int) -> None:
    """Each time the group that was admitted last."""
    for _ in range(times):
        assert not desk.book.groups.failure
        end_group(desk, groups_of(desk)[-1], None, None)
        desk.work()


def groups_of(desk: Desk) -> list[str]:
    return list(desk.book.groups.alive)


def holder(desk: Desk, trajectory_id: str) -> SimWorker:
    return next(w for w in desk.workers.values() if trajectory_id in w.held)


# ── admission ────────────────────────────────────────────────────────────────────────────────


def test_nothing_begins_before_a_trainer_has_begun() -> None:
    desk = Desk()
    desk.workers["w0"].version = version_id(0, 0)
    desk.report("w0")
    desk.work()
    assert groups_of(desk) == []
    desk.close()


def test_as_many_groups_begin_as_the_bound_allows(open_desk: Open) -> None:
    desk = open_desk(groups_per_step=3, max_staleness_steps=2)
    assert len(groups_of(desk)) == 9


def test_two_tasks_are_two_groups_though_nothing_but_the_id_differs(open_desk: Open) -> None:
    desk = open_desk(tasks=3, max_staleness_steps=3)
    assert sorted(groups_of(desk)) == ["t0.e0.a0", "t1.e0.a0", "t2.e0.a0"]


def test_work_goes_to_the_workers_evenly(open_desk: Open) -> None:
    desk = open_desk()
    assert [len(worker.held) for worker in desk.workers.values()] == [4, 4]


def test_a_worker_with_weights_of_a_lost_history_gets_nothing(open_desk: Open) -> None:
    desk = open_desk()
    desk.kill("w0")
    desk.begin(0)
    desk.report("w0")
    desk.work()
    assert not desk.workers["w0"].held
    desk.publish("w0")
    desk.report("w0")
    desk.work()
    assert desk.workers["w0"].held


def say_before_it_is_a_member(desk: Desk, name: str) -> None:
    worker = desk.workers[name]
    report = make_report(list(worker.held), version=worker.version, slots=worker.slots)
    _, outcome = desk.book.worker_reported(worker.peer, name, report, desk.now, member=False)
    desk.carry_out(outcome)


def test_a_worker_gets_nothing_before_it_is_a_member_and_then_at_once(open_desk: Open) -> None:
    desk = open_desk()
    desk.kill("w0")
    desk.kill("w1")
    desk.publish("w0")
    say_before_it_is_a_member(desk, "w0")
    desk.work()
    assert not desk.workers["w0"].held
    desk.book.worker_joined(desk.workers["w0"].peer)
    desk.work()
    assert desk.workers["w0"].held


def test_a_worker_keeps_what_it_reports_to_a_restarted_scheduler_that_knows_no_members(
    open_desk: Open,
) -> None:
    desk = open_desk()
    trajectory_id = next(iter(desk.workers["w0"].held))
    desk.open()
    say_before_it_is_a_member(desk, "w0")
    desk.now = desk.rules.lease_s - 1
    say_before_it_is_a_member(desk, "w0")
    desk.now += 2
    desk.work()
    assert trajectory_id in desk.workers["w0"].held
    assert desk.turn("w0", trajectory_id) is True


# ── turns ────────────────────────────────────────────────────────────────────────────────────


def test_a_turn_said_twice_is_journaled_once_and_answered_the_same(open_desk: Open) -> None:
    desk = open_desk()
    group = groups_of(desk)[0]
    worker = holder(desk, f"{group}.0")
    turn = make_turn(f"{group}.0", 1)
    assert desk.send_turn(worker.peer, turn) is True
    assert desk.send_turn(worker.peer, turn) is True
    last = make_turn(f"{group}.0", 1, 1, result=reward(1.0))
    assert desk.send_turn(worker.peer, last) is False
    assert desk.send_turn(worker.peer, last) is False
    (row,) = desk.table(
        f"SELECT turns, action_tokens FROM trajectories WHERE trajectory_id = '{group}.0'"
    )
    assert row == (2, 4)


@pytest.mark.parametrize(
    "broken",
    [
        {"turn": 1},
        {"action_logprobs": b""},
        {"action_versions": b"\0" * 4},
        {"observation_tokens": b"\0"},
        {"prompt_tokens": b""},
        {"prompt_tokens": b"torn!"},
        {"decode_s": float("nan")},
        {"queue_s": float("inf")},
        {"tool_latency_s": float("-inf")},
        {"running": -1},
        {"action_versions": pack_tokens([0, -1])},
        {"kv_tokens_used": 2**63},
        {"move": MoveReport(path="kv", tokens=1, seconds=float("nan"), reason="")},
        {"action_tokens": b"", "action_logprobs": b"", "action_versions": b""},
        {"result": reward(1.0).model_copy(update={"reward": None})},
        {"result": failure().model_copy(update={"reward": 0.0})},
    ],
)
def test_a_turn_that_contradicts_itself_is_refused_and_changes_nothing(
    open_desk: Open, broken: dict[str, object]
) -> None:
    desk = open_desk()
    trajectory_id = f"{groups_of(desk)[0]}.0"
    worker = holder(desk, trajectory_id)
    turn = make_turn(trajectory_id, 1).model_copy(update=broken)
    assert desk.send_turn(worker.peer, turn) == Refusal.INVALID
    assert desk.book.groups.trajectories[trajectory_id].row.turns == 0


def test_a_later_turn_that_brings_a_prompt_is_refused(open_desk: Open) -> None:
    desk = open_desk()
    trajectory_id = f"{groups_of(desk)[0]}.0"
    worker = holder(desk, trajectory_id)
    desk.send_turn(worker.peer, make_turn(trajectory_id, 1))
    turn = make_turn(trajectory_id, 1, 1).model_copy(update={"prompt_tokens": pack_tokens([1])})
    assert desk.send_turn(worker.peer, turn) == Refusal.INVALID


def test_the_oldest_version_of_any_token_is_the_one_that_counts(open_desk: Open) -> None:
    desk = open_desk()
    trajectory_id = f"{groups_of(desk)[0]}.0"
    worker = holder(desk, trajectory_id)
    turn = make_turn(trajectory_id, 1, versions=[version_id(0, 2), version_id(0, 4)])
    desk.send_turn(worker.peer, turn)
    row = desk.book.groups.trajectories[trajectory_id].row
    assert (row.oldest_version, row.newest_version) == (version_id(0, 2), version_id(0, 4))


def test_a_reward_that_is_no_number_is_a_failure_and_not_a_zero(open_desk: Open) -> None:
    desk = open_desk(group_usable_min=1)
    group = groups_of(desk)[0]
    end_group(desk, group, float("nan"))
    row = desk.book.groups.trajectories[f"{group}.0"].row
    assert (row.reward, row.failure) == (None, FailureKind.GRADER)


# ── leases ───────────────────────────────────────────────────────────────────────────────────


def test_a_trajectory_of_a_dead_worker_goes_on_elsewhere_under_a_new_lease(open_desk: Open) -> None:
    desk = open_desk()
    trajectory_id = f"{groups_of(desk)[0]}.0"
    old = holder(desk, trajectory_id)
    desk.turn(old.name, trajectory_id)
    desk.kill(old.name)
    desk.work()
    new = holder(desk, trajectory_id)
    assert new.name != old.name
    assert (new.held[trajectory_id].lease, new.held[trajectory_id].turn) == (2, 1)
    assert desk.send_turn(old.peer, make_turn(trajectory_id, 1, 1)) == Refusal.STALE_FENCE


def test_a_trajectory_that_its_worker_does_not_report_is_placed_again_with_one_warning(
    open_desk: Open,
) -> None:
    desk = open_desk()
    trajectory_id = f"{groups_of(desk)[0]}.0"
    forgetful = holder(desk, trajectory_id)
    del forgetful.held[trajectory_id]
    for _ in range(6):
        desk.now += 1.0
        desk.report("w0")
        desk.report("w1")
        desk.work()
    assert holder(desk, trajectory_id).held[trajectory_id].lease == 2
    (warning,) = desk.warnings("trajectory.lost")
    assert warning.fields["trajectory_id"] == trajectory_id
    assert warning.fields["reason"] == "lease_expired"


def test_a_trajectory_that_finishes_no_turn_does_not_run_for_ever(open_desk: Open) -> None:
    desk = open_desk(
        turn_timeout_s=30.0, placements_max=2, attempts_max=2, filters_zero_variance=False
    )
    stuck = f"{groups_of(desk)[0]}.0"
    task = stuck.split(".", maxsplit=1)[0]
    pick = random.Random(0)
    for _ in range(400):
        desk.now += 1.0
        for name, worker in desk.workers.items():
            desk.report(name)
            for trajectory_id in list(worker.held):
                if not trajectory_id.startswith(f"{task}."):
                    desk.turn(name, trajectory_id, reward(float(pick.randint(0, 1))))
        desk.work()
        taken = desk.take()
        if taken:
            desk.finish(taken)
            desk.publish()
    (parked,) = desk.warnings("task.parked")
    assert parked.fields["task_id"] == task
    assert "turn_timeout" in str(parked.fields["detail"])
    assert desk.book.step >= 8


def test_a_trajectory_that_lost_too_many_workers_has_failed(open_desk: Open) -> None:
    desk = open_desk(placements_max=2)
    trajectory_id = f"{groups_of(desk)[0]}.0"
    for _ in range(2):
        desk.kill(holder(desk, trajectory_id).name)
        desk.publish()
        desk.report("w0")
        desk.report("w1")
        desk.work()
    assert desk.book.groups.trajectories[trajectory_id].row.failure == FailureKind.WORKER_LOST


def test_a_refused_assignment_waits_and_the_worker_gets_nothing_until_it_reports(
    open_desk: Open,
) -> None:
    desk = open_desk(tasks=1)
    desk.report("w0")
    outcome = desk.book.advance(desk.now)
    assert outcome.orders == []
    trajectory = desk.book.groups.trajectories["t0.e0.a0.0"]
    order = order_of(desk, "t0.e0.a0.0")
    desk.carry_out(desk.book.assignment_failed(order, "draining", desk.now, lost=False))
    assert trajectory.row.state == "waiting"
    assert trajectory.row.losses == 0
    (again,) = desk.book.advance(desk.now).orders
    assert again.peer != order.peer


def test_a_late_refusal_of_an_older_placement_changes_nothing(open_desk: Open) -> None:
    desk = open_desk(tasks=1)
    old = order_of(desk, "t0.e0.a0.0")
    desk.kill(holder(desk, "t0.e0.a0.0").name)
    desk.work()
    before = desk.book.groups.trajectories["t0.e0.a0.0"].row
    desk.carry_out(desk.book.assignment_failed(old, "gone", desk.now, lost=True))
    assert desk.book.groups.trajectories["t0.e0.a0.0"].row == before
    end_group(desk, "t0.e0.a0", 1.0, 0.0)
    desk.carry_out(desk.book.assignment_failed(old, "gone", desk.now, lost=True))
    assert desk.book.groups.alive["t0.e0.a0"].ready


def test_an_assignment_that_every_worker_would_refuse_ends_as_a_failure(open_desk: Open) -> None:
    desk = open_desk(tasks=1, placements_max=2)
    for _ in range(2):
        order = order_of(desk, "t0.e0.a0.0")
        failed = desk.book.assignment_failed(order, "invalid: no tool", desk.now, lost=True)
        desk.carry_out(failed)
        desk.report("w0")
        desk.report("w1")
        desk.work()
    row = desk.book.groups.trajectories["t0.e0.a0.0"].row
    assert row.failure == FailureKind.WORKER_LOST
    assert "invalid: no tool" in row.detail


def order_of(desk: Desk, trajectory_id: str):  # noqa: ANN201
    row = desk.book.groups.trajectories[trajectory_id].row
    return Assign(row.worker, desk.book.groups.alive[row.group_id].row, row)


def test_a_restarted_scheduler_adopts_what_workers_report(open_desk: Open) -> None:
    desk = open_desk()
    held = {name: dict(worker.held) for name, worker in desk.workers.items()}
    desk.open()
    desk.work()
    for _ in range(10):
        desk.now += 1.0
        assert desk.report("w0") == []
        assert desk.report("w1") == []
        desk.work()
    assert {name: worker.held for name, worker in desk.workers.items()} == held
    assert not desk.warnings("trajectory.lost")


def test_a_restarted_scheduler_places_again_what_nobody_reports(open_desk: Open) -> None:
    desk = open_desk()
    desk.open()
    desk.kill("w0", noticed=False)
    for _ in range(6):
        desk.now += 1.0
        desk.report("w0")
        desk.report("w1")
        desk.work()
    leases = [held.lease for worker in desk.workers.values() for held in worker.held.values()]
    assert sorted(leases) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_a_worker_is_told_to_let_go_what_is_not_its_own(open_desk: Open) -> None:
    desk = open_desk()
    other = next(iter(desk.workers["w1"].held))
    report = make_report([other, "unknown.0"])
    drop, _ = desk.book.worker_reported(desk.workers["w0"].peer, "w0", report, desk.now)
    assert drop == [other, "unknown.0"]


# ── groups ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "broken",
    [
        {"bucket": "nowhere"},
        {"version": -1},
        {"version": -2},
        {"version": 2**31},
        {"slots": -1},
        {"kv_tokens_free": -(10**6)},
        {"running": 2**63},
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_changes_nothing(
    open_desk: Open, broken: dict[str, object]
) -> None:
    desk = open_desk(buckets=(BucketShape("short", 1, 100, 1000),))
    worker = next(iter(desk.workers.values()))
    report = make_report(list(worker.held)).model_copy(update=broken)
    with pytest.raises(RequestRefused) as caught:
        desk.book.worker_reported(worker.peer, worker.name, report, desk.now)
    assert caught.value.refusal is Refusal.INVALID
    known = desk.book.leases.fleet.workers[worker.peer]
    assert (known.bucket, known.version, known.slots) == ("short", 0, worker.slots)


def test_a_failed_member_is_left_out_and_the_rest_is_trained(open_desk: Open) -> None:
    desk = open_desk(group_size=3, groups_per_step=1, max_staleness_steps=0)
    (group,) = groups_of(desk)
    end_group(desk, group, 1.0, None, 0.0)
    desk.finish(desk.take())
    assert desk.lines[0]["reward/mean"] == 0.5
    assert desk.lines[0]["trajectories/trained"] == 2
    assert desk.lines[0]["rollout/failed/tool"] == 1


def test_a_group_with_too_few_usable_members_is_tried_again_then_parked(open_desk: Open) -> None:
    desk = open_desk(tasks=1, attempts_max=2)
    end_group(desk, "t0.e0.a0", 1.0, None)
    desk.work()
    assert groups_of(desk) == ["t0.e0.a1"]
    end_group(desk, "t0.e0.a1", None, None)
    desk.work()
    assert groups_of(desk) == []
    (parked,) = desk.warnings("task.parked")
    assert parked.fields["task_id"] == "t0"
    assert parked.fields["detail"] == "tool: it broke"
    assert desk.take() == []
    assert desk.offer.exhausted


def test_failing_groups_with_no_success_between_fail_the_run_with_the_servers_message(
    open_desk: Open,
) -> None:
    desk = open_desk(failed_groups_max=3)
    fail_one_after_the_other(desk, 3)
    assert desk.take() == []
    assert desk.offer.exhausted
    assert "3 groups in a row failed" in desk.offer.waiting_for
    assert "tool: it broke" in desk.offer.waiting_for
    before = groups_of(desk)
    desk.work()
    assert groups_of(desk) == before


def test_groups_that_fail_at_the_same_moment_are_one_failure(open_desk: Open) -> None:
    desk = open_desk(failed_groups_max=2)
    first_wave = groups_of(desk)
    assert len(first_wave) > 2
    for group in first_wave:
        end_group(desk, group, None, None)
        desk.work()  # The next one is admitted between two of these failures.
    assert not desk.book.groups.failure
    end_group(desk, groups_of(desk)[-1], None, None)
    assert "2 groups in a row failed" in desk.book.groups.failure


def test_a_step_under_way_when_the_run_fails_is_recorded_and_the_trainer_told(
    open_desk: Open,
) -> None:
    desk = open_desk(failed_groups_max=2)
    first, second, *_ = groups_of(desk)
    end_group(desk, first, 0.0, 1.0)
    end_group(desk, second, 0.0, 1.0)
    batch = desk.take()
    fail_one_after_the_other(desk, 2)
    reply = desk.finish(batch)
    assert reply.stop
    assert "2 groups in a row failed" in reply.reason
    assert desk.book.step == 1
    assert waiting_for(desk.book, desk.now) == desk.book.groups.failure


def test_one_success_between_failures_lets_the_run_go_on(open_desk: Open) -> None:
    desk = open_desk(failed_groups_max=2)
    fail_one_after_the_other(desk, 1)
    end_group(desk, groups_of(desk)[0], 0.0, 1.0)
    fail_one_after_the_other(desk, 1)
    assert not desk.book.groups.failure


@pytest.mark.parametrize("equal", [(1.0, 1.0), (0.0, 0.0), (0.1, 0.1 + 1e-9)])
def test_equal_rewards_are_filtered_counted_and_replaced(
    open_desk: Open, equal: tuple[float, float]
) -> None:
    desk = open_desk()
    before = groups_of(desk)
    end_group(desk, before[0], *equal)
    desk.work()
    assert len(groups_of(desk)) == len(before)
    assert desk.book.groups.counts["groups/zero_variance"] == 1
    assert desk.table("SELECT state, reason FROM tasks WHERE state <> 'admitted'") == [
        ("filtered", "zero_variance")
    ]


def test_equal_rewards_are_kept_where_the_configuration_says_so(open_desk: Open) -> None:
    desk = open_desk(filters_zero_variance=False)
    group = groups_of(desk)[0]
    end_group(desk, group, 1.0, 1.0)
    assert desk.book.groups.alive[group].row.state == "ready"


def test_with_most_groups_filtered_the_batch_stays_whole_and_oversampling_bounded(
    open_desk: Open,
) -> None:
    desk = open_desk(tasks=200, groups_per_step=4)
    pick = random.Random(0)
    while desk.book.step < 5:
        desk.now += 1.0
        for name, worker in desk.workers.items():
            desk.report(name)
            for trajectory_id in list(worker.held):
                luck = random.Random(trajectory_id.split(".")[0]).random() < 0.7
                desk.turn(name, trajectory_id, reward(1.0 if luck else float(pick.randint(0, 1))))
        desk.work()
        assert len(groups_of(desk)) <= 8
        taken = desk.take()
        if taken:
            assert len(taken) == 4
            desk.finish(taken)
            desk.publish()
    assert sum(line["groups/zero_variance"] for line in desk.lines) > 20


def test_memory_of_finished_groups_is_freed(open_desk: Open) -> None:
    desk = open_desk(tasks=300)
    pick = random.Random(0)
    most = 0
    while not (desk.book.exhausted and desk.offer.exhausted):
        desk.round(pick)
        most = max(most, len(desk.book.groups.trajectories))
    assert most <= 8
    assert not desk.book.groups.alive
    assert not any(worker.routes for worker in desk.book.leases.fleet.workers.values())


# ── the trainer ──────────────────────────────────────────────────────────────────────────────


def ready_step(desk: Desk) -> list[str]:
    """End what a batch needs and take it."""
    for group in groups_of(desk):
        if desk.book.groups.alive[group].row.state == "running":
            end_group(desk, group, 0.0, 1.0)
    return desk.take()


def test_the_same_step_asked_twice_gets_the_same_groups(open_desk: Open) -> None:
    desk = open_desk()
    batch = ready_step(desk)
    assert len(batch) == 2
    assert desk.take() == batch
    desk.open()
    assert desk.take() == batch


def test_a_step_said_twice_is_recorded_once(open_desk: Open) -> None:
    desk = open_desk(max_steps=1)
    reply = desk.finish(ready_step(desk))
    assert (reply.stop, reply.reason) == (True, "max_steps")
    assert desk.say_finished(desk.finished) == reply
    desk.open()
    assert desk.say_finished(desk.finished) == reply
    assert len(desk.lines) == 1


def test_a_skipped_step_is_attempted_again_with_other_groups(open_desk: Open) -> None:
    desk = open_desk()
    first = ready_step(desk)
    assert not desk.finish(first, skipped="nonfinite").stop
    assert desk.book.step == 0
    desk.say_finished(desk.finished)
    second = desk.take()
    assert len(second) == 2
    assert not set(first) & set(second)
    desk.finish(second)
    assert desk.finished.attempt == 1
    states = dict(desk.table("SELECT task_id, state FROM tasks WHERE state <> 'admitted'"))
    assert [states[group.split(".")[0]] for group in first] == ["retry", "retry"]


def test_other_groups_than_those_offered_are_refused(open_desk: Open) -> None:
    desk = open_desk()
    batch = ready_step(desk)
    with pytest.raises(RequestRefused) as refused:
        desk.finish(batch[:1])
    assert refused.value.refusal is Refusal.INVALID


def test_a_trainer_of_an_older_lineage_is_refused(open_desk: Open) -> None:
    desk = open_desk()
    batch = ready_step(desk)
    old = StepFinished(lineage=0, step=1, attempt=0, skipped="", group_ids=batch, metrics={})
    desk.begin(0)
    with pytest.raises(RequestRefused) as refused:
        desk.take(lineage=0)
    assert refused.value.refusal is Refusal.STALE_FENCE
    with pytest.raises(RequestRefused) as refused:
        desk.say_finished(old)
    assert refused.value.refusal is Refusal.STALE_FENCE


@pytest.mark.parametrize(("step", "refusal"), [(1, Refusal.STALE_FENCE), (3, Refusal.INVALID)])
def test_only_the_next_step_can_be_taken(open_desk: Open, step: int, refusal: Refusal) -> None:
    desk = open_desk()
    desk.finish(ready_step(desk))
    with pytest.raises(RequestRefused) as refused:
        desk.take(step)
    assert refused.value.refusal is refusal


def test_a_resume_makes_later_groups_ready_as_they_were(open_desk: Open) -> None:
    desk = open_desk()
    batches: list[list[str]] = []
    for _ in range(3):
        batches.append(ready_step(desk))
        desk.finish(batches[-1])
        desk.publish()
        desk.report("w0")
        desk.report("w1")
        desk.work()
    desk.begin(1)
    assert (desk.book.lineage.number, desk.book.step) == (1, 1)
    for batch in batches[1:]:
        assert sorted(desk.take()) == sorted(batch)
        desk.finish(desk.take())
    forgotten = desk.table("SELECT lineage, step, forgotten FROM steps ORDER BY lineage, step")
    assert forgotten == [(0, 1, 0), (0, 2, 1), (0, 3, 1), (1, 2, 0), (1, 3, 0)]


def test_the_same_trainer_begins_one_lineage_only(open_desk: Open) -> None:
    desk = open_desk()
    trainer = desk.book.lineage.trainer
    desk.finish(ready_step(desk))
    desk.carry_out(desk.book.begin_lineage(trainer, 0, ([], []), desk.now))
    assert (desk.book.lineage.number, desk.book.step) == (0, 1)


def test_a_step_saved_but_never_told_counts_as_done(open_desk: Open) -> None:
    desk = open_desk()
    batch = ready_step(desk)
    desk.begin(1)
    assert desk.book.step == 1
    trained = [
        group for (group,) in desk.table("SELECT group_id FROM groups WHERE state = 'trained'")
    ]
    assert sorted(trained) == sorted(batch)
    desk.open()
    assert desk.book.step == 1


def test_a_state_that_the_ledger_never_heard_of_is_refused_with_a_remedy(open_desk: Open) -> None:
    desk = open_desk()
    with pytest.raises(RequestRefused, match="resume with the checkpoint of this run directory"):
        desk.begin(5)


def test_the_leftover_of_the_last_epoch_is_dropped_with_a_reason(open_desk: Open) -> None:
    desk = open_desk(tasks=3)
    desk.finish(ready_step(desk))
    desk.work()
    for group in groups_of(desk):
        if desk.book.groups.alive[group].row.state == "running":
            end_group(desk, group, 0.0, 1.0)
    assert desk.take() == []
    assert desk.offer.exhausted
    reasons = [
        reason for (reason,) in desk.table("SELECT reason FROM tasks WHERE state = 'filtered'")
    ]
    assert reasons == ["incomplete_batch"]


def test_a_group_still_in_its_first_turn_is_waited_for_before_it_becomes_too_old(
    open_desk: Open,
) -> None:
    desk = open_desk(groups_per_step=1, max_staleness_steps=1)
    slow, fast = groups_of(desk)
    end_group(desk, fast, 0.0, 1.0)
    desk.finish(desk.take())
    desk.publish()
    desk.report("w0")
    desk.report("w1")
    desk.work()
    newer = next(group for group in groups_of(desk) if group != slow)
    end_group(desk, newer, 0.0, 1.0)
    assert desk.take() == []
    assert slow in desk.offer.waiting_for
    end_group(desk, slow, 0.0, 1.0)
    assert desk.take() == [slow]


def test_a_tightened_bound_drops_what_is_too_old_and_says_so(open_desk: Open) -> None:
    desk = open_desk(max_staleness_steps=3, tasks=40)
    slow = groups_of(desk)[0]
    for _ in range(3):
        for group in groups_of(desk):
            if group != slow and desk.book.groups.alive[group].row.state == "running":
                end_group(desk, group, 0.0, 1.0)
        desk.finish(desk.take())
        desk.publish()
        desk.report("w0")
        desk.report("w1")
        desk.work()
    desk.rules = with_rules(max_staleness_steps=0)
    desk.open()
    desk.take()
    assert slow in {notice.fields["group_id"] for notice in desk.warnings("group.expired")}
    assert desk.book.groups.counts["groups/dropped/stale"] >= 1


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_slow_tasks_are_trained_as_often_as_they_are_sampled(
    open_desk: Open, staleness: int
) -> None:
    """A third of the tasks takes ten times as long; none of them may be lost for it."""
    desk = open_desk(
        tasks=120, max_staleness_steps=staleness, groups_per_step=4, filters_zero_variance=False
    )
    for _ in range(5000):
        desk.now += 1.0
        for name, worker in desk.workers.items():
            desk.report(name)
            for trajectory_id, held in list(worker.held.items()):
                slow = int(trajectory_id.split(".")[0][1:]) % 3 == 0
                done = held.turn + 1 >= (10 if slow else 1)
                desk.turn(name, trajectory_id, reward(1.0) if done else None)
        desk.work()
        taken = desk.take()
        if taken:
            desk.finish(taken)
            desk.publish()
        if desk.offer.exhausted:
            break
    assert desk.table("SELECT state, COUNT(*) FROM tasks GROUP BY state") == [("trained", 120)]
    assert desk.table("SELECT COUNT(*) FROM groups") == [(120,)]
    assert max(line["staleness/max"] for line in desk.lines) <= staleness


# ── words and numbers ────────────────────────────────────────────────────────────────────────


def test_the_row_of_a_step_has_the_trainers_metrics_and_the_batchs(open_desk: Open) -> None:
    desk = open_desk()
    batch = ready_step(desk)
    desk.now += 10.0
    desk.finish(batch)
    row = desk.lines[0]
    assert row["step"] == 1
    assert row["loss/mean"] == 0.5
    assert row["reward/mean"] == 0.5
    assert row["tokens/trained"] == 8
    assert row["throughput/tokens_per_s"] == 0.8
    assert json.loads(desk.table("SELECT metrics FROM steps")[0][0]) == row
    assert desk.book.last_metrics == row


def test_status_counts_everything_and_names_what_is_waited_for(open_desk: Open) -> None:
    desk = open_desk()
    first = groups_of(desk)[0]
    end_group(desk, first, 0.0, 1.0)
    desk.now += 3.0
    status = run_status(desk.book, desk.now)
    assert status.trajectories["running"] == 6
    assert status.trajectories["finished"] == 2
    assert status.groups["ready"] == 1
    assert [worker.holding for worker in status.workers] == [3, 3]
    assert status.waiting_for.startswith("step 1: 1 of 2 groups are ready; t")
    assert " for 3 s" in status.waiting_for
    assert "and 3 more" in status.waiting_for


def test_a_step_whose_batch_is_taken_waits_for_the_trainer(open_desk: Open) -> None:
    desk = open_desk()
    ready_step(desk)
    assert waiting_for(desk.book, desk.now) == "the trainer, at step 1"


def test_waiting_for_says_why_nothing_is_placed(open_desk: Open) -> None:
    desk = open_desk(max_staleness_steps=0)
    assert "groups are ready" in waiting_for(desk.book, desk.now)
    desk.finish(ready_step(desk))
    desk.report("w0")
    desk.report("w1")
    desk.work()
    assert "workers have weights of step 0, the trainer has done 1" in waiting_for(
        desk.book, desk.now
    )
    desk.begin(1)
    assert "no worker has weights of lineage 1 yet" in waiting_for(desk.book, desk.now)


def test_rules_are_read_from_the_configuration() -> None:
    rules = Rules.of(sim_config())
    assert (rules.groups_per_step, rules.max_steps, rules.filters_zero_variance) == (8, 4, True)
    assert rules.tokens_expected == 64


def test_a_worker_that_drains_hands_back_without_a_loss(open_desk: Open) -> None:
    desk = open_desk()
    name = "w0"
    worker = desk.workers[name]
    handed_back = list(worker.held)
    assert handed_back
    worker.slots = 0
    worker.held.clear()
    desk.report(name)
    desk.kill(name)
    rows = [desk.book.groups.trajectories[i].row for i in handed_back]
    assert {row.losses for row in rows} == {0}
    assert not desk.warnings("trajectory.lost")
    desk.work()
    assert {desk.book.groups.trajectories[i].row.lease for i in handed_back} <= {1, 2}
