"""The host: every operation once, under a deadline, with a typed ending."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import pytest

from common.clock import run_sim
from common.config import ToolServerConfig
from common.errors import Refusal, RequestRefused
from common.messages.tools import (
    CallTool,
    CloseSession,
    DescribeServer,
    GradeSession,
    OpenSession,
    SessionGraded,
    SessionOpened,
    ToolReturned,
    TranscriptTurn,
)
from common.trajectory import FailureKind, ToolStatus
from services.tools.host import ToolHost
from services.tools.registry import Offer
from services.tools.sdk import (
    Environment,
    EpisodeOver,
    InfrastructureFailure,
    ToolFault,
    Transcript,
    tool,
)
from services.tools.statuses import status_from_text

LIMIT_S = 0.05
RELEASE = threading.Event()
"""Set by a test's end, so that no thread outlives it."""


class Lab(Environment):
    """Every way in which an author's code can end."""

    name = "lab"
    closed: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.reward: Any = 1.0

    def reset(self, task: dict[str, Any]) -> str:
        self.reward = task.get("reward", 1.0)
        return str(task["question"])

    @tool
    def echo(self, text: str) -> str:
        """Repeat."""
        self.runs.append(text)
        return text

    @tool(read_status=status_from_text)
    def shell(self, output: str) -> str:
        """Say how it went in words only."""
        return output

    @tool
    async def echo_async(self, text: str) -> str:
        """Repeat, on the loop."""
        self.runs.append(text)
        return text

    @tool
    def runs_so_far(self) -> list[str]:
        """Say what ran."""
        return self.runs

    @tool
    def hang(self) -> str:
        """Never return in time."""
        RELEASE.wait(10)
        return "late"

    @tool
    async def hang_async(self) -> str:
        """Never return in time, on the loop."""
        await asyncio.Event().wait()
        return "late"

    @tool
    def fail(self, how: str) -> str:
        """Fail."""
        failures: dict[str, BaseException] = {
            "model": ToolFault("no such city"),
            "ours": InfrastructureFailure("disk full"),
            "bug": KeyError("x"),
            "exit": SystemExit(3),
            "stop": StopIteration(),
        }
        raise failures[how]

    @tool
    def win(self) -> EpisodeOver:
        """End the episode."""
        return EpisodeOver("won")

    @tool
    def garbage(self) -> object:
        """Answer what is no answer."""
        return object()

    def grade(self, trajectory: Transcript) -> Any:
        if self.reward == "raise":
            raise RuntimeError("judge is down")
        if self.reward == "hang":
            RELEASE.wait(10)
        self.runs.append("graded")
        return self.reward if trajectory.turns else 0.0

    def close(self) -> None:
        Lab.closed.append("closed")


class Broken(Lab):
    name = "broken"

    def __init__(self) -> None:
        raise OSError("no index")


OFFER = Offer({"lab": Lab, "broken": Broken})


@contextlib.asynccontextmanager
async def hosted(capacity: int = 4, ttl_s: float = 60.0) -> AsyncGenerator[ToolHost]:
    RELEASE.clear()
    server = ToolServerConfig(name="lab", target="lab", capacity=capacity, session_ttl_s=ttl_s)
    async with asyncio.TaskGroup() as tasks:
        try:
            host = ToolHost(server, OFFER, tasks)
            yield host
        finally:
            RELEASE.set()
    while host.stuck:  # noqa: ASYNC110 - the released threads report within microseconds.
        await asyncio.sleep(0)


def opening(session_id: str = "s", environment: str = "lab", **task: Any) -> OpenSession:
    row = json.dumps({"question": "q"} | task)
    return OpenSession(session_id=session_id, environment=environment, task=row, ttl_s=60.0)


async def opened(host: ToolHost, session_id: str = "s", **task: Any) -> SessionOpened:
    return await host.open_session("worker", opening(session_id, **task))


async def called(
    host: ToolHost,
    name: str,
    arguments: str = "{}",
    *,
    call_id: str = "c",
    session_id: str = "s",
    timeout_s: float = 5.0,
) -> ToolReturned:
    request = CallTool(
        session_id=session_id, call_id=call_id, tool=name, arguments=arguments, timeout_s=timeout_s
    )
    return await host.call_tool("worker", request)


async def graded(host: ToolHost, timeout_s: float = 5.0) -> SessionGraded:
    turns = [TranscriptTurn(action="a", observation="")]
    request = GradeSession(session_id="s", turns=turns, stop_reason="answered", timeout_s=timeout_s)
    return await host.grade_session("worker", request)


async def test_an_opened_session_has_its_prompt_and_tools() -> None:
    async with hosted() as host:
        reply = await opened(host)
        assert [message.content for message in reply.messages] == ["q"]
        assert "echo" in [spec.name for spec in reply.tools]
        description = host.describe("worker", DescribeServer())
        assert (description.environments, description.sessions) == (["broken", "lab"], 1)


@pytest.mark.parametrize("name", ["echo", "echo_async"])
async def test_a_repeated_call_runs_once_and_gets_the_same_reply(name: str) -> None:
    async with hosted() as host, asyncio.TaskGroup() as together:
        await opened(host)
        calls = [together.create_task(called(host, name, '{"text": "a"}')) for _ in range(5)]
        replies = [await call for call in calls]
        assert all(reply == replies[0] for reply in replies)
        assert replies[0].content == "a"
        assert (await called(host, "runs_so_far", call_id="d")).content == '["a"]'


async def test_a_caller_that_goes_away_does_not_undo_its_call() -> None:
    async with hosted() as host, asyncio.TaskGroup() as tasks:
        await opened(host)
        caller = tasks.create_task(called(host, "echo", '{"text": "a"}'))
        await asyncio.sleep(0)
        caller.cancel()
        assert (await called(host, "echo", '{"text": "a"}')).status is ToolStatus.OK
        assert (await called(host, "runs_so_far", call_id="d")).content == '["a"]'


@pytest.mark.parametrize(
    ("name", "arguments", "status", "content"),
    [
        ("shout", "{}", ToolStatus.MALFORMED, "there is no tool 'shout' (the tools are: "),
        ("echo", "{text", ToolStatus.MALFORMED, "not valid JSON"),
        ("echo", '{"text": 5}', ToolStatus.MALFORMED, "text: Input should be a valid string"),
        ("echo", '{"text": "' + "x" * 1_000_000 + '"}', ToolStatus.MALFORMED, "the limit is"),
        ("fail", '{"how": "model"}', ToolStatus.ERROR, "Error: no such city"),
        ("fail", '{"how": "ours"}', ToolStatus.INFRASTRUCTURE, "disk full"),
        ("fail", '{"how": "bug"}', ToolStatus.INFRASTRUCTURE, "KeyError"),
        ("fail", '{"how": "exit"}', ToolStatus.INFRASTRUCTURE, "SystemExit raised: 3"),
        ("fail", '{"how": "stop"}', ToolStatus.INFRASTRUCTURE, "StopIteration raised"),
        ("garbage", "{}", ToolStatus.INFRASTRUCTURE, "neither text nor JSON"),
        ("shell", '{"output": "sh: 1: x: not found"}', ToolStatus.ERROR, "sh: 1: x: not found"),
        ("shell", '{"output": "0 errors found"}', ToolStatus.OK, "0 errors found"),
        ("echo", '{"text": "Error: quoted"}', ToolStatus.OK, "Error: quoted"),
    ],
)
async def test_every_call_ends_typed_and_the_session_goes_on(
    name: str, arguments: str, status: ToolStatus, content: str
) -> None:
    async with hosted() as host:
        await opened(host)
        reply = await called(host, name, arguments)
        assert reply.status is status
        assert content in reply.content
        assert (await called(host, "echo", '{"text": "b"}', call_id="d")).content == "b"


async def test_a_tool_can_end_the_episode() -> None:
    async with hosted() as host:
        await opened(host)
        reply = await called(host, "win")
        assert (reply.status, reply.content, reply.done) == (ToolStatus.OK, "won", True)


@pytest.mark.parametrize("name", ["hang", "hang_async"])
async def test_a_call_that_never_returns_ends_at_its_deadline_and_still_scores(name: str) -> None:
    async with hosted() as host:
        await opened(host)
        await opened(host, "other")
        stuck = await called(host, name, timeout_s=LIMIT_S)
        assert (stuck.status, stuck.content) == (
            ToolStatus.TIMEOUT, "Error: the call did not end within 0.05 s",
        )  # fmt: skip
        assert host.stuck == (1 if name == "hang" else 0)
        other = await called(host, "echo", '{"text": "b"}', session_id="other")
        assert other.status is ToolStatus.OK
        assert (await graded(host)).reward == 1.0


async def test_a_session_never_runs_two_calls_at_once() -> None:
    async with hosted() as host:
        await opened(host)
        await called(host, "hang", timeout_s=LIMIT_S)
        waiting = await called(host, "echo", '{"text": "a"}', call_id="d", timeout_s=LIMIT_S)
        assert waiting.status is ToolStatus.TIMEOUT
        RELEASE.set()
        assert (await called(host, "runs_so_far", call_id="e")).content == "[]"


async def test_what_finds_no_thread_is_refused_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.tools.host.START_WAIT_S", LIMIT_S)
    async with hosted(capacity=2) as host:
        await opened(host)
        await opened(host, "other")
        for session_id in ("s", "other"):
            await called(host, "hang", session_id=session_id, timeout_s=LIMIT_S)
        host.close_session("worker", CloseSession(session_id="other"))
        for _ in range(2):
            with pytest.raises(RequestRefused) as refused:
                await graded(host)
            assert refused.value.refusal is Refusal.OVERLOADED


async def test_capacity_is_never_exceeded() -> None:
    async with hosted(capacity=2) as host, asyncio.TaskGroup() as together:
        tries = [together.create_task(outcome(host, f"s{i}")) for i in range(6)]
        outcomes = [await attempt for attempt in tries]
        assert outcomes.count("open") == 2
        assert outcomes.count(Refusal.OVERLOADED) == 4
        host.close_session("worker", CloseSession(session_id="s0"))
        assert await outcome(host, "s7") == "open"


async def outcome(host: ToolHost, session_id: str) -> str:
    try:
        await opened(host, session_id)
    except RequestRefused as refused:
        return refused.refusal
    return "open"


def test_an_untouched_session_is_reaped_and_freed() -> None:
    async def scenario() -> None:
        async with hosted(ttl_s=60.0) as host:
            await opened(host)
            await asyncio.sleep(59)
            await called(host, "echo", '{"text": "a"}')
            await asyncio.sleep(59)
            host.reap()
            assert host.describe("worker", DescribeServer()).sessions == 1
            await asyncio.sleep(1)
            host.reap()
            with pytest.raises(RequestRefused) as unknown:
                await called(host, "echo", '{"text": "a"}')
            assert unknown.value.refusal is Refusal.NOT_FOUND

    Lab.closed.clear()
    run_sim(scenario())
    assert Lab.closed == ["closed"]


async def test_closing_twice_is_fine() -> None:
    async with hosted() as host:
        await opened(host)
        for _ in range(2):
            host.close_session("worker", CloseSession(session_id="s"))
        assert host.describe("worker", DescribeServer()).sessions == 0


@pytest.mark.parametrize(
    ("request_", "detail"),
    [
        (opening(environment="broken"), "OSError: no index"),
        (OpenSession(session_id="s", environment="lab", task="{}", ttl_s=1.0), "KeyError"),
        (OpenSession(session_id="s", environment="lab", task="{", ttl_s=1.0), "JSONDecodeError"),
    ],
)
async def test_an_environment_that_cannot_be_reset_is_our_failure_and_holds_no_place(
    request_: OpenSession, detail: str
) -> None:
    async with hosted() as host:
        reply = await host.open_session("worker", request_)
        assert reply.failure is FailureKind.ENVIRONMENT
        assert detail in reply.detail
        assert host.describe("worker", DescribeServer()).sessions == 0


async def test_a_session_that_is_gone_is_not_resumed_as_a_fresh_one() -> None:
    async with hosted() as host:
        await opened(host)
        resuming = opening().model_copy(update={"resume": True})
        assert (await host.open_session("other worker", resuming)).messages[0].content == "q"
        host.close_session("worker", CloseSession(session_id="s"))
        with pytest.raises(RequestRefused) as refused:
            await host.open_session("other worker", resuming)
        assert refused.value.refusal is Refusal.NOT_FOUND


async def test_an_unknown_environment_is_refused() -> None:
    async with hosted() as host:
        with pytest.raises(RequestRefused) as refused:
            await host.open_session("worker", opening(environment="nowhere"))
        assert refused.value.refusal is Refusal.NOT_FOUND


@pytest.mark.parametrize("reward", ["raise", "hang", "text", None])
async def test_a_grader_that_fails_is_a_typed_failure_and_never_a_zero(reward: str | None) -> None:
    async with hosted() as host:
        await opened(host, reward=reward)
        result = await graded(host, timeout_s=LIMIT_S if reward == "hang" else 5.0)
        assert (result.reward, result.failure) == (None, FailureKind.GRADER)
        assert result.detail


async def test_the_first_grade_is_kept() -> None:
    async with hosted() as host:
        await opened(host, reward=0.5)
        results = [await graded(host) for _ in range(3)]
        assert [result.reward for result in results] == [0.5] * 3
        assert (await called(host, "runs_so_far")).content == '["graded"]'


async def test_a_draining_host_ends_what_runs_and_takes_nothing_new() -> None:
    async with hosted() as host, asyncio.TaskGroup() as tasks:
        await opened(host)
        running = tasks.create_task(called(host, "hang"))
        await asyncio.sleep(0)
        host.draining = True
        for attempt in (called(host, "echo", '{"text": "a"}', call_id="d"), opened(host, "t")):
            with pytest.raises(RequestRefused) as refused:
                await attempt
            assert refused.value.refusal is Refusal.DRAINING
        RELEASE.set()
        await host.idle()
        assert (await running).content == "late"
        assert host.busy_s > 0
