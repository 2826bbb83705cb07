"""Rollout workers among which a fake scheduler moves trajectories, on a simulated network."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.config import BucketConfig, Config, ModelConfig
from common.errors import RequestRefused, TransportError
from common.membership import Membership
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import ReportWorker, TurnFinished, TurnRecorded, WorkerReported
from common.service import Runtime
from common.transport.sim import SimNetwork
from services.coordinator.service import CoordinatorService
from services.rollout.engine import Engine
from services.rollout.parsers import PARSERS, ParsedTurn, TagsParser, ToolCall
from services.rollout.render import Renderer
from services.rollout.tokenizer import HuggingFaceTokenizer
from services.rollout.worker import Worker
from tests.support.peers import FakeTools
from tests.support.rollout import TINY, assign, moved, rollout_config
from tests.support.sim import serving, until

ASSIGN_TIMEOUT_S = 2.0


def moving_config(**sampling: int) -> Config:
    """Two workers in one bucket."""
    config = rollout_config("tags", **sampling)
    return config.model_copy(
        update={
            "buckets": [BucketConfig(name="short", workers=2, slots=4)],
            "model": ModelConfig(path="m", context_tokens=2000),
        }
    )


class AlwaysCalls(TagsParser):
    """Takes any text for a call of the session's tool: a random model has something to say."""

    def stop_strings(self, tools: object) -> tuple[str, ...]:
        return ()

    def parse(self, text: str, tools: object) -> ParsedTurn:
        return ParsedTurn(ToolCall("calculator", f'{{"expression": "{len(text)}"}}'))


Plan = Callable[[TurnFinished], str | None]
"""To which worker a trajectory moves after a turn; None: it stays, empty: the move is tried and
taken back."""


@dataclass
class MovingScheduler:
    """Moves trajectories as the plan says, as a real one does: ask the target, then let go."""

    plan: Plan = lambda _turn: None
    turns: list[TurnFinished] = field(default_factory=list)
    reports: list[tuple[str, ReportWorker]] = field(default_factory=list)
    drop: Callable[[ReportWorker], list[str]] = lambda _report: []
    source: Callable[[str], str] = lambda peer: peer
    """Whom the target asks for the cache, by the worker that has it."""
    decide_s: float = 0.0
    deciding: bool = False
    """A turn has come and is not answered yet."""

    def __call__(self, runtime: Runtime) -> "MovingScheduler":
        self._runtime = runtime
        self.membership = Membership(runtime)
        runtime.mesh.serve(TurnFinished, self._record)
        runtime.mesh.serve(ReportWorker, self._note)
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            membership = tasks.create_task(self.membership.run())
            await stopping.wait()
            membership.cancel()

    def of(self, trajectory_id: str = "t0") -> list[TurnFinished]:
        """Turns of one trajectory."""
        return [turn for turn in self.turns if turn.trajectory_id == trajectory_id]

    def ended(self, trajectory_id: str = "t0") -> bool:
        """Whether it has a result."""
        return any(turn.result is not None for turn in self.of(trajectory_id))

    async def give(self, worker: str, order: AssignTrajectory) -> bool:
        """Assign, and say whether the worker took it."""
        target = self.membership.find("rollout", worker)
        if target is None:
            return False
        try:
            await self.membership.request(target, order, timeout_s=ASSIGN_TIMEOUT_S)
        except (RequestRefused, TransportError):
            return False
        return True

    async def _record(self, sender: str, turn: TurnFinished) -> TurnRecorded:
        self.turns.append(turn)
        if turn.result is not None:
            return TurnRecorded(go_on=False)
        self.deciding = True
        await asyncio.sleep(self.decide_s)
        self.deciding = False
        target = self.plan(turn)
        if target:
            history = self.of(turn.trajectory_id)
            order = moved(history, kv_source=self.source(sender), lease=turn.lease + 1)
            if await self.give(target, order):
                return TurnRecorded(go_on=False)
        return TurnRecorded(go_on=True, lease=turn.lease + (0 if target is None else 2))

    def _note(self, sender: str, report: ReportWorker) -> WorkerReported:
        self.reports.append((sender, report))
        return WorkerReported(drop=self.drop(report))


@dataclass
class WorkerProcess:
    """A rollout process whose engine is up already; `stop` is its SIGTERM."""

    engine: Engine
    tokenizer: HuggingFaceTokenizer = TINY
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, runtime: Runtime) -> "WorkerProcess":
        self.runtime = runtime
        config = runtime.config
        renderer = Renderer(self.tokenizer, PARSERS[config.rollout.tool_format], config.model.path)
        self._worker = Worker(runtime, config.buckets[0], self.engine, renderer)
        return self

    @property
    def peer(self) -> str:
        """On the mesh."""
        return self.runtime.mesh.identity

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            relay = tasks.create_task(self._relay(stopping))
            await self._worker.run(self.stop)
            self.stopped.set()
            relay.cancel()

    async def _relay(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self.stop.set()


@dataclass
class Workers:
    """`short-0`, `short-1`, … and their peers. `async with` runs them."""

    engines: list[Engine]
    scheduler: MovingScheduler = field(default_factory=MovingScheduler)
    tools: FakeTools = field(default_factory=FakeTools)
    config: Config = field(default_factory=moving_config)
    network: SimNetwork = field(default_factory=lambda: SimNetwork(0))
    tokenizer: HuggingFaceTokenizer = TINY
    processes: list[WorkerProcess] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["Workers"]:
        """All joined, and known to each other."""
        async with contextlib.AsyncExitStack() as stack:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.processes = [WorkerProcess(engine, self.tokenizer) for engine in self.engines]
            services = [
                ("coordinator", "coordinator", CoordinatorService),
                ("scheduler", "scheduler", self.scheduler),
                ("tools", "calculator", self.tools),
                *(("rollout", f"short-{n}", p) for n, p in enumerate(self.processes)),
            ]
            for role, name, build in services:
                options = {"config": self.config, "run_dir": run_dir}
                await stack.enter_async_context(
                    serving(self.network, role, name, build, **options)  # type: ignore[arg-type]
                )
            await until(self._all_know_all)
            yield self

    def _all_know_all(self) -> bool:
        peers = {process.peer for process in self.processes}
        return all(
            peers - {process.peer} <= set(process._worker._membership.members)
            for process in self.processes
        ) and peers <= set(self.scheduler.membership.members)

    async def play(self, trajectory_id: str = "t0", worker: str = "short-0") -> list[TurnFinished]:
        """One trajectory to its end."""
        assert await self.scheduler.give(worker, assign(trajectory_id))
        await until(lambda: self.scheduler.ended(trajectory_id), timeout_s=120)
        return self.scheduler.of(trajectory_id)
