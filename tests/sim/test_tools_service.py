"""The tool server on the simulated network, with the calculator behind it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from common.clock import run_sim
from common.config import Config, ToolServerConfig
from common.errors import ConfigError, Refusal, RequestRefused, TransportError
from common.membership import Membership
from common.messages.base import Message, Request
from common.messages.coordinator import Manifest, Member
from common.messages.tools import (
    CallTool,
    CloseSession,
    DescribeServer,
    GradeSession,
    OpenSession,
    TranscriptTurn,
)
from common.service import Runtime
from common.trajectory import ToolStatus
from common.transport.sim import Faults, SimNetwork
from services.coordinator.service import CoordinatorService
from services.tools.service import ToolsService
from tests.support.sim import process, serving, sim_config

R = TypeVar("R", bound=Message)
T = TypeVar("T")
TASK = '{"question": "37+48", "answer": "85"}'
JOIN_S = 60.0


def config(capacity: int = 4) -> Config:
    server = ToolServerConfig(
        name="calc", target="services.tools.builtin.calculator", capacity=capacity
    )
    return sim_config(tools=[server])


async def no_manifest(version: int, segment: str) -> Manifest:
    raise AssertionError((version, segment))


def coordinator(runtime: Runtime) -> CoordinatorService:
    return CoordinatorService(runtime, no_manifest)


class Worker:
    """What a rollout worker does with a tool server: ask until there is an answer."""

    def __init__(self, membership: Membership, server: Member) -> None:
        self.membership, self.server = membership, server

    async def ask(self, request: Request[R]) -> R:
        while True:
            try:
                return await self.membership.request(self.server, request, timeout_s=2.0)
            except TransportError:
                await asyncio.sleep(0.1)

    async def open(self, session_id: str) -> None:
        await self.ask(
            OpenSession(session_id=session_id, environment="calculator", task=TASK, ttl_s=60.0)
        )


async def trajectory(worker: Worker, session_id: str) -> float | None:
    """One whole trajectory, as its reward."""
    await worker.open(session_id)
    call = CallTool(
        session_id=session_id,
        call_id="t0",
        tool="calculator",
        arguments='{"expression": "37+48"}',
        timeout_s=5.0,
    )
    returned = await worker.ask(call)
    assert (returned.status, returned.content) == (ToolStatus.OK, "85")
    turns = [TranscriptTurn(action="<answer>85</answer>", observation="")]
    grade = GradeSession(session_id=session_id, turns=turns, stop_reason="answered", timeout_s=5.0)
    graded = await worker.ask(grade)
    assert graded.scores == {"correct": 1.0, "called": 1.0}
    await worker.ask(CloseSession(session_id=session_id))
    return graded.reward


async def with_server(
    tmp_path: Path,
    seed: int,
    faults: Faults,
    capacity: int,
    script: Callable[[Worker], Awaitable[T]],
) -> T:
    network = SimNetwork(seed, faults)
    options: dict[str, Any] = {"config": config(capacity), "run_dir": tmp_path}
    async with (
        serving(network, "coordinator", "coordinator", coordinator, **options),
        serving(network, "tools", "calc", ToolsService, **options),
        process(network, "rollout", "w0", **options) as runtime,
        asyncio.TaskGroup() as tasks,
    ):
        membership = Membership(runtime)
        task = tasks.create_task(membership.run())
        server = await membership.wait_for("tools", timeout_s=JOIN_S)
        assert server.labels == {"environments": "calculator"}
        result = await script(Worker(membership, server))
        task.cancel()
    return result


@pytest.mark.parametrize("seed", range(5))
def test_lost_and_repeated_messages_run_each_call_once(seed: int, tmp_path: Path) -> None:
    async def script(worker: Worker) -> int:
        for number in range(5):
            assert await trajectory(worker, f"s{number}") == 1.0
        return (await worker.ask(DescribeServer())).calls

    faults = Faults(loss=0.1, duplicate=0.1)
    assert run_sim(with_server(tmp_path, seed, faults, 4, script)) == 5


def test_a_full_server_refuses_and_takes_the_next_when_one_is_closed(tmp_path: Path) -> None:
    async def script(worker: Worker) -> list[str]:
        outcomes: list[str] = []
        for session_id in ("a", "b", "c"):
            try:
                await worker.open(session_id)
            except RequestRefused as refused:
                outcomes.append(refused.refusal)
        await worker.ask(CloseSession(session_id="a"))
        await worker.open("c")
        return outcomes

    assert run_sim(with_server(tmp_path, 1, Faults(), 2, script)) == [Refusal.OVERLOADED]


def test_sessions_of_a_lost_worker_are_reaped(tmp_path: Path) -> None:
    async def script(worker: Worker) -> int:
        await worker.open("a")
        await asyncio.sleep(61)
        return (await worker.ask(DescribeServer())).sessions

    assert run_sim(with_server(tmp_path, 1, Faults(), 2, script)) == 0


def test_a_server_that_the_configuration_does_not_name_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with process(SimNetwork(1), "tools", "other", config=config()) as runtime:
            with pytest.raises(ConfigError, match=r"no tool server 'other'.* has: calc"):
                ToolsService(runtime)

    run_sim(scenario())
