"""Trajectories on their way between rollout workers, with fake engines, on virtual time."""

import asyncio
from collections.abc import Sequence

import pytest

from common.clock import run_sim
from common.errors import Refusal, RequestRefused
from common.messages.rollout import DropTrajectory
from common.messages.scheduler import MoveReport, ReportWorker, TurnFinished
from common.trajectory import token_count
from services.rollout.fake_engine import FakeEngine
from services.rollout.kv_client import KV_DEADLINE_S
from services.rollout.kv_server import GRACE_S, QUIET_S
from services.rollout.worker import REPORT_INTERVAL_S
from tests.support.moving import MovingScheduler, Plan, WorkerProcess, Workers
from tests.support.peers import FakeTools
from tests.support.rollout import END, TINY, assign, moved
from tests.support.sim import manifest, until

CALLS = 3
PREFILL_TOKEN_S, TRANSFER_TOKEN_S = 0.01, 0.001


def script(context: Sequence[int], _seed: int, _version: int) -> list[int]:
    """Calls the tool three times, then answers."""
    called = TINY.decode(list(context)).count("<result>")
    text = "<calculator>2+2</calculator>" if called < CALLS else f"<answer>4</answer>{END}"
    return TINY.encode(text)


async def engine(version: int = 7, **costs: float) -> FakeEngine:
    made = FakeEngine(script=script, decode=TINY.decode, **costs)  # type: ignore[arg-type]
    await made.start()
    await made.apply_weights(manifest(version))
    return made


async def costly() -> FakeEngine:
    return await engine(
        token_s=0.001, prefill_token_s=PREFILL_TOKEN_S, transfer_token_s=TRANSFER_TOKEN_S
    )


def to_the_other(*boundaries: int) -> Plan:
    """Moves from short-0 to short-1 after the first of these turns, and back after the next."""

    def plan(turn: TurnFinished) -> str | None:
        moves = sum(boundary <= turn.turn for boundary in boundaries)
        return f"short-{moves % 2}" if turn.turn in boundaries else None

    return plan


def move_of(turn: TurnFinished) -> MoveReport:
    assert turn.move
    return turn.move


def tokens_of(turn: TurnFinished) -> int:
    parts = (turn.prompt_tokens, turn.action_tokens, turn.observation_tokens)
    return sum(map(token_count, parts))


def content(turns: list[TurnFinished]) -> list[tuple[bytes, ...]]:
    return [
        (t.prompt_tokens, t.action_tokens, t.observation_tokens, t.action_logprobs) for t in turns
    ]


def test_a_trajectory_that_moves_to_and_fro_is_the_one_that_stays() -> None:
    async def scenario(*boundaries: int) -> list[TurnFinished]:
        workers = Workers([await engine(), await engine()])
        workers.scheduler.plan = to_the_other(*boundaries)
        async with workers.running():
            return await workers.play()

    stayed = run_sim(scenario())
    moved_twice = run_sim(scenario(0, 1))
    assert content(moved_twice) == content(stayed)
    assert [turn.lease for turn in moved_twice] == [1, 2, 3, 3]
    assert [turn.move.path if turn.move else "" for turn in moved_twice] == ["", "kv", "kv", ""]
    assert [turn.move for turn in stayed] == [None] * 4


@pytest.mark.parametrize("path", ["kv", "recompute"])
def test_a_move_tells_what_it_cost(path: str) -> None:
    async def scenario() -> tuple[list[TurnFinished], FakeEngine]:
        target = await costly()
        workers = Workers([await costly(), target], MovingScheduler(to_the_other(1)))
        if path == "recompute":
            workers.scheduler.source = lambda _peer: ""
        async with workers.running():
            return await workers.play(), target

    turns, target = run_sim(scenario())
    report = move_of(turns[2])
    lengths = [
        len(part) // 4
        for turn in turns[:2]
        for part in (turn.prompt_tokens, turn.action_tokens, turn.observation_tokens)
    ]
    context, observation = sum(lengths), lengths[-1]
    assert (report.path, report.tokens) == (path, context)
    if path == "kv":
        assert report.reason == ""
        assert report.seconds == pytest.approx((context - observation) * TRANSFER_TOKEN_S, abs=0.05)
        assert turns[2].queue_s == pytest.approx(observation * PREFILL_TOKEN_S, abs=0.01)
    else:
        assert report.reason == "no_source"
        assert report.seconds == pytest.approx(context * PREFILL_TOKEN_S, abs=0.05)
    later = token_count(turns[2].observation_tokens)
    computed = observation if path == "kv" else context
    assert target.prefill_tokens == computed + later


def test_engines_with_different_weights_compute_again() -> None:
    async def scenario() -> list[TurnFinished]:
        workers = Workers([await engine(7), await engine(8)], MovingScheduler(to_the_other(0)))
        async with workers.running():
            return await workers.play()

    report = move_of(run_sim(scenario())[1])
    assert (report.path, report.reason) == ("recompute", "version")


def test_a_source_that_is_cut_off_costs_the_deadline_and_nothing_else() -> None:
    async def scenario() -> list[TurnFinished]:
        workers = Workers([await engine(), await engine()], MovingScheduler(to_the_other(0)))
        async with workers.running():
            first, second = (process.peer for process in workers.processes)
            workers.network.partition(first, second)
            return await workers.play()

    turns = run_sim(scenario())
    report = move_of(turns[1])
    assert (report.path, report.reason) in [("recompute", "too_slow"), ("recompute", "source_gone")]
    assert report.seconds < KV_DEADLINE_S + 1
    assert [turn.turn for turn in turns] == [0, 1, 2, 3]


def test_a_dead_workers_trajectory_goes_on_from_its_last_journaled_turn() -> None:
    async def scenario() -> list[TurnFinished]:
        first = await engine(token_s=0.1)
        workers = Workers([first, await engine()])
        scheduler = workers.scheduler
        async with workers.running():
            assert await scheduler.give("short-0", assign())
            await until(lambda: len(scheduler.turns) == 2)
            dead = workers.processes[0].peer
            workers.network.kill(dead)
            assert await scheduler.give("short-1", moved(scheduler.of(), kv_source=dead))
            await until(scheduler.ended)
            return scheduler.of()

    turns = run_sim(scenario())
    assert [turn.turn for turn in turns] == [0, 1, 2, 3]
    assert move_of(turns[2]).reason in ("source_gone", "too_slow")
    assert turns[-1].result
    assert turns[-1].result.reward == 1.0


# Leases.


def test_a_move_that_was_taken_back_goes_on_under_the_lease_of_the_reply() -> None:
    async def scenario() -> list[TurnFinished]:
        workers = Workers([await engine(), await engine()])
        workers.scheduler.plan = lambda turn: "" if turn.turn == 1 else None
        async with workers.running():
            return await workers.play()

    turns = run_sim(scenario())
    assert [turn.lease for turn in turns] == [1, 1, 3, 3]
    assert [turn.move for turn in turns] == [None] * 4


def test_orders_compare_with_the_lease_of_the_reply() -> None:
    async def scenario() -> None:
        workers = Workers([await engine(token_s=0.1), await engine()])
        scheduler = workers.scheduler
        scheduler.plan = lambda turn: "" if turn.turn == 0 else None
        async with workers.running():
            await scheduler.give("short-0", assign())
            await until(lambda: bool(scheduler.turns))
            await asyncio.sleep(0.5)
            worker = scheduler.membership.find("rollout", "short-0")
            assert worker
            stale = moved(scheduler.of(), lease=2)
            with pytest.raises(RequestRefused) as caught:
                await scheduler.membership.request(worker, stale, timeout_s=1)
            assert caught.value.refusal is Refusal.STALE_FENCE
            late = DropTrajectory(trajectory_id="t0", lease=2)
            await scheduler.membership.request(worker, late, timeout_s=1)
            await until(scheduler.ended)
            assert {turn.lease for turn in scheduler.turns} == {1, 3}

    run_sim(scenario())


def test_a_worker_lets_go_when_the_lease_of_the_reply_is_not_counted() -> None:
    async def scenario() -> None:
        first = await engine(token_s=1.0)
        workers = Workers([first, await engine()])
        scheduler = workers.scheduler
        scheduler.plan = lambda _turn: ""
        async with workers.running():
            await scheduler.give("short-0", assign())
            await until(lambda: bool(scheduler.turns))
            await asyncio.sleep(2 * REPORT_INTERVAL_S)
            scheduler.drop = lambda report: report.holding
            await until(lambda: first.load().running == 0, timeout_s=2 * REPORT_INTERVAL_S)

    run_sim(scenario())


def test_a_trajectory_whose_move_is_being_decided_is_not_dropped() -> None:
    """For as long as the target is asked, it counts as the target's, and may come back."""

    async def scenario() -> list[TurnFinished]:
        workers = Workers([await engine(), await engine()])
        scheduler = workers.scheduler
        scheduler.plan = lambda turn: "" if turn.turn == 0 else None
        scheduler.decide_s = 3 * REPORT_INTERVAL_S
        scheduler.drop = lambda report: report.holding if scheduler.deciding else []
        async with workers.running():
            return await workers.play()

    assert [turn.lease for turn in run_sim(scenario())] == [1, 3, 3, 3]


def test_an_assignment_that_contradicts_itself_is_refused() -> None:
    async def scenario() -> None:
        workers = Workers([await engine()])
        async with workers.running():
            worker = workers.scheduler.membership.find("rollout", "short-0")
            assert worker
            requests = [
                assign(prompt_tokens=b"abcd", turn=2),
                assign(prompt_tokens=b"abcd", turn=1, later_tokens=[b"abcd"]),
                assign(prompt_tokens=b"abc", turn=1, later_tokens=[b"abcd", b"abcd"]),
            ]
            for request in requests:
                with pytest.raises(RequestRefused) as caught:
                    await workers.scheduler.membership.request(worker, request, timeout_s=1)
                assert caught.value.refusal is Refusal.INVALID

    run_sim(scenario())


# What is told of the engine.


def test_turns_and_reports_tell_how_busy_the_engine_was() -> None:
    async def scenario() -> tuple[list[TurnFinished], list[ReportWorker]]:
        workers = Workers([await engine(token_s=0.5)], tools=FakeTools(call_s=0.0))
        scheduler = workers.scheduler
        async with workers.running():
            for number in range(3):
                await scheduler.give("short-0", assign(f"t{number}"))
            await until(lambda: all(scheduler.ended(f"t{n}") for n in range(3)), timeout_s=200)
        return scheduler.turns, [report for _, report in scheduler.reports]

    turns, reports = run_sim(scenario())
    first = turns[0]
    assert first.running == 3
    context = token_count(first.prompt_tokens)
    action = token_count(first.action_tokens)
    assert 3 * context < first.kv_tokens_used < 3 * (context + action)
    assert {report.running for report in reports} >= {0, 3}
    assert {report.waiting for report in reports} == {0}


# Drains.


def handed_on(turn: TurnFinished) -> str | None:
    """A scheduler that moves everything away from the worker that stops."""
    return "short-1" if turn.lease == 1 else None


async def stopped_s(process: WorkerProcess) -> float:
    """Stop it, and say how long that took."""
    loop = asyncio.get_running_loop()
    before = loop.time()
    process.stop.set()
    await process.stopped.wait()
    return loop.time() - before


def test_a_stopping_worker_says_so_before_its_turns_end() -> None:
    async def scenario() -> tuple[float, float]:
        workers = Workers([await engine(token_s=0.2), await engine()])
        scheduler = workers.scheduler
        loop = asyncio.get_running_loop()
        async with workers.running():
            await scheduler.give("short-0", assign())
            process = workers.processes[0]
            await until(lambda: process.engine.load().running > 0)
            process.stop.set()
            asked_s = loop.time()
            await until(
                lambda: any(
                    peer == process.peer and report.slots == 0 and report.holding
                    for peer, report in scheduler.reports
                )
            )
            told_s = loop.time()
            await until(lambda: bool(scheduler.turns))
            return told_s - asked_s, loop.time() - asked_s

    told_s, turn_s = run_sim(scenario())
    assert told_s < 0.1 < turn_s


def test_a_draining_worker_gives_its_caches_and_leaves() -> None:
    async def scenario() -> tuple[list[TurnFinished], float]:
        workers = Workers([await costly(), await costly()])
        scheduler = workers.scheduler
        async with workers.running(), asyncio.TaskGroup() as tasks:
            await scheduler.give("short-0", assign())
            await until(lambda: workers.processes[0].engine.load().running > 0)
            scheduler.plan = handed_on
            stopped = tasks.create_task(stopped_s(workers.processes[0]))
            await until(scheduler.ended)
            return scheduler.of(), await stopped

    turns, took_s = run_sim(scenario())
    assert [move.path for turn in turns if (move := turn.move)] == ["kv"]
    assert [turn.turn for turn in turns] == [0, 1, 2, 3]
    assert took_s < QUIET_S


def test_a_draining_worker_waits_for_a_trajectory_that_is_placed_a_little_later() -> None:
    async def scenario() -> list[TurnFinished]:
        workers = Workers([await engine(), await engine()])
        scheduler = workers.scheduler
        async with workers.running(), asyncio.TaskGroup() as tasks:
            await scheduler.give("short-0", assign())
            await until(lambda: len(scheduler.turns) == 1)
            source = workers.processes[0]
            stopped = tasks.create_task(stopped_s(source))
            await until(
                lambda: any(
                    peer == source.peer and not report.slots and not report.holding
                    for peer, report in scheduler.reports
                )
            )
            await asyncio.sleep(QUIET_S / 2)
            await scheduler.give("short-1", moved(scheduler.of(), kv_source=source.peer))
            await until(scheduler.ended)
            assert await stopped < GRACE_S
            return scheduler.of()

    turns = run_sim(scenario())
    assert [move.path for turn in turns if (move := turn.move)] == ["kv"]


@pytest.mark.parametrize("others", [0, 1])
def test_a_worker_whose_caches_nobody_wants_stops_soon(others: int) -> None:
    async def scenario() -> float:
        workers = Workers([await engine() for _ in range(1 + others)])
        scheduler = workers.scheduler
        async with workers.running():
            await scheduler.give("short-0", assign())
            await until(lambda: bool(scheduler.turns))
            return await stopped_s(workers.processes[0])

    assert run_sim(scenario()) < 1.0 + others * QUIET_S


def test_an_idle_worker_stops_at_once() -> None:
    async def scenario() -> float:
        workers = Workers([await engine(), await engine()])
        async with workers.running():
            return await stopped_s(workers.processes[0])

    assert run_sim(scenario()) < 0.1
