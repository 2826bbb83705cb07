"""Runs the author's functions for the sessions of one server, each under a deadline.

Knows no network: a handler takes a request and returns its reply or raises `RequestRefused`. Each
operation of a session is one task of its own, so a caller that repeats its request joins the work
and one that goes away does not stop it; the work ends by its own deadline.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog

from common.config import ToolServerConfig
from common.errors import Refusal, RequestRefused
from common.messages.base import Message
from common.messages.tools import (
    CallTool,
    CloseSession,
    DescribeServer,
    GradeSession,
    OpenSession,
    ServerDescribed,
    SessionClosed,
    SessionGraded,
    SessionOpened,
    ToolReturned,
)
from common.trajectory import ToolStatus
from services.tools import outcomes
from services.tools.registry import Offer
from services.tools.schema import BadArguments
from services.tools.sdk import (
    Busy,
    Environment,
    Tool,
    Transcript,
    set_call_limit,
)
from services.tools.sessions import GRADE, OPEN, Session, Sessions
from services.tools.threads import NoThreadFree, StillRunning, Threads

log = structlog.get_logger()

M = TypeVar("M", bound=Message)

THREADS = 32
"""Plain functions that run at once. They mostly wait, for a disk or another service."""
STUCK_MAX = 8
"""A server with more threads than this that never return is broken and must start afresh."""
START_WAIT_S = 2.0
"""For a free thread, on top of the limit of the call itself. Past it the failure is ours: the
model's call has not even begun."""
RESET_LIMIT_S = 20.0
CLOSE_LIMIT_S = 5.0


@dataclass
class Held:
    """What a session holds."""

    environment: Environment
    lock: asyncio.Lock
    """Calls of one session run one after the other: the environment is not shared by threads."""


HeldSession = Session[Held, "asyncio.Task[Any]"]


class ToolHost:
    """The sessions of one server and what runs in them."""

    def __init__(self, server: ToolServerConfig, offer: Offer, tasks: asyncio.TaskGroup) -> None:
        self._server = server
        self._offer = offer
        self._tasks = tasks
        self._sessions: Sessions[Held, asyncio.Task[Any]] = Sessions(server.capacity)
        self._threads = Threads(min(THREADS, server.capacity), "tool")
        self._calls = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self.draining = False

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def describe(self, _sender: str, _request: DescribeServer) -> ServerDescribed:
        """Say what is served here."""
        return ServerDescribed(
            environments=sorted(self._offer.environments),
            capacity=self._sessions.capacity,
            sessions=len(self._sessions),
            calls=self._calls,
        )

    async def open_session(self, _sender: str, request: OpenSession) -> SessionOpened:
        """Open a session, or find it again. Idempotent by session id."""
        now_s = self._now_s()
        session = self._sessions.find(request.session_id, request.environment, now_s)
        if session is None:
            self._refuse_when_draining()
            if request.resume:
                raise RequestRefused(Refusal.NOT_FOUND, f"session {request.session_id!r}")
            kind = self._offer.environments.get(request.environment)
            if kind is None:
                raise RequestRefused(Refusal.NOT_FOUND, f"environment {request.environment!r}")
            self._sessions.check_room()
            try:
                environment = kind()
            except Exception as error:  # noqa: BLE001 - the author's code; every ending is typed.
                return self._not_opened(request, error)
            session = HeldSession(
                session_id=request.session_id,
                environment=request.environment,
                ttl_s=min(request.ttl_s, self._server.session_ttl_s),
                touched_at_s=now_s,
                state=Held(environment, asyncio.Lock()),
            )
            self._sessions.add(session)
        return await self._once(session, OPEN, partial(self._reset, session, request))

    async def call_tool(self, _sender: str, request: CallTool) -> ToolReturned:
        """Run one tool. Idempotent by call id."""
        session = self._sessions.touch(request.session_id, self._now_s())
        work = partial(self._call, session, request)
        return await self._once(session, f"call {request.call_id}", work)

    async def grade_session(self, _sender: str, request: GradeSession) -> SessionGraded:
        """Grade a session. The first result is kept."""
        session = self._sessions.touch(request.session_id, self._now_s())
        return await self._once(session, GRADE, partial(self._grade, session, request))

    def close_session(self, _sender: str, request: CloseSession) -> SessionClosed:
        """Forget a session at once; what it holds is freed in the background."""
        if session := self._sessions.close(request.session_id):
            self._free(session)
        return SessionClosed()

    # ── what the service asks ────────────────────────────────────────────────────────────────

    @property
    def stuck(self) -> int:
        """Threads that were given up and still run."""
        return self._threads.stuck

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one operation ran."""
        return self._busy_s + (self._now_s() - self._busy_since_s if self._running else 0.0)

    def reap(self) -> None:
        """Close the sessions that nothing has touched for their TTL."""
        for session in self._sessions.reap(self._now_s()):
            log.info("session.reaped", session_id=session.session_id, reason="ttl")
            self._free(session)

    async def idle(self) -> None:
        """Wait until no operation runs."""
        await self._idle.wait()

    # ── operations ───────────────────────────────────────────────────────────────────────────

    async def _once(
        self, session: HeldSession, operation: str, work: Callable[[], Awaitable[M]]
    ) -> M:
        task: asyncio.Task[M | Busy] | None = session.replies.get(operation)
        if task is None:
            self._refuse_when_draining()
            name = f"{operation} of {session.session_id}"
            task = self._tasks.create_task(self._tracked(session, work), name=name)
            session.keep(operation, task)
        reply = await asyncio.shield(task)
        if isinstance(reply, Busy):  # Nothing ran, so the same operation may come again.
            session.forget(operation, task)
            raise RequestRefused(Refusal.OVERLOADED, str(reply)) from reply
        return reply

    async def _tracked(self, session: HeldSession, work: Callable[[], Awaitable[M]]) -> M | Busy:
        session.running += 1
        self._enter()
        try:
            return await work()
        except Busy as error:
            return error
        finally:
            self._leave()
            session.running -= 1
            session.touched_at_s = self._now_s()

    async def _reset(self, session: HeldSession, request: OpenSession) -> SessionOpened:
        environment = session.state.environment
        try:
            task: dict[str, Any] = json.loads(request.task)
            prompt = await self._invoke(environment.reset, RESET_LIMIT_S, task)
            messages = outcomes.prompt_of(prompt)
        except Busy:
            raise
        except Exception as error:  # noqa: BLE001 - the author's code; every ending is typed.
            self._sessions.close(session.session_id)
            return self._not_opened(request, error)
        tools = self._offer.tools[request.environment].values()
        return SessionOpened(messages=messages, tools=[tool.spec() for tool in tools])

    def _not_opened(self, request: OpenSession, error: Exception) -> SessionOpened:
        log.warning("session.failed", environment=request.environment, exc_info=error)
        return outcomes.not_opened(error)

    async def _call(self, session: HeldSession, request: CallTool) -> ToolReturned:
        started_s = self._now_s()
        self._calls += 1
        done = False
        try:
            tool, arguments = self._parse(session, request)
            value = await self._invoke_alone(session, tool, arguments, request.timeout_s)
            status, content, done = outcomes.outcome_of_value(value, tool.read_status)
        except Busy:
            raise
        except Exception as error:
            status, content = outcomes.outcome_of_error(error)
            if status is ToolStatus.INFRASTRUCTURE:
                log.warning("call.failed", tool=request.tool, reason=status.value, exc_info=error)
        latency_s = self._now_s() - started_s
        return ToolReturned(status=status, content=content, latency_s=latency_s, done=done)

    async def _grade(self, session: HeldSession, request: GradeSession) -> SessionGraded:
        transcript = Transcript(tuple(request.turns), request.stop_reason)
        grade = session.state.environment.grade
        try:
            return outcomes.graded(await self._invoke(grade, request.timeout_s, transcript))
        except Busy:
            raise
        except Exception as error:
            log.warning("grade.failed", environment=session.environment, exc_info=error)
            return outcomes.not_graded(error)

    def _free(self, session: HeldSession) -> None:
        if type(session.state.environment).close is not Environment.close:
            name = f"close of {session.session_id}"
            self._tasks.create_task(
                self._tracked(session, partial(self._close, session)), name=name
            )

    async def _close(self, session: HeldSession) -> SessionClosed:
        try:
            await self._invoke(session.state.environment.close, CLOSE_LIMIT_S)
        except Exception as error:
            log.warning("session.failed", environment=session.environment, exc_info=error)
        return SessionClosed()

    # ── running foreign code ─────────────────────────────────────────────────────────────────

    def _parse(self, session: HeldSession, request: CallTool) -> tuple[Tool, dict[str, Any]]:
        tools = self._offer.tools[session.environment]
        tool = tools.get(request.tool)
        if tool is None:
            names = ", ".join(tools) or "none"
            raise BadArguments(f"there is no tool {request.tool[:80]!r} (the tools are: {names})")
        size = len(request.arguments)
        if size > outcomes.ARGUMENTS_MAX_CHARS:
            limit = outcomes.ARGUMENTS_MAX_CHARS
            raise BadArguments(f"the arguments have {size} characters; the limit is {limit}")
        return tool, tool.arguments.parse(request.arguments)

    async def _invoke_alone(
        self, session: HeldSession, tool: Tool, arguments: dict[str, Any], limit_s: float
    ) -> Any:
        """One call at a time: a call that follows one that is still stuck is out of time too."""
        try:
            async with asyncio.timeout(limit_s):
                await session.state.lock.acquire()
        except TimeoutError as error:
            raise StillRunning("an earlier call has not ended") from error
        function = partial(tool.bound_to(session.state.environment), **arguments)
        return await self._invoke(function, limit_s, release=session.state.lock.release)

    async def _invoke(
        self,
        function: Callable[..., Any],
        limit_s: float,
        *arguments: Any,
        release: Callable[[], None] | None = None,
    ) -> Any:
        """Call a function: on the loop when it is async, else in a thread.

        Args:
            function: the author's.
            limit_s: its wall-clock limit.
            arguments: positional.
            release: called once the function is over, even when that is after its limit.
        """
        set_call_limit(limit_s)
        call = partial(function, *arguments)
        if inspect.iscoroutinefunction(function):
            return await _awaited(call, limit_s, release)
        try:
            return await self._threads.run(
                call, start_wait_s=START_WAIT_S, limit_s=limit_s, ended=release
            )
        except NoThreadFree as error:
            if release:
                release()
            raise Busy(str(error)) from error

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────────

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise RequestRefused(Refusal.DRAINING)

    def _enter(self) -> None:
        if not self._running:
            self._busy_since_s = self._now_s()
            self._idle.clear()
        self._running += 1

    def _leave(self) -> None:
        self._running -= 1
        if not self._running:
            self._busy_s += self._now_s() - self._busy_since_s
            self._idle.set()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _awaited(
    call: Callable[[], Awaitable[Any]], limit_s: float, release: Callable[[], None] | None
) -> Any:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await call()
    except TimeoutError as error:
        if not limit.expired():
            raise  # The function's own.
        raise StillRunning(f"the call did not end within {limit_s:g} s") from error
    finally:
        if release:
            release()
