"""A rollout worker among fake peers on the simulated network."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.clock import run_sim
from common.config import (
    BucketConfig,
    Config,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    ToolServerConfig,
)
from common.messages.base import R, Request
from common.messages.coordinator import GetFleet, MemberStatus
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import TrajectoryResult, TurnFinished
from common.service import Runtime, Service
from common.trajectory import pack_tokens
from common.transport.sim import SimNetwork
from services.coordinator.service import CoordinatorService
from services.rollout.engine import GenerateRequest
from services.rollout.parsers import PARSERS
from services.rollout.render import Renderer
from services.rollout.tokenizer import HuggingFaceTokenizer
from services.rollout.worker import Worker
from tests.support.chat import tiny_chat
from tests.support.peers import FakeScheduler, FakeTools
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sim import COORDINATOR, serving, sim_config, until

TINY = tiny_chat()
END = "<|end|>"


def rollout_config(tool_format: str = "tags", **sampling: int) -> Config:
    """One worker, one tool server, generous limits unless told otherwise."""
    limits = {"turns_max": 4, "turn_tokens_max": 100, "trajectory_tokens_max": 400}
    return sim_config(
        model=ModelConfig(path="m", context_tokens=2000),
        sampling=SamplingConfig(**(limits | sampling)),  # type: ignore[arg-type]
        rollout=RolloutConfig(tool_format=tool_format),  # type: ignore[arg-type]
        buckets=[BucketConfig(name="short", slots=4)],
        tools=[ToolServerConfig(name="calculator", target="x", session_ttl_s=77)],
    )


def says(*turns: str, tokenizer: HuggingFaceTokenizer = TINY) -> ScriptedEngine:
    """An engine that says these turns of each trajectory, by their number."""

    def write(request: GenerateRequest) -> list[int]:
        return tokenizer.encode(turns[int(request.request_id.rsplit("/", 1)[1])])

    return ScriptedEngine(write, version=7)


def assign(trajectory_id: str = "t0", **changes: object) -> AssignTrajectory:
    """A fresh trajectory, unless `changes` say otherwise."""
    values: dict[str, object] = {
        "trajectory_id": trajectory_id,
        "group_id": "g0",
        "lease": 1,
        "environment": "calculator",
        "task": json.dumps({"question": "2+2"}),
        "seed": 5,
        "turn": 0,
        "prompt_tokens": b"",
        "later_tokens": [],
        "session_id": "",
        "tool_server": "",
    }
    return AssignTrajectory.model_validate(values | changes)


def moved(turns: list[TurnFinished], **changes: object) -> AssignTrajectory:
    """The assignment that continues a trajectory after its journaled turns."""
    last = turns[-1]
    later = [part for turn in turns for part in (turn.action_tokens, turn.observation_tokens)]
    return assign(
        last.trajectory_id,
        **{
            "lease": last.lease + 1,
            "turn": last.turn + 1,
            "prompt_tokens": turns[0].prompt_tokens,
            "later_tokens": later,
            "session_id": last.session_id,
            "tool_server": last.tool_server,
        }
        | changes,
    )


def packed(text: str) -> bytes:
    """Token ids of a text in the tiny tokenizer, as they travel."""
    return pack_tokens(TINY.encode(text))


@dataclass
class Cluster:
    """A worker and its peers. `async with` runs them."""

    engine: ScriptedEngine
    tools: FakeTools = field(default_factory=FakeTools)
    scheduler: FakeScheduler = field(default_factory=FakeScheduler)
    config: Config = field(default_factory=rollout_config)
    tokenizer: HuggingFaceTokenizer = TINY
    network: SimNetwork = field(default_factory=lambda: SimNetwork(0))
    build: Callable[[Runtime], Service] | None = None
    """Makes the rollout process; by default one whose engine is up already."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Asks the worker to stop, as SIGTERM would."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """The worker has returned."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator["Cluster"]:
        """All processes, the worker joined and knowing the others."""
        async with contextlib.AsyncExitStack() as stack:
            run_dir = stack.enter_context(tempfile.TemporaryDirectory())
            serve = self._serve_on(stack, Path(run_dir))
            self._coordinator = await serve("coordinator", "coordinator", CoordinatorService)
            self._caller = await serve("scheduler", "scheduler", self.scheduler)
            self.server = await serve("tools", "calculator", self.tools)
            self.worker = await serve("rollout", "short-0", self.build or self)
            await until(lambda: bool(self.scheduler.reports))
            yield self

    @property
    def scheduler_identity(self) -> str:
        """On the mesh."""
        return self._caller.mesh.identity

    async def ask(self, request: Request[R]) -> R:
        """Ask the worker, as the scheduler or the coordinator would."""
        mesh = self._caller.mesh
        peer = await mesh.connect(self.worker.mesh.address, timeout_s=5)
        return await mesh.request(peer, request, timeout_s=20)

    def __call__(self, runtime: Runtime) -> "Cluster":
        """Be the rollout process, with an engine that is up already."""
        config = runtime.config
        parser = PARSERS[config.rollout.tool_format]
        renderer = Renderer(self.tokenizer, parser, config.model.path)
        self._worker = Worker(runtime, config.buckets[0], self.engine, renderer)
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        """Run the worker until its process or the test says stop."""
        async with asyncio.TaskGroup() as tasks:
            relay = tasks.create_task(self._relay(stopping))
            await self._worker.run(self.stopping)
            self.stopped.set()
            relay.cancel()

    async def _relay(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self.stopping.set()

    async def fleet(self) -> dict[str, MemberStatus]:
        """What the coordinator knows, by name of the process."""
        mesh = self._caller.mesh
        peer = await mesh.connect(COORDINATOR, timeout_s=5)
        fleet = await mesh.request(peer, GetFleet(), timeout_s=5)
        return {status.member.name: status for status in fleet.members}

    @contextlib.asynccontextmanager
    async def restarted(self, role: str) -> AsyncGenerator[None]:
        """A second incarnation of the scheduler or coordinator; `async with` ends it."""
        old = {"scheduler": self._caller, "coordinator": self._coordinator}[role]
        builds = {"scheduler": self.scheduler, "coordinator": CoordinatorService}
        self.network.kill(old.mesh.identity)
        async with serving(
            self.network,
            role,
            role,
            builds[role],  # type: ignore[arg-type]
            config=self.config,
            run_dir=self._coordinator.run_dir,
            incarnation=2,
        ):
            yield

    @contextlib.asynccontextmanager
    async def restarted_tools(self) -> AsyncGenerator[None]:
        """A second incarnation of the tool server, after the first one was killed."""
        self.network.kill(self.server.mesh.identity)
        async with serving(
            self.network, "tools", "calculator", self.tools, config=self.config, incarnation=2
        ):
            yield

    async def result(self) -> TrajectoryResult:
        """The result of the only trajectory, when it is there."""
        await until(self.scheduler.ended, timeout_s=300)
        result = self.scheduler.turns[-1].result
        assert result is not None
        return result

    def _serve_on(
        self, stack: contextlib.AsyncExitStack, run_dir: Path
    ) -> Callable[[str, str, Callable[[Runtime], Service]], Awaitable[Runtime]]:
        async def serve(role: str, name: str, build: Callable[[Runtime], Service]) -> Runtime:
            options = {"config": self.config, "run_dir": run_dir}
            return await stack.enter_async_context(
                serving(self.network, role, name, build, **options)  # type: ignore[arg-type]
            )

        return serve


def play(cluster: Cluster, assignment: AssignTrajectory | None = None) -> TrajectoryResult:
    """Run one trajectory to its end in a simulation of its own."""

    async def scenario() -> TrajectoryResult:
        async with cluster.running():
            await cluster.ask(assignment or assign())
            return await cluster.result()

    return run_sim(scenario())
