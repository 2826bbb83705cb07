"""The simulated world and the scheduler's service are the same scheduler.

One small workload with fixed scripts and tool outcomes is played twice: by the world, which drives
the book with modelled delays, and by the real scheduler service with real rollout workers, the
fake engine and a tool peer on the simulated network. Tasks, names and sizes are equal, so the two
ledgers can be compared row by row.

What is decided with `round_robin` depends on the order of admission alone, as long as all workers
take something whenever anything is placed; so every decision must be equal, its target included.
With `mlfq` the moves depend on lengths alone, since the second bucket has one worker. With `libra`
all depends on loads, speeds and predictions, and through them on times, which the two model
differently on purpose (an iteration of a large model against a fixed time per token). What must be
equal there is all that no time may change: what is played, and what is written down of it. Which
groups share a step depends on which are ready first, with any policy.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from common.clock import run_sim
from common.config import BucketConfig, Config, RunConfig, SamplingConfig, TrainingConfig
from common.messages.tools import (
    CallTool,
    ChatMessage,
    GradeSession,
    OpenSession,
    SessionGraded,
    SessionOpened,
    ToolReturned,
)
from common.service import Runtime, Service
from common.trajectory import ToolStatus
from common.transport.sim import SimNetwork
from services.coordinator.service import CoordinatorService
from services.rollout.fake_engine import FakeEngine
from services.rollout.service import RolloutService
from services.scheduler.ledger import MemoryLedger
from services.scheduler.service import SchedulerService
from services.simulator.cluster import Cluster, SimBucket
from services.simulator.traces import TraceTrajectory, TraceTurn
from services.simulator.world import Scenario, World
from tests.support.chat import tiny_chat
from tests.support.peers import CALCULATOR, FakeTools
from tests.support.rollouts import FakeTrainer
from tests.support.sim import describe, serving, sim_config, until

STEPS, GROUPS_PER_STEP, GROUP_SIZE = 4, 2, 3
CONTEXT_TOKENS = 1024
CALL_S = 0.05
PATIENCE_S = 300.0
TINY = tiny_chat()
CLUSTER = Cluster(
    "pair",
    "two buckets, three workers",
    (
        SimBucket("short", 1, 256, (1, 1), slots=16),
        SimBucket("long", 1, CONTEXT_TOKENS, (1,), slots=16),
    ),
    train_devices=8,
    trajectories_per_step=GROUPS_PER_STEP * GROUP_SIZE,
)
DECIDED = (
    "trajectory_id, number, kind, turn, lease, source, target, reason, action_tokens, "
    "context_tokens"
)


@dataclass(frozen=True)
class Scripted:
    """What one trajectory does, as texts; in the tiny tokenizer a character is a token."""

    prompt: str
    actions: tuple[str, ...]
    """All but the last call the tool."""
    returned: tuple[tuple[ToolStatus, str], ...]
    reward: float

    @property
    def trace(self) -> TraceTrajectory:
        """The same as numbers."""
        calls = [
            # The engine stops at the closing tag; the template adds four tokens and two tags.
            TraceTurn(len(action), "calculator", status, 4 + 17 + len(content), CALL_S)
            for action, (status, content) in zip(self.actions, self.returned, strict=False)
        ]
        last = TraceTurn(len(self.actions[-1]) + 1, "", None, 0, None)
        return TraceTrajectory("", "", 3 + len(self.prompt), (*calls, last), self.reward)


@cache
def scripted(trajectory_id: str) -> Scripted:
    """By dice that know nothing but the name."""
    group_id, _, _ = trajectory_id.rpartition(".")
    shared, dice = Random(group_id), Random(trajectory_id)
    padding = "." * shared.randint(1, 30)
    calls = dice.randint(0, 3)
    statuses = [ToolStatus.OK, ToolStatus.OK, ToolStatus.ERROR]
    actions = [f"<calculator>{'7' * dice.randint(1, 60)}</calculator>" for _ in range(calls)]
    return Scripted(
        prompt=f"[{trajectory_id}]{padding}",
        actions=(*actions, "answer" + "!" * dice.randint(1, 60)),
        returned=tuple((dice.choice(statuses), "4" * dice.randint(1, 40)) for _ in range(calls)),
        reward=dice.random(),
    )


@dataclass(frozen=True)
class Written:
    """The workload as the world asks for it."""

    tasks: Sequence[str]
    """In order of admission."""
    group_size: int = GROUP_SIZE

    def group(self, index: int, step: int) -> list[TraceTrajectory]:
        del step
        group_id = f"{self.tasks[index]}.e0.a0"
        return [scripted(f"{group_id}.{number}").trace for number in range(GROUP_SIZE)]


def play_world(policy: str, ledger: MemoryLedger) -> None:
    scenario = Scenario(CLUSTER, policy, 0, steps=STEPS, groups_per_step=GROUPS_PER_STEP)
    tasks: list[str] = []
    world = World(scenario, Written(tasks), ledger)
    tasks += [world.order.at(place)[1] for place in range(world.order.length)]
    world.run()


class ScriptedTools(FakeTools):
    """Shows each trajectory its name, and returns what its script says."""

    def _open(self, sender: str, request: OpenSession) -> SessionOpened:
        super()._open(sender, request)
        shown = ChatMessage(role="user", content=self._script(request.session_id).prompt)
        return SessionOpened(messages=[shown], tools=[CALCULATOR])

    def _grade(self, sender: str, request: GradeSession) -> SessionGraded:
        super()._grade(sender, request)
        return SessionGraded(reward=self._script(request.session_id).reward)

    @staticmethod
    def _script(session_id: str) -> Scripted:
        return scripted(session_id.rpartition("-")[0])

    @classmethod
    def returning(cls) -> "ScriptedTools":
        def call(request: CallTool) -> ToolReturned:
            status, content = cls._script(request.session_id).returned[int(request.call_id)]
            return ToolReturned(status=status, content=content, latency_s=CALL_S)

        return cls(call=call, call_s=CALL_S)


def action(context: Sequence[int], seed: int, version: int) -> list[int]:
    """What the engine samples: the script of whoever is named in the context."""
    del seed, version
    text = TINY.decode(context)
    script = scripted(text.partition("[")[2].partition("]")[0])
    said = script.actions[text.count("<|assistant|>") - 1]
    return [*TINY.encode(said), *TINY.end_tokens]


def job_config(policy: str, tasks: Path) -> Config:
    """The world's cluster and rules."""
    rows = [
        {"task_id": str(n), "environment": "calculator"} for n in range(STEPS * GROUPS_PER_STEP)
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sim_config(
        run=RunConfig(name="sim", max_steps=STEPS, seed=0),
        tasks={"path": str(tasks), "epochs": 1},
        model={"path": "m", "context_tokens": CONTEXT_TOKENS},
        sampling=SamplingConfig(turns_max=8, turn_tokens_max=256, trajectory_tokens_max=1024),
        rollout={"tool_format": "tags"},
        scheduler={"placement": policy},
        buckets=[
            BucketConfig(
                name=bucket.name,
                workers=len(bucket.nodes),
                slots=bucket.slots,
                kv_tokens=CLUSTER.kv_tokens(bucket),
                context_tokens_max=bucket.context_tokens_max,
            )
            for bucket in CLUSTER.buckets
        ],
        training=TrainingConfig(
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            group_usable_min=1,
            zero_variance="keep",
        ),
        tools=[{"name": "calculator", "target": "x"}],
    )


def rollout(runtime: Runtime) -> RolloutService:
    def engine(config: Config, bucket: BucketConfig, index: int, run_id: str) -> FakeEngine:
        del index, run_id
        return FakeEngine(
            script=action,
            decode=TINY.decode,
            slots=bucket.slots,
            kv_tokens=bucket.kv_tokens,
            context_tokens_max=config.model.context_tokens,
        )

    return RolloutService(runtime, engine, lambda _path: TINY)


async def play_service(policy: str, ledger: MemoryLedger, directory: Path) -> FakeTrainer:
    network, trainer = SimNetwork(0), FakeTrainer()
    config, peers = job_config(policy, directory / "tasks.jsonl"), CLUSTER.workers()

    async with contextlib.AsyncExitStack() as stack:

        async def start(role: str, name: str, build: Callable[[Runtime], Service]) -> None:
            running = serving(network, role, name, build, config=config, run_dir=directory)
            await stack.enter_async_context(running)

        await start("coordinator", "coordinator", lambda it: CoordinatorService(it, describe))
        await start("scheduler", "scheduler", lambda it: SchedulerService(it, ledger))
        await start("tools", "calculator", ScriptedTools.returning())
        for peer in peers:
            await start("rollout", peer.name, rollout)
        await start("trainer", "trainer", trainer)
        await until(lambda: trainer.reason is not None, PATIENCE_S)
    return trainer


@dataclass
class Both:
    """The two ledgers of one policy."""

    policy: str
    simulated: MemoryLedger
    served: MemoryLedger
    trainer: FakeTrainer

    def rows(self, sql: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        """What a query gives of the world, and of the service."""
        return self.simulated._store.rows(sql), self.served._store.rows(sql)


@pytest.fixture(scope="module", params=["round_robin", "mlfq", "libra"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    policy, simulated, served = request.param, MemoryLedger(), MemoryLedger()
    play_world(policy, simulated)
    directory = tmp_path_factory.mktemp(policy)
    trainer = run_sim(play_service(policy, served, directory))
    yield Both(policy, simulated, served, trainer)
    simulated.close()
    served.close()


def test_the_same_turns_are_played_with_the_same_tokens_and_outcomes(both: Both) -> None:
    simulated, served = both.rows(
        "SELECT trajectory_id, turn, length(prompt_tokens), length(action_tokens), "
        "length(action_logprobs), length(action_versions), length(observation_tokens), tool, "
        "tool_status FROM turns ORDER BY trajectory_id, turn"
    )
    assert simulated == served
    assert (
        len({trajectory_id for trajectory_id, *_ in served}) == STEPS * GROUPS_PER_STEP * GROUP_SIZE
    )
    assert {status for *_, status in served} == {None, "ok", "error"}


def test_the_same_trajectories_finish_with_the_same_sums(both: Both) -> None:
    simulated, served = both.rows(
        "SELECT trajectory_id, group_id, number, state, losses, turns, prompt_tokens, "
        "action_tokens, observation_tokens, tools, stop_reason, reward, failure "
        "FROM trajectories ORDER BY trajectory_id"
    )
    assert simulated == served
    assert {row[3] for row in served} == {"finished"}


def test_the_same_groups_and_tasks_are_trained_once_in_as_many_steps(both: Both) -> None:
    for sql in (
        "SELECT group_id, task_id, epoch, attempt, state FROM groups ORDER BY group_id",
        "SELECT epoch, task_id, state, attempts, reason FROM tasks ORDER BY task_id",
        "SELECT lineage, step, attempt, skipped FROM steps ORDER BY step",
        "SELECT step, count(*) FROM groups GROUP BY step ORDER BY step",
    ):
        simulated, served = both.rows(sql)
        assert simulated == served, sql
    trained = [group.group_id for step in both.trainer.trained.values() for group in step]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS_PER_STEP


def test_decisions_have_the_same_shape(both: Both) -> None:
    def shape(rows: list[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
        """By kind of decision, the types of its values."""
        return {(kind, *map(type, values)) for kind, *values in rows}

    simulated, served = both.rows("SELECT kind, * FROM decisions WHERE kind != 'moved'")
    assert shape(simulated) == shape(served)
    assert {kind for kind, *_ in served} == {"placed", "stayed", "ended"}
    tellings = both.rows(
        "SELECT trajectory_id, turn, action_tokens, context_tokens FROM decisions "
        "WHERE kind != 'returned' ORDER BY trajectory_id, number"
    )
    assert tellings[0] == tellings[1]


@pytest.mark.parametrize("both", ["round_robin"], indirect=True)
def test_decisions_that_times_do_not_change_are_equal_in_every_column(both: Both) -> None:
    simulated, served = both.rows(f"SELECT {DECIDED} FROM decisions ORDER BY trajectory_id, number")
    assert simulated == served
    assert len({row[6] for row in served if row[6]}) == 3


@pytest.mark.parametrize("both", ["mlfq"], indirect=True)
def test_moves_that_lengths_decide_are_of_the_same_trajectories_at_the_same_turns(
    both: Both,
) -> None:
    simulated, served = both.rows(
        "SELECT trajectory_id, turn, lease, target, context_tokens FROM decisions "
        "WHERE kind = 'moved' ORDER BY trajectory_id, number"
    )
    assert simulated == served
    assert served, "something moved"
