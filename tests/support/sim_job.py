"""A whole job on the simulated network: real scheduler, coordinator and rollout workers with the
fake engine; a tool server and a trainer that only keep their protocols."""

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.config import BucketConfig, Config, RunConfig, SamplingConfig, TrainingConfig
from common.messages.scheduler import GroupData, TurnData
from common.messages.tools import GradeSession, SessionGraded
from common.service import Runtime
from common.trajectory import unpack_tokens
from common.transport.sim import SimNetwork
from common.weights import step_of
from services.coordinator.service import CoordinatorService
from services.rollout.fake_engine import FakeEngine
from services.rollout.service import RolloutService
from services.scheduler.ledger import MemoryLedger
from services.scheduler.service import SchedulerService
from tests.support.chat import tiny_chat
from tests.support.peers import FakeTools, returns
from tests.support.rollouts import FakeTrainer
from tests.support.sim import describe, serving, sim_config, until

CALL = "<calculator>2+2</calculator>"
ANSWER = "<answer>4</answer>"
PATIENCE_S = 600.0
"""Of virtual time: no job here takes longer unless it hangs."""
TINY = tiny_chat()


def script(context: object, seed: int, version: int) -> list[int]:
    """Call the tool on some seeds, answer on others, and end the turn."""
    text = CALL if (seed + version) % 3 else ANSWER
    return [*TINY.encode(text), *TINY.end_tokens]


class GradingTools(FakeTools):
    """Rewards depend on the trajectory, so that no group is all equal."""

    def _grade(self, sender: str, request: GradeSession) -> SessionGraded:
        super()._grade(sender, request)
        return SessionGraded(reward=float(sum(request.session_id.encode()) % 7))


class CheckingTrainer(FakeTrainer):
    """A trainer that checks what it trains."""

    @property
    def groups(self) -> Counter[str]:
        """How often each group was trained."""
        return Counter(group.group_id for step in self.trained.values() for group in step)

    @property
    def staleness_max(self) -> int:
        """Of any token of any step; also checks that versions only grow within a turn."""
        return max(
            step - 1 - step_of(min(versions))
            for step, groups in self.trained.items()
            for versions in map(turn_versions, turns(groups))
        )


def turns(groups: list[GroupData]) -> list[TurnData]:
    """All turns that have sampled tokens."""
    return [
        turn
        for group in groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
        if turn.action_tokens
    ]


def turn_versions(turn: TurnData) -> list[int]:
    """The version of each token of a turn."""
    versions = unpack_tokens(turn.action_versions)
    assert len(versions) * 4 == len(turn.action_tokens) == len(turn.action_logprobs)
    assert versions == sorted(versions), "versions are applied in order"
    return versions


@dataclass
class SimJob:
    """One job. `async with running()` starts all of its processes."""

    network: SimNetwork
    directory: Path
    max_steps: int = 6
    trainer: CheckingTrainer = field(default_factory=CheckingTrainer)
    tools: FakeTools = field(default_factory=lambda: GradingTools(call=returns("4")))
    ledger: MemoryLedger = field(default_factory=MemoryLedger)

    def config(self) -> Config:
        """Four tasks a step, in groups of three."""
        tasks = self.directory / "tasks.jsonl"
        rows = [{"task_id": f"t{n}", "environment": "calculator"} for n in range(60)]
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return sim_config(
            run=RunConfig(name="sim", max_steps=self.max_steps),
            tasks={"path": str(tasks)},
            model={"path": "m", "context_tokens": 512},
            sampling=SamplingConfig(turns_max=3, turn_tokens_max=48, trajectory_tokens_max=128),
            rollout={"tool_format": "tags"},
            buckets=[BucketConfig(name="short", slots=6), BucketConfig(name="long", slots=6)],
            training=TrainingConfig(groups_per_step=4, group_size=3, zero_variance="keep"),
            tools=[{"name": "calculator", "target": "x"}],
        )

    @contextlib.asynccontextmanager
    async def running(self):  # noqa: ANN201
        """Yields a function that starts one more incarnation of a process."""
        config = self.config()
        builds = {
            "coordinator": lambda runtime: CoordinatorService(runtime, describe),
            "scheduler": lambda runtime: SchedulerService(runtime, self.ledger),
            "calculator": self.tools,
            "short-0": self.rollout,
            "long-0": self.rollout,
            "trainer": self.trainer,
        }
        roles = {"calculator": "tools", "short-0": "rollout", "long-0": "rollout"}
        async with contextlib.AsyncExitStack() as stack:

            async def start(name: str, incarnation: int = 1) -> Runtime:
                return await stack.enter_async_context(
                    serving(
                        self.network,
                        roles.get(name, name),
                        name,
                        builds[name],
                        config=config,
                        run_dir=self.directory,
                        incarnation=incarnation,
                    )
                )

            yield start

    def rollout(self, runtime: Runtime) -> RolloutService:
        """A rollout process with the fake engine."""

        def engine(config: Config, bucket: BucketConfig, index: int, run_id: str) -> FakeEngine:
            del config, index, run_id
            return FakeEngine(script=script, decode=TINY.decode, slots=bucket.slots)

        return RolloutService(runtime, engine, lambda _path: TINY)

    async def play(self) -> None:
        """Start everything and wait for the trainer's end."""
        async with self.running() as start:
            names = ("coordinator", "scheduler", "calculator", "short-0", "long-0", "trainer")
            for name in names:
                await start(name)
            await until(lambda: self.trainer.reason is not None, PATIENCE_S)
