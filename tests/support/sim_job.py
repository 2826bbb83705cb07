"""A whole job on the simulated network: real scheduler, coordinator and rollout workers with the
fake engine; a tool server and a trainer that only keep their protocols."""

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from common.config import BucketConfig, Config, RunConfig, SamplingConfig, TrainingConfig
from common.errors import RequestRefused, TransportError
from common.membership import Membership
from common.messages.coordinator import Manifest, PublishVersion
from common.messages.scheduler import (
    BeginLineage,
    FetchGroup,
    StepFinished,
    TakeBatch,
)
from common.messages.tools import GradeSession, SessionGraded
from common.service import Runtime
from common.trajectory import unpack_tokens
from common.transport.sim import SimNetwork
from common.weights import step_of, version_id
from services.coordinator.service import CoordinatorService
from services.rollout.fake_engine import FakeEngine
from services.rollout.service import RolloutService
from services.scheduler.ledger import MemoryLedger
from services.scheduler.service import SchedulerService
from tests.support.chat import tiny_chat
from tests.support.peers import FakeTools, returns
from tests.support.sim import serving, sim_config

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


@dataclass
class SimTrainer:
    """Takes batches, publishes versions, reports steps; checks what it is given."""

    trained: Counter[str] = field(default_factory=Counter[str])
    """Groups by how often they were trained."""
    staleness_max: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    step_s: float = 0.5

    def __call__(self, runtime: Runtime) -> "SimTrainer":
        self._runtime = runtime
        self._membership = Membership(runtime)
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(self._membership.run()), tasks.create_task(self._train())]
            await stopping.wait()
            for loop in loops:
                loop.cancel()

    async def _train(self) -> None:
        await self._membership.joined(timeout_s=60)
        lineage = (await self._ask(BeginLineage(step=0))).lineage
        await self._publish(version_id(lineage, 0))
        step = 1
        while True:
            offer = await self._ask(TakeBatch(lineage=lineage, step=step))
            if offer.exhausted:
                break
            if not offer.group_ids:
                continue
            for group_id in offer.group_ids:
                await self._check(group_id, step)
            await asyncio.sleep(self.step_s)
            await self._publish(version_id(lineage, step))
            finished = StepFinished(
                lineage=lineage,
                step=step,
                attempt=0,
                skipped="",
                group_ids=offer.group_ids,
                metrics={"time/step": self.step_s},
            )
            recorded = await self._ask(finished)
            self.trained.update(offer.group_ids)
            if recorded.stop:
                break
            step += 1
        self.finished.set()

    async def _check(self, group_id: str, step: int) -> None:
        group = await self._ask(FetchGroup(group_id=group_id))
        for trajectory in group.trajectories:
            assert trajectory.prompt_tokens
            for turn in trajectory.turns:
                versions = unpack_tokens(turn.action_versions)
                assert len(versions) * 4 == len(turn.action_tokens) == len(turn.action_logprobs)
                assert versions == sorted(versions), "versions are applied in order"
                staleness = step - 1 - min(step_of(version) for version in versions)
                self.staleness_max = max(self.staleness_max, staleness)

    async def _ask(self, request):  # noqa: ANN202
        """Until it is answered: every request of a trainer is idempotent."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    scheduler = await self._membership.wait_for("scheduler", timeout_s=60)
                    return await self._membership.request(scheduler, request, timeout_s=5)
                except (TransportError, RequestRefused):
                    await asyncio.sleep(0.2)

    async def _publish(self, version: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    request = PublishVersion(version=version, segment=f"sim:{version}")
                    await self._membership.ask_coordinator(request, timeout_s=5)
                except (TransportError, RequestRefused):
                    await asyncio.sleep(0.2)
                else:
                    return


async def describe(version: int, segment: str) -> Manifest:
    """A manifest of nothing."""
    return Manifest(
        version=version,
        segment=segment,
        length=0,
        chunk_bytes=1,
        chunks=[],
        digest=f"digest-{version}",
        tensors=[],
    )


@dataclass
class SimJob:
    """One job. `async with running()` starts all of its processes."""

    network: SimNetwork
    directory: Path
    max_steps: int = 6
    trainer: SimTrainer = field(default_factory=SimTrainer)
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
            async with asyncio.timeout(PATIENCE_S):
                await self.trainer.finished.wait()
