"""Moves by the real scheduler on the simulated network: whatever is lost or dies at any message."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import pytest

from common.clock import run_sim
from common.config import BucketConfig, Config, RunConfig, SchedulerConfig, TrainingConfig
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import TrajectoryResult, TurnFinished
from common.service import Runtime
from common.trajectory import pack_tokens
from common.transport.sim import Faults, SimNetwork
from services.coordinator.service import CoordinatorService
from services.scheduler.ledger import MemoryLedger
from services.scheduler.records import Row
from services.scheduler.service import SchedulerService
from tests.support.rollouts import FakeTrainer, FakeWorker
from tests.support.scheduling import Restless, reward
from tests.support.sim import describe, serving, sim_config, until

TURNS = 6
PATIENCE_S = 120.0
SWEPT = 150
"""Messages after the first turn that the sweeps go through, with steps of `STRIDE`."""
STRIDE = 7


def chained(context: bytes) -> bytes:
    """What is sampled after a context: two tokens that nothing but that context gives."""
    return pack_tokens([crc32(context) >> 1] * 2)


class ChainedWorker(FakeWorker):
    """Samples tokens that tell on which context they follow."""

    def make_turn(
        self, order: AssignTrajectory, lease: int, turn: int, context: bytes
    ) -> TurnFinished:
        made = super().make_turn(order, lease, turn, context)
        follows = context + made.prompt_tokens
        return made.model_copy(update={"action_tokens": chained(follows)})


def some_turns(order: AssignTrajectory, turn: int) -> TrajectoryResult | None:
    return reward(float(order.trajectory_id.endswith("0"))) if turn == TURNS - 1 else None


class Killing(SimNetwork):
    """Ends a process at one message, just before it is sent."""

    def __init__(self, seed: int, *, at: int = -1, victim: str = "", faults: Faults) -> None:
        super().__init__(seed, faults)
        self.at, self.victim = at, victim
        self.killed = asyncio.Event()

    def send(self, sender, receiver: str, payload: bytes) -> None:
        if self.payloads_sent == self.at:
            self.kill(next(i for i in self._live if i.split("/")[2] == self.victim))
            self.killed.set()
        super().send(sender, receiver, payload)


class Hand(MemoryLedger):
    """One scheduler's hand on the run's ledger. When the process is dead, it writes no more."""

    def __init__(self, ledger: MemoryLedger, network: SimNetwork, identity: str) -> None:
        super().__init__()
        self.close()
        self._store = ledger._store
        self._network, self._identity = network, identity

    def apply(self, rows: Sequence[Row]) -> None:
        if self._identity in self._network._live:
            super().apply(rows)


@dataclass
class MovingRun:
    """Two workers between which hardly anything stays where it is."""

    network: SimNetwork
    directory: Path
    groups: int = 1
    max_steps: int = 1
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    trainer: FakeTrainer = field(default_factory=lambda: FakeTrainer(step_s=0.1))

    def config(self) -> Config:
        path = self.directory / "tasks.jsonl"
        path.write_text("".join(f'{{"task_id": "t{n}", "environment": "e"}}\n' for n in range(10)))
        training = {"groups_per_step": self.groups, "group_size": 2, "zero_variance": "keep"}
        return sim_config(
            run=RunConfig(name="sim", max_steps=self.max_steps),
            tasks={"path": str(path)},
            training=TrainingConfig.model_validate(training),
            scheduler=SchedulerConfig(max_staleness_steps=0, lease_s=3.0),
            buckets=[BucketConfig(name="short", workers=2)],
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator:
        """Yields a function that starts one more incarnation of a process."""
        config = self.config()
        builds = {
            "coordinator": lambda runtime: CoordinatorService(runtime, describe),
            "scheduler": self.scheduler,
            "trainer": self.trainer,
        }
        async with contextlib.AsyncExitStack() as stack:

            async def start(name: str, incarnation: int = 1) -> Runtime:
                role = name if name in builds else "rollout"
                build = builds.get(name) or ChainedWorker(some_turns, turn_s=0.4)
                options = {"config": config, "run_dir": self.directory, "incarnation": incarnation}
                return await stack.enter_async_context(
                    serving(self.network, role, name, build, **options)
                )

            for name in ("coordinator", "scheduler", "short-0", "short-1", "trainer"):
                await start(name)
            yield start

    def scheduler(self, runtime: Runtime) -> SchedulerService:
        hand = Hand(self.ledger, self.network, runtime.mesh.identity)
        return SchedulerService(runtime, hand, Restless())

    async def play(self) -> None:
        async with self.running():
            await until(lambda: self.trainer.reason is not None, PATIENCE_S)

    async def play_with_death(self) -> None:
        """The victim is started again a moment after it was killed."""
        network = self.network
        assert isinstance(network, Killing)
        async with self.running() as start:
            try:
                async with asyncio.timeout(PATIENCE_S / 2):
                    await network.killed.wait()
            except TimeoutError:
                return
            await asyncio.sleep(0.3)
            await start(network.victim, incarnation=2)
            await until(lambda: self.trainer.reason is not None, PATIENCE_S)

    def rows(self, sql: str) -> list[tuple]:
        return self.ledger._store.rows(sql)

    def check(self) -> None:
        """Everything was trained once, and every token follows on the ones before it."""
        trained = self.rows(
            "SELECT task_id, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY 1"
        )
        assert [count for _, count in trained] == [1] * self.groups * self.max_steps
        finished = self.rows(
            "SELECT trajectory_id, turns, failure FROM trajectories t JOIN groups g"
            " USING (group_id) WHERE g.state = 'trained'"
        )
        assert {turns for _, turns, _ in finished} == {TURNS}
        for trajectory_id, _, failure in finished:
            assert failure is None
            context = b""
            for turn in self.ledger._store.turns(trajectory_id):
                context += turn.prompt_tokens
                assert turn.action_tokens == chained(context)
                context += turn.action_tokens + turn.observation_tokens

    def moves(self) -> int:
        return self.rows("SELECT COUNT(*) FROM decisions WHERE kind = 'moved'")[0][0]


def first_turn(directory: Path) -> int:
    """Number of the first message after a turn was journaled, in a run without faults."""
    run = MovingRun(SimNetwork(0), directory)

    async def scenario() -> int:
        async with run.running():
            await until(lambda: run.rows("SELECT COUNT(*) FROM turns")[0][0] > 0, PATIENCE_S)
            return run.network.payloads_sent

    return run_sim(scenario()) - 10  # The turn itself, and what was on its way with it.


@pytest.mark.parametrize("seed", range(4))
def test_a_bad_network_breaks_no_move(seed: int, tmp_path: Path) -> None:
    faults = Faults(loss=0.05, duplicate=0.1, reorder=0.1, delay_s=(0.001, 0.05))
    run = MovingRun(SimNetwork(seed, faults), tmp_path, groups=3, max_steps=2)
    run_sim(run.play())
    run.check()
    assert run.moves() > 10


@pytest.mark.slow
def test_no_lost_message_breaks_a_move(tmp_path: Path) -> None:
    begin = first_turn(tmp_path)
    moves = 0
    for lost in range(begin, begin + SWEPT, STRIDE):
        run = MovingRun(SimNetwork(0, Faults(lose=frozenset({lost}))), tmp_path)
        run_sim(run.play())
        run.check()
        moves += run.moves()
    assert moves > SWEPT / STRIDE


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["short-0", "short-1", "scheduler"])
def test_no_death_at_any_message_breaks_a_move(victim: str, tmp_path: Path) -> None:
    begin = first_turn(tmp_path)
    for at in range(begin, begin + SWEPT, STRIDE):
        run = MovingRun(Killing(0, at=at, victim=victim, faults=Faults()), tmp_path)
        run_sim(run.play_with_death())
        run.check()
