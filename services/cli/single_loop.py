"""The loop without a mesh, to compare with: sample everything, train, update, again.

One process, one engine on `training.threads` cores, the same trajectory loop, tools, loss and
weight transfer as the mesh; nothing overlaps. `python -m services.cli.single_loop CONFIG STEPS`
prints one JSON line per step. Used by `libra bench overlap`.
"""

import asyncio
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from common.config import BucketConfig, Config
from common.config_load import load_config
from common.membership import MEMORY
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import (
    GroupData,
    TrajectoryData,
    TurnData,
    TurnFinished,
    TurnRecorded,
)
from common.messages.tools import (
    CallTool,
    CloseSession,
    GradeSession,
    OpenSession,
    SessionGraded,
    SessionOpened,
    ToolReturned,
    TranscriptTurn,
)
from common.weights import version_id
from services.coordinator.manifest import build_manifest
from services.rollout.engine import Engine
from services.rollout.engines import make_engine
from services.rollout.equipment import Equipment, NoCaches
from services.rollout.limits import Limits
from services.rollout.loop import Trajectory
from services.rollout.parsers import PARSERS
from services.rollout.render import Renderer
from services.rollout.tokenizer import load_tokenizer
from services.rollout.tool_client import SessionRef
from services.scheduler.tasks import Task, TaskOrder, load_tasks
from services.tools.host import ToolHost
from services.tools.registry import load_target
from services.trainer.batch import batch_sequences
from services.trainer.model import DTYPES
from services.trainer.publish import COPY_TIMEOUT_S, Publisher
from services.trainer.ranks import Ranks

T = TypeVar("T")
NOBODY = "single"


class LocalTools:
    """The tool servers of the job, called directly."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._hosts: dict[str, ToolHost] = {}

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Load every target and start its environments."""
        for server in self._config.tools:
            offer = load_target(server.target)
            host = ToolHost(server, offer, tasks)
            for name, environment in offer.environments.items():
                await environment.start(server)
                self._hosts[name] = host

    async def open(
        self, session_id: str, environment: str, task: str
    ) -> tuple[SessionRef, SessionOpened]:
        """Open a session at the server that has the environment."""
        request = OpenSession(
            session_id=session_id, environment=environment, task=task, ttl_s=3600.0
        )
        opened = await self._hosts[environment].open_session(NOBODY, request)
        return SessionRef(session_id, environment), opened

    async def resume(self, session: SessionRef, environment: str, task: str) -> SessionOpened:
        """Trajectories never move here."""
        raise NotImplementedError

    async def call(
        self, session: SessionRef, call_id: str, tool: str, arguments: str
    ) -> ToolReturned:
        """Run a tool."""
        request = CallTool(
            session_id=session.session_id,
            call_id=call_id,
            tool=tool,
            arguments=arguments,
            timeout_s=self._config.rollout.tool_timeout_s,
        )
        return await self._hosts[session.server].call_tool(NOBODY, request)

    async def grade(
        self, session: SessionRef, turns: list[TranscriptTurn], stop_reason: str
    ) -> SessionGraded:
        """Ask for the reward."""
        request = GradeSession(
            session_id=session.session_id,
            turns=turns,
            stop_reason=stop_reason,
            timeout_s=self._config.rollout.grade_timeout_s,
        )
        return await self._hosts[session.server].grade_session(NOBODY, request)

    async def close(self, session: SessionRef) -> None:
        """Free the session."""
        self._hosts[session.server].close_session(
            NOBODY, CloseSession(session_id=session.session_id)
        )

    def forget(self, session: SessionRef) -> None:
        """Nothing is kept of it."""


class LocalJournal:
    """Keeps turns in memory."""

    def __init__(self) -> None:
        self.turns: dict[str, list[TurnFinished]] = defaultdict(list)

    async def record(self, turn: TurnFinished) -> TurnRecorded:
        """Keep it."""
        self.turns[turn.trajectory_id].append(turn)
        return TurnRecorded(go_on=turn.result is None)

    def trajectory(self, trajectory_id: str) -> TrajectoryData:
        """As the scheduler would hand it to the trainer."""
        turns = self.turns.pop(trajectory_id)
        result = turns[-1].result
        assert result is not None
        return TrajectoryData(
            trajectory_id=trajectory_id,
            prompt_tokens=turns[0].prompt_tokens,
            turns=[
                TurnData(
                    action_tokens=turn.action_tokens,
                    action_logprobs=turn.action_logprobs,
                    action_versions=turn.action_versions,
                    observation_tokens=turn.observation_tokens,
                    tool_status=turn.tool_status,
                )
                for turn in turns
            ],
            stop_reason=result.stop_reason,
            reward=result.reward,
            failure=result.failure,
        )


class SingleLoop:
    """Sample, train, update."""

    def __init__(self, config: Config) -> None:
        self._config = config
        cores = sorted(os.sched_getaffinity(0))[: config.training.threads]
        slots = sum(bucket.slots * bucket.workers for bucket in config.buckets)
        kv_tokens = sum(bucket.kv_tokens * bucket.workers for bucket in config.buckets)
        first = config.buckets[0]
        self._bucket: BucketConfig = first.model_copy(
            update={"workers": 1, "slots": slots, "kv_tokens": kv_tokens, "cpus": [cores]}
        )
        self._slots = asyncio.Semaphore(slots)
        self._thread = ThreadPoolExecutor(1, "train")
        self._tasks = {task.task_id: task for task in load_tasks(config)}

    async def run(self, steps: int) -> None:
        """Print one line per step."""
        config = self._config
        run_id = f"{config.run.name}-single-{os.getpid()}"
        engine = await asyncio.to_thread(make_engine, config, self._bucket, 0, run_id)
        await engine.start()
        with ThreadPoolExecutor(1, "copy") as copying:
            publisher = Publisher(MEMORY, run_id, DTYPES[config.model.dtype], copying)
            try:
                await self._play(engine, publisher, steps)
            finally:
                publisher.close()
                await engine.aclose()

    async def _play(self, engine: Engine, publisher: Publisher, steps: int) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        ranks = await self._in_thread(lambda: Ranks(config, Path(config.model.path), resume=False))
        publisher.prepare(ranks.outlet.shapes)
        order = self._order()
        async with asyncio.TaskGroup() as tasks:
            tools, journal = LocalTools(config), LocalJournal()
            await tools.start(tasks)
            equipment = self._equipment(engine, tools, journal)
            for step in range(steps):
                began = loop.time()
                await self._update(engine, publisher, ranks, step)
                groups = [next(order) for _ in range(config.training.groups_per_step)]
                data = await self._sample(groups, equipment, journal)
                sampled = loop.time()
                sequences = batch_sequences(data, config.training)
                result = await self._in_thread(lambda: ranks.train(sequences, step + 1))  # noqa: B023
                trained_tokens = sum(
                    len(turn.action_tokens) // 4
                    for group in data
                    for trajectory in group.trajectories
                    for turn in trajectory.turns
                )
                row = {
                    "step": step + 1,
                    "tokens": trained_tokens,
                    "time/step": loop.time() - began,
                    "time/rollout": sampled - began,
                    "skipped": result.skipped,
                }
                print(json.dumps(row), flush=True)
        await self._in_thread(ranks.close)

    def _equipment(self, engine: Engine, tools: LocalTools, journal: LocalJournal) -> Equipment:
        config = self._config
        parser = PARSERS[config.rollout.tool_format]
        return Equipment(
            engine=engine,
            sampler=engine,
            renderer=Renderer(load_tokenizer(config.model.path), parser, config.model.path),
            parser=parser,
            tools=tools,
            journal=journal,
            caches=NoCaches(),
            limits=Limits.of(config, engine_context_tokens=engine.context_tokens_max),
            temperature=config.sampling.temperature,
            draining=lambda: False,
        )

    async def _update(self, engine: Engine, publisher: Publisher, ranks: Ranks, step: int) -> None:
        segment = publisher.choose(())
        assert segment is not None
        await self._in_thread(lambda: ranks.publish(publisher, segment).result(COPY_TIMEOUT_S))
        await self._in_thread(publisher.join)
        manifest = await asyncio.to_thread(build_manifest, version_id(0, step), str(segment.path))
        await engine.apply_weights(manifest)

    async def _sample(
        self, groups: list[Task], equipment: Equipment, journal: LocalJournal
    ) -> list[GroupData]:
        size = self._config.training.group_size
        async with asyncio.TaskGroup() as running:
            for task in groups:
                for index in range(size):
                    running.create_task(self._sample_one(task, index, equipment))
        return [
            GroupData(
                group_id=task.task_id,
                task_id=task.task_id,
                trajectories=[journal.trajectory(f"{task.task_id}.{n}") for n in range(size)],
            )
            for task in groups
        ]

    async def _sample_one(self, task: Task, index: int, equipment: Equipment) -> None:
        assignment = AssignTrajectory(
            trajectory_id=f"{task.task_id}.{index}",
            group_id=task.task_id,
            lease=1,
            environment=task.environment,
            task=task.row,
            seed=index,
            turn=0,
            prompt_tokens=b"",
            later_tokens=[],
            session_id="",
            tool_server="",
        )
        async with self._slots:
            await Trajectory(assignment, equipment).run()

    def _order(self) -> Iterator[Task]:
        run, tasks = self._config.run, self._config.tasks
        order = TaskOrder(list(self._tasks), seed=run.seed, epochs=tasks.epochs)
        for place in range(order.length):
            yield self._tasks[order.at(place)[1]]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def main(path: str, steps: str, *overrides: str) -> None:
    """Run the loop of one configuration."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    asyncio.run(SingleLoop(load_config(Path(path), overrides)).run(int(steps)))


if __name__ == "__main__":  # vLLM starts processes that import this module again.
    main(*sys.argv[1:])
