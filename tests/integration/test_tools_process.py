"""The tool server as a real process, over real ZeroMQ."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from common.config import Config, ModelConfig, ToolServerConfig
from common.identity import new_identity
from common.membership import Membership
from common.mesh import Mesh
from common.messages.coordinator import Member
from common.messages.tools import (
    CallTool,
    DescribeServer,
    GradeSession,
    OpenSession,
    SessionGraded,
    ToolReturned,
    TranscriptTurn,
)
from common.service import Runtime, published_coordinator
from common.toml_write import to_toml
from common.trajectory import FailureKind, ToolStatus
from common.transport.zmq import ZmqTransport
from services.coordinator.service import CoordinatorService
from services.tools.host import STUCK_MAX
from tests.support.sim import sim_config

RUN_ID = "tools-test"
START_S = 20.0
SERVER = """
import time
from services.tools.sdk import Environment, tool

class Slow(Environment):
    name = "slow"
    def reset(self, task): return task["question"]
    @tool
    def nap(self, seconds: float) -> str:
        '''Sleep.'''
        time.sleep(seconds)
        return "slept"
    def grade(self, trajectory):
        while True: pass
"""


def job(server: ToolServerConfig) -> Config:
    return sim_config(tools=[server], model=ModelConfig(path="m", context_tokens=512))


@contextlib.asynccontextmanager
async def coordinator(config: Config, run_dir: Path) -> AsyncGenerator[None]:
    """A coordinator in this process, so that only the tool server is a process of its own."""
    stopping = asyncio.Event()
    transport = ZmqTransport(str(new_identity(RUN_ID, "coordinator", "coordinator")))
    async with Mesh(transport) as mesh, asyncio.TaskGroup() as tasks:
        runtime = runtime_of(config, run_dir, mesh, "coordinator")
        tasks.create_task(CoordinatorService(runtime).run(stopping))
        async with asyncio.timeout(START_S):
            while published_coordinator(run_dir, RUN_ID) is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        try:
            yield
        finally:
            stopping.set()


def runtime_of(config: Config, run_dir: Path, mesh: Mesh, role: str) -> Runtime:
    def address() -> str:
        return published_coordinator(run_dir, RUN_ID) or ""

    return Runtime(config, RUN_ID, run_dir, role, role, mesh, address)


async def start(run_dir: Path, server: ToolServerConfig, **environment: str) -> Process:
    path = run_dir / "config.toml"
    path.write_text(to_toml(job(server)))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.tools", "--config", str(path), "--name", server.name),
        *("--run-id", RUN_ID, "--run-dir", str(run_dir)),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **environment},
    )


class Worker:
    """One session at the server under test."""

    def __init__(self, membership: Membership, server: Member) -> None:
        self.membership, self.server = membership, server

    async def open(self, environment: str, session_id: str = "s") -> None:
        task = '{"question": "37+48", "answer": "85"}'
        request = OpenSession(session_id=session_id, environment=environment, task=task, ttl_s=60.0)
        reply = await self.membership.request(self.server, request, timeout_s=10)
        assert reply.messages[0].content == "37+48"

    async def call(
        self, tool: str, timeout_s: float = 10.0, session_id: str = "s", **arguments: object
    ) -> ToolReturned:
        text = json.dumps(arguments)
        request = CallTool(
            session_id=session_id, call_id=text, tool=tool, arguments=text, timeout_s=timeout_s
        )
        return await self.membership.request(self.server, request, timeout_s=timeout_s + 10)

    async def grade(self, action: str, timeout_s: float = 5.0) -> SessionGraded:
        turns = [TranscriptTurn(action=action, observation="")]
        request = GradeSession(
            session_id="s", turns=turns, stop_reason="answered", timeout_s=timeout_s
        )
        return await self.membership.request(self.server, request, timeout_s=timeout_s + 10)


@contextlib.asynccontextmanager
async def working(
    run_dir: Path, server: ToolServerConfig
) -> AsyncGenerator[tuple[Worker, Process]]:
    """A server process and a worker that has found it."""
    config = job(server)
    transport = ZmqTransport(str(new_identity(RUN_ID, "rollout", "rollout")))
    async with (
        coordinator(config, run_dir),
        Mesh(transport) as mesh,
        asyncio.TaskGroup() as tasks,
    ):
        process = await start(run_dir, server)
        membership = Membership(runtime_of(config, run_dir, mesh, "rollout"))
        member = tasks.create_task(membership.run())
        try:
            found = await membership.wait_for("tools", timeout_s=START_S)
            yield Worker(membership, found), process
        finally:
            member.cancel()
            if process.returncode is None:
                process.terminate()
            await process.communicate()


def written(directory: Path, text: str) -> ToolServerConfig:
    path = directory / "slow.py"
    path.write_text(text)
    return ToolServerConfig(name="slow", target=str(path))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_model_written_code_runs_in_the_sandbox_and_its_failures_still_score(
    tmp_path: Path,
) -> None:
    server = ToolServerConfig(name="python", target="services.tools.builtin.python")
    async with working(tmp_path, server) as (worker, process):
        await worker.open("python")
        returned = await worker.call("python", code="print(37+48)")
        assert (returned.status, returned.content) == (ToolStatus.OK, "85")
        failed = await worker.call("python", code="print(x)")
        assert (failed.status, failed.content) == (
            ToolStatus.ERROR,
            "Error: NameError: name 'x' is not defined",
        )
        endless = await worker.call("python", code="while True: pass", timeout_s=2.0)
        assert endless.status is ToolStatus.TIMEOUT
        graded = await worker.grade("<answer>84</answer>")
        assert (graded.reward, graded.failure) == (0.0, None)
        process.terminate()
        assert await process.wait() == 0


async def test_a_stopping_server_lets_its_running_call_end(tmp_path: Path) -> None:
    async with working(tmp_path, written(tmp_path, SERVER)) as (worker, process):
        await worker.open("slow")
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(worker.call("nap", seconds=0.5))
            await until_called(worker)
            process.send_signal(signal.SIGTERM)
        assert (await running).content == "slept"
        assert await process.wait() == 0


async def until_called(worker: Worker) -> None:
    async with asyncio.timeout(5):
        while not (
            await worker.membership.request(worker.server, DescribeServer(), timeout_s=5)
        ).calls:
            pass


async def test_a_grader_that_never_returns_is_a_typed_failure(tmp_path: Path) -> None:
    async with working(tmp_path, written(tmp_path, SERVER)) as (worker, _):
        await worker.open("slow")
        graded = await worker.grade("x", timeout_s=0.2)
        assert (graded.reward, graded.failure) == (None, FailureKind.GRADER)
        assert (await worker.call("nap", seconds=0)).content == "slept"


async def test_a_server_with_too_many_stuck_threads_ends_and_says_why(tmp_path: Path) -> None:
    async with working(tmp_path, written(tmp_path, SERVER)) as (worker, process):
        for number in range(STUCK_MAX + 1):
            await worker.open("slow", f"s{number}")
            stuck = await worker.call("nap", 0.05, f"s{number}", seconds=60)
            assert stuck.status is ToolStatus.TIMEOUT
        code, text = await ended(process)
        assert code == 1
        assert "9 calls never returned" in text


async def ended(process: Process) -> tuple[int | None, str]:
    async with asyncio.timeout(START_S):
        output, errors = await process.communicate()
    return process.returncode, (output + errors).decode()


async def test_a_server_that_cannot_be_imported_says_where_and_exits_with_2(tmp_path: Path) -> None:
    server = written(tmp_path, SERVER + "\n1 / 0\n")
    code, text = await ended(await start(tmp_path, server))
    assert code == 2
    assert f"{server.target}:{len(SERVER.splitlines()) + 2}: " in text
    assert "ZeroDivisionError" in text
    assert "Traceback" not in text


async def test_the_python_server_does_not_start_without_bubblewrap(tmp_path: Path) -> None:
    server = ToolServerConfig(name="python", target="services.tools.builtin.python")
    code, text = await ended(await start(tmp_path, server, PATH=str(tmp_path)))
    assert code == 2
    assert "apt-get install bubblewrap" in text
