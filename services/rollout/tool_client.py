"""Sessions at the tool servers, seen from the worker: each request ends, answered or as an error.

Requests are idempotent by session and call id, so one that got no answer is sent again to the
server of the same name. A restarted server does not know the session: then the trajectory has
lost its environment, which is our failure and never the policy's.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

from common.config import Config
from common.errors import (
    GradeError,
    PeerUnreachable,
    ProtocolError,
    Refusal,
    RequestRefused,
    RequestTimeout,
    ToolError,
    TransportError,
)
from common.membership import Membership
from common.messages.base import Message, Request
from common.messages.coordinator import Member
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
from common.trajectory import ToolStatus

R = TypeVar("R", bound=Message)

OPEN_DEADLINE_S = 60.0
"""For a free session; a server that is full for longer is too small for the run."""
OPEN_LIMIT_S = 30.0
"""One reset of an environment."""
ATTEMPT_MAX_S = 10.0
"""One request; past it, it is sent again and joins the work that the first one began, so a lost
message costs seconds and not the whole limit."""
ANSWER_MARGIN_S = 10.0
"""On top of the limit of the call itself: transit, and waiting for a free thread."""
RECOVERY_S = 30.0
"""For a lost server to be back, measured from the moment its answer was due."""
CLOSE_TIMEOUT_S = 5.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 2.0
SESSION_TTL_S = 120.0
"""Of a server that the configuration does not name."""
TRY_LATER = (Refusal.OVERLOADED, Refusal.NOT_READY, Refusal.DRAINING)


class SessionLost(ToolError):
    """The server does not know the session any more."""


@dataclass(frozen=True, slots=True)
class SessionRef:
    """Where the environment of one trajectory lives."""

    session_id: str
    server: str


def choose_server(
    members: Iterable[Member],
    environment: str,
    *,
    open_sessions: Mapping[str, int],
    refused: frozenset[str] = frozenset(),
) -> Member | None:
    """Choose where to open a session: least used by this worker, then by name.

    Servers that have just refused come last.

    Returns:
        The server, or None when nobody serves the environment.
    """
    serving = [
        member
        for member in members
        if member.role == "tools"
        and environment in member.labels.get("environments", "").split(",")
    ]
    return min(
        serving,
        key=lambda server: (
            server.name in refused,
            open_sessions.get(server.name, 0),
            server.name,
        ),
        default=None,
    )


class ToolClient:
    """What the trajectories of one worker ask of tool servers."""

    def __init__(self, membership: Membership, config: Config) -> None:
        self._membership = membership
        self._rollout = config.rollout
        self._ttl_s = {server.name: server.session_ttl_s for server in config.tools}
        self._open_sessions: Counter[str] = Counter()

    async def open(
        self, session_id: str, environment: str, task: str
    ) -> tuple[SessionRef, SessionOpened]:
        """Open a session somewhere, waiting for a server and for a free session.

        Raises:
            ToolError: there is none in time, or the server answered what is no session.
        """
        deadline_s = _now_s() + OPEN_DEADLINE_S
        refused: frozenset[str] = frozenset()
        server: Member | None = None
        for pause_s in _backoff():
            server = server or choose_server(
                self._membership.members.values(),
                environment,
                open_sessions=self._open_sessions,
                refused=refused,
            )
            problem = f"no tool server serves environment {environment!r}"
            if server is not None:
                request = self._opening(session_id, environment, task, server.name)
                answer = await self._open_at(server, request)
                if isinstance(answer, SessionOpened):
                    return SessionRef(session_id, server.name), answer
                problem = f"tool server {server.name}: {answer}"
                if not isinstance(answer, RequestTimeout):  # Else it may be at work on it.
                    refused, server = refused | {server.name}, None
            if _now_s() + pause_s > deadline_s:
                raise ToolError(f"{problem} (waited {OPEN_DEADLINE_S:g} s)")
            await asyncio.sleep(pause_s)
        raise AssertionError("the backoff has no end")

    async def resume(self, session: SessionRef, environment: str, task: str) -> SessionOpened:
        """Find the session of a trajectory that has moved here.

        Raises:
            SessionLost: the server restarted since.
            ToolError: the server is gone, or does not answer as it should.
        """
        request = self._opening(session.session_id, environment, task, session.server, resume=True)
        answer = await self._ask(session.server, request, OPEN_LIMIT_S)
        _check_opened(session.server, answer)
        self._open_sessions[session.server] += 1
        return answer

    async def call(
        self, session: SessionRef, call_id: str, tool: str, arguments: str
    ) -> ToolReturned:
        """Run one tool.

        Raises:
            SessionLost: the server restarted since.
            ToolError: the failure is ours, not the model's.
        """
        limit_s = self._rollout.tool_timeout_s
        request = CallTool(
            session_id=session.session_id,
            call_id=call_id,
            tool=tool,
            arguments=arguments,
            timeout_s=limit_s,
        )
        returned = await self._ask(session.server, request, limit_s + ANSWER_MARGIN_S)
        if returned.status is ToolStatus.INFRASTRUCTURE:
            raise ToolError(f"tool {tool}: {returned.content}")
        return returned

    async def grade(
        self, session: SessionRef, turns: Sequence[TranscriptTurn], stop_reason: str
    ) -> SessionGraded:
        """Ask for the reward; the reply may hold a typed failure instead.

        Raises:
            SessionLost: the server restarted since.
            GradeError: there was no answer, or one that is no reward.
        """
        limit_s = self._rollout.grade_timeout_s
        request = GradeSession(
            session_id=session.session_id,
            turns=list(turns),
            stop_reason=stop_reason,
            timeout_s=limit_s,
        )
        try:
            graded = await self._ask(session.server, request, limit_s + ANSWER_MARGIN_S)
        except SessionLost:
            raise
        except ToolError as error:
            raise GradeError(str(error)) from error
        if graded.failure is None and (graded.reward is None or not isfinite(graded.reward)):
            raise GradeError(f"{graded.reward} is no reward")
        return graded

    async def close(self, session: SessionRef) -> None:
        """Free the session. One that cannot be closed is reaped by its server."""
        server = self._membership.find("tools", session.server)
        if server is not None:
            await self._try(server, CloseSession(session_id=session.session_id), CLOSE_TIMEOUT_S)

    def forget(self, session: SessionRef) -> None:
        """Count the session as not used by this worker any more."""
        self._open_sessions[session.server] -= 1

    def _opening(
        self, session_id: str, environment: str, task: str, server: str, *, resume: bool = False
    ) -> OpenSession:
        return OpenSession(
            session_id=session_id,
            environment=environment,
            task=task,
            ttl_s=self._ttl_s.get(server, SESSION_TTL_S),
            resume=resume,
        )

    async def _open_at(
        self, server: Member, request: OpenSession
    ) -> SessionOpened | TransportError | RequestRefused:
        self._open_sessions[server.name] += 1  # Before the answer, so that a burst is spread.
        opened = False
        try:
            answer = await self._try(server, request, ATTEMPT_MAX_S)
            if isinstance(answer, SessionOpened):
                _check_opened(server.name, answer)
                opened = True
            return answer
        finally:
            if not opened:
                self._open_sessions[server.name] -= 1

    async def _ask(self, server: str, request: Request[R], limit_s: float) -> R:
        """Ask a server by name; again as long as it does not answer, until it had time to return.

        Raises:
            SessionLost: it does not know the session.
            ToolError: it answered nothing, or what is no answer.
        """
        deadline_s = _now_s() + limit_s + RECOVERY_S
        for pause_s in _backoff():
            left_s = deadline_s - _now_s()
            try:
                member = await self._membership.wait_for("tools", name=server, timeout_s=left_s)
            except PeerUnreachable as error:
                raise ToolError(f"tool server {server} is gone") from error
            left_s = max(deadline_s - _now_s(), BACKOFF_MIN_S)
            answer = await self._try(member, request, min(left_s, ATTEMPT_MAX_S))
            if not isinstance(answer, Exception):
                return answer
            if _now_s() + pause_s >= deadline_s:
                raise ToolError(f"tool server {server}: {answer}") from answer
            await asyncio.sleep(pause_s)
        raise AssertionError("the backoff has no end")

    async def _try(
        self, member: Member, request: Request[R], timeout_s: float
    ) -> R | TransportError | RequestRefused:
        """One attempt; returns the errors after which another one makes sense.

        Raises:
            SessionLost: the server does not know the session.
            ToolError: it answered what is no answer, or refused for good.
        """
        try:
            return await self._membership.request(member, request, timeout_s=timeout_s)
        except (RequestTimeout, PeerUnreachable) as error:
            return error
        except ProtocolError as error:
            raise ToolError(f"tool server {member.name}: {error}") from error
        except RequestRefused as error:
            if error.refusal in TRY_LATER:
                return error
            if error.refusal is Refusal.NOT_FOUND:
                raise SessionLost(f"tool server {member.name}: {error}") from error
            raise ToolError(f"tool server {member.name}: {error}") from error


def _check_opened(server: str, answer: SessionOpened) -> None:
    if answer.failure is None and not answer.messages:
        raise ToolError(f"tool server {server} opened a session without a prompt")
    for tool in answer.tools:
        try:
            schema = json.loads(tool.parameters)
            usable = isinstance(schema.get("properties", {}), dict)
        except (ValueError, AttributeError, RecursionError):
            usable = False
        if not usable:
            raise ToolError(f"tool server {server}: parameters of {tool.name} are no JSON schema")


def _backoff() -> Iterable[float]:
    pause_s = BACKOFF_MIN_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, BACKOFF_MAX_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
