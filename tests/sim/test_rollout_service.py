"""The rollout worker as a process, among peers that fail, on the simulated network."""

import asyncio
import contextlib
import threading
from collections.abc import Generator

import pytest

from common.clock import run_sim
from common.config import BucketConfig, RolloutConfig
from common.errors import (
    ConfigError,
    EngineError,
    Refusal,
    RequestRefused,
    RequestTimeout,
    RunFailed,
    ShardCorrupt,
    VersionGone,
)
from common.messages.rollout import ApplyVersion, DropTrajectory
from common.service import Runtime
from common.transport.sim import Faults, SimNetwork
from common.weights import NO_VERSION
from services.rollout.service import RolloutService, place_of
from services.rollout.worker import EXCLUDED_MAX_S, HELD_PER_SLOT_MAX
from tests.support.peers import FakeTools
from tests.support.rollout import (
    END,
    TINY,
    Cluster,
    assign,
    rollout_config,
    says,
)
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sim import manifest, process, sim_config, until

CALL = "<calculator>2+2</calculator>"
ANSWER = f"<answer>4</answer>{END}"


@contextlib.contextmanager
def refused(refusal: Refusal) -> Generator[None]:
    with pytest.raises(RequestRefused) as caught:
        yield
    assert caught.value.refusal is refusal


def slow(*turns: str) -> ScriptedEngine:
    """Turns of a few seconds."""
    engine = says(*turns)
    engine.token_s = 0.2
    return engine


def test_nothing_is_taken_before_the_first_version() -> None:
    async def scenario() -> None:
        engine = says(ANSWER)
        engine.version = NO_VERSION
        async with Cluster(engine).running() as cluster:
            with refused(Refusal.NOT_READY):
                await cluster.ask(assign())
            applied = await cluster.ask(ApplyVersion(manifest=manifest(3)))
            assert (applied.version, applied.digest) == (3, "digest-3")
            await cluster.ask(assign())
            assert (await cluster.result()).reward == 1.0

    run_sim(scenario())


def test_an_applied_version_is_told_to_everybody() -> None:
    async def scenario() -> None:
        async with Cluster(says(ANSWER)).running() as cluster:
            await cluster.ask(ApplyVersion(manifest=manifest(9)))
            await asyncio.sleep(2)
            assert cluster.scheduler.reports[-1].version == 9
            assert (await cluster.fleet())["short-0"].version == 9

    run_sim(scenario())


def test_an_older_version_is_answered_with_the_applied_one() -> None:
    async def scenario() -> None:
        async with Cluster(says(ANSWER)).running() as cluster:
            await cluster.ask(ApplyVersion(manifest=manifest(9)))
            for version in (8, 9):
                again = await cluster.ask(ApplyVersion(manifest=manifest(version)))
                assert (again.version, again.digest, again.apply_s) == (9, "digest-9", 0.0)

    run_sim(scenario())


@pytest.mark.parametrize(
    ("error", "refusal"),
    [(ShardCorrupt(9, "chunk 3"), Refusal.FAILED), (VersionGone(9), Refusal.NOT_FOUND)],
)
def test_a_version_that_cannot_be_applied_leaves_the_old_one(
    error: Exception, refusal: Refusal
) -> None:
    async def scenario() -> None:
        async with Cluster(says(ANSWER)).running() as cluster:
            cluster.engine.apply_error = error
            with refused(refusal):
                await cluster.ask(ApplyVersion(manifest=manifest(9)))
            assert cluster.engine.version == 7
            await cluster.ask(assign())
            assert (await cluster.result()).reward == 1.0

    run_sim(scenario())


def test_a_swap_goes_on_when_its_caller_gives_up() -> None:
    async def scenario() -> None:
        async with Cluster(says(ANSWER)).running() as cluster:
            cluster.engine.apply_s = 30.0
            with pytest.raises(RequestTimeout):
                await cluster.ask(ApplyVersion(manifest=manifest(9)))
            applied = await cluster.ask(ApplyVersion(manifest=manifest(9)))
            assert applied.version == cluster.engine.version == 9

    run_sim(scenario())


def test_the_same_assignment_twice_is_one_trajectory() -> None:
    async def scenario() -> None:
        async with Cluster(slow(ANSWER)).running() as cluster:
            assert (await cluster.ask(assign())).holding == 1
            assert (await cluster.ask(assign())).holding == 1
            await cluster.result()
            assert len(cluster.engine.requests) == len(cluster.tools.openings) == 1

    run_sim(scenario())


def test_a_newer_lease_takes_over_and_an_older_one_is_refused() -> None:
    async def scenario() -> None:
        async with Cluster(slow(ANSWER)).running() as cluster:
            await cluster.ask(assign(lease=2))
            await until(lambda: bool(cluster.engine.requests))
            await cluster.ask(assign(lease=3))
            with refused(Refusal.STALE_FENCE):
                await cluster.ask(assign(lease=2))
            await cluster.result()
            assert [turn.lease for turn in cluster.scheduler.turns] == [3]
            assert cluster.engine.aborted == ["t0/2/0"]

    run_sim(scenario())


def test_a_dropped_trajectory_frees_the_engine_at_once() -> None:
    async def scenario() -> None:
        async with Cluster(slow(ANSWER)).running() as cluster:
            await cluster.ask(assign(lease=2))
            await until(lambda: bool(cluster.engine.requests))
            await cluster.ask(DropTrajectory(trajectory_id="t0", lease=1))
            assert cluster.engine.aborted == []
            await cluster.ask(DropTrajectory(trajectory_id="t0", lease=2))
            await cluster.ask(DropTrajectory(trajectory_id="t0", lease=2))
            assert cluster.engine.aborted == ["t0/2/0"]
            await asyncio.sleep(3)
            assert cluster.scheduler.reports[-1].holding == []

    run_sim(scenario())


def test_what_the_scheduler_does_not_count_as_ours_is_dropped() -> None:
    async def scenario() -> None:
        async with Cluster(slow(ANSWER)).running() as cluster:
            cluster.scheduler.drop = ["t0", "unknown"]
            await cluster.ask(assign())
            await until(lambda: cluster.engine.aborted == ["t0/1/0"])

    run_sim(scenario())


def test_more_than_the_slots_hold_is_refused() -> None:
    async def scenario() -> None:
        async with Cluster(slow(ANSWER)).running() as cluster:
            slots = cluster.config.buckets[0].slots
            for number in range(HELD_PER_SLOT_MAX * slots):
                await cluster.ask(assign(f"t{number}"))
            with refused(Refusal.OVERLOADED):
                await cluster.ask(assign("one-more"))

    run_sim(scenario())


def test_a_turn_outlives_a_restart_of_the_scheduler() -> None:
    async def scenario() -> None:
        cluster = Cluster(slow(CALL, ANSWER))
        async with cluster.running():
            await cluster.ask(assign())
            await until(lambda: bool(cluster.engine.requests))
            cluster.network.partition(cluster.worker.mesh.identity, cluster.scheduler_identity)
            await asyncio.sleep(15)
            assert cluster.scheduler.turns == []
            async with cluster.restarted("scheduler"):
                assert (await cluster.result()).reward == 1.0
        assert [turn.turn for turn in cluster.scheduler.turns] == [0, 1]
        assert len(cluster.engine.requests) == 2

    run_sim(scenario())


def test_a_turn_that_cannot_be_reported_is_given_up_in_the_end() -> None:
    async def scenario() -> None:
        cluster = Cluster(says(CALL, ANSWER))
        async with cluster.running():
            await cluster.ask(assign())
            cluster.network.partition(cluster.worker.mesh.identity, cluster.scheduler_identity)
            await asyncio.sleep(90)
            cluster.network.heal(cluster.worker.mesh.identity, cluster.scheduler_identity)
            await asyncio.sleep(10)
            assert cluster.scheduler.reports[-1].holding == []
            assert len(cluster.engine.requests) == 1

    run_sim(scenario())


def test_trajectories_go_on_while_the_coordinator_restarts() -> None:
    async def scenario() -> None:
        cluster = Cluster(slow(CALL, CALL, ANSWER))
        async with cluster.running():
            await cluster.ask(assign())
            await until(lambda: bool(cluster.engine.requests))
            async with cluster.restarted("coordinator"):
                assert (await cluster.result()).reward == 1.0
                await asyncio.sleep(10)

    run_sim(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_loses_and_repeats_costs_no_turn(seed: int) -> None:
    async def scenario() -> Cluster:
        network = SimNetwork(seed)
        cluster = Cluster(says(CALL, CALL, ANSWER), network=network)
        async with cluster.running():
            for number in range(4):
                await cluster.ask(assign(f"t{number}"))
            network.faults = Faults(loss=0.1, duplicate=0.1, reorder=0.1)
            await until(lambda: cluster.scheduler.ended(4), timeout_s=600)
            network.faults = Faults()
        return cluster

    cluster = run_sim(scenario())
    for number in range(4):
        turns = cluster.scheduler.of(f"t{number}")
        assert sorted(turn.turn for turn in turns) == [0, 1, 2]
        assert turns[-1].result
        assert turns[-1].result.reward == 1.0
    assert len(cluster.tools.calls) == 8


def test_a_stopping_worker_finishes_its_turns_and_takes_nothing_new() -> None:
    async def scenario() -> None:
        async with Cluster(slow(CALL, ANSWER)).running() as cluster:
            await cluster.ask(assign())
            await until(lambda: bool(cluster.engine.requests))
            cluster.stopping.set()
            await asyncio.sleep(0.1)
            with refused(Refusal.DRAINING):
                await cluster.ask(assign("t1"))
            with refused(Refusal.DRAINING):
                await cluster.ask(ApplyVersion(manifest=manifest(9)))
            await cluster.stopped.wait()
            assert [turn.turn for turn in cluster.scheduler.turns] == [0]
            assert len(cluster.engine.requests) == 1
            assert cluster.scheduler.reports[-1].holding == []
            assert "short-0" not in await cluster.fleet()

    run_sim(scenario())


def test_a_stopping_worker_does_not_wait_for_a_hanging_tool() -> None:
    async def scenario() -> None:
        cluster = Cluster(says(CALL), FakeTools(call_s=1000.0))
        async with cluster.running():
            await cluster.ask(assign())
            await cluster.tools.entered.wait()
            before = asyncio.get_running_loop().time()
            cluster.stopping.set()
            await cluster.stopped.wait()
            assert asyncio.get_running_loop().time() - before < 15
            assert cluster.scheduler.turns == []

    run_sim(scenario())


def test_a_dead_engine_ends_the_process_and_fails_no_trajectory() -> None:
    engine = ScriptedEngine(lambda _request: EngineError("the engine is dead"), version=7)
    engine.broken = True
    cluster = Cluster(engine)

    async def scenario() -> None:
        async with cluster.running():
            await cluster.ask(assign())
            await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        run_sim(scenario())
    assert caught.group_contains(EngineError)
    assert cluster.scheduler.turns == []


def test_a_worker_in_quarantine_hands_everything_back_and_ends_if_nothing_mends_it() -> None:
    cluster = Cluster(slow(ANSWER))

    async def scenario() -> None:
        async with cluster.running():
            await cluster.ask(assign())
            await until(lambda: bool(cluster.engine.requests))
            cluster._worker._membership._exclude(excluded=True)
            with refused(Refusal.DRAINING):
                await cluster.ask(assign("t1"))
            await asyncio.sleep(2)
            last = cluster.scheduler.reports[-1]
            assert (last.slots, last.holding) == (0, [])
            await asyncio.sleep(EXCLUDED_MAX_S + 5)

    with pytest.raises(ExceptionGroup) as caught:
        run_sim(scenario())
    assert caught.group_contains(RunFailed, match="started anew")


# The process around the worker.


async def run_service(
    runtime: Runtime, engine: ScriptedEngine, stopping: asyncio.Event | None = None
) -> None:
    service = RolloutService(runtime, lambda *_: engine, lambda _path: TINY)
    await service.run(stopping or asyncio.Event())


def test_an_engine_that_does_not_start_in_time_ends_the_process() -> None:
    engine = says(ANSWER)
    engine.start_s = 1e6
    config = sim_config(rollout=RolloutConfig(tool_format="tags", start_timeout_s=5))

    async def scenario() -> None:
        async with process(SimNetwork(0), "rollout", "short-0", config=config) as runtime:
            await run_service(runtime, engine)

    with pytest.raises(ExceptionGroup) as caught:
        run_sim(scenario())
    assert caught.group_contains(RunFailed, match="short-0 was not ready within 5 s")
    assert engine.closed


def test_a_process_can_be_stopped_while_its_engine_starts() -> None:
    engine = says(ANSWER)
    engine.start_s = 100.0

    async def scenario() -> float:
        config = rollout_config()
        async with process(SimNetwork(0), "rollout", "short-0", config=config) as runtime:
            stopping = asyncio.Event()
            asyncio.get_running_loop().call_later(3.0, stopping.set)
            await run_service(runtime, engine, stopping)
            return asyncio.get_running_loop().time()

    assert run_sim(scenario()) < 5
    assert engine.closed


async def test_the_event_loop_goes_on_while_the_engine_is_made() -> None:
    engine = says(ANSWER)
    proceed, stopping = threading.Event(), asyncio.Event()

    def slow_factory(*_: object) -> ScriptedEngine:
        assert proceed.wait(10.0)
        return engine

    async with process(SimNetwork(0), "rollout", "short-0", config=rollout_config()) as runtime:
        service = RolloutService(runtime, slow_factory, lambda _path: TINY)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.run(stopping))
            await asyncio.sleep(0.01)
            stopping.set()
            proceed.set()
    assert engine.closed


def test_the_service_runs_a_worker_once_its_engine_is_up() -> None:
    async def scenario() -> None:
        engine = says(ANSWER)
        engine.start_s = 2.0
        cluster = Cluster(engine)
        cluster.build = lambda runtime: RolloutService(
            runtime, lambda *_: engine, lambda _path: TINY
        )
        async with cluster.running():
            await cluster.ask(assign())
            assert (await cluster.result()).reward == 1.0
            assert not engine.closed
        assert engine.closed

    run_sim(scenario())


def test_a_worker_is_named_after_its_bucket_and_its_number_there() -> None:
    config = sim_config(
        buckets=[BucketConfig(name="short"), BucketConfig(name="very-long", workers=3)]
    )
    assert place_of("very-long-2", config) == (config.buckets[1], 2)
    for name in ("very-long-3", "very-long", "medium-0", "short", "short-x"):
        with pytest.raises(ConfigError, match="short-0 to short-0, very-long-0 to very-long-2"):
            place_of(name, config)
