"""What a tool server receives: sessions, calls, grading."""

from common.messages.base import Message, Request, Wire
from common.trajectory import FailureKind, ToolStatus


class ToolSpec(Message):
    """One tool as the model is told of it."""

    name: str
    description: str
    parameters: str
    """JSON schema of the arguments, as JSON."""


class ServerDescribed(Message):
    """What the server offers."""

    environments: list[str]
    capacity: int
    """Sessions that may be open at once."""
    sessions: int
    calls: int
    """Calls since start."""


class DescribeServer(Request[ServerDescribed]):
    """Read-only."""


class ChatMessage(Message):
    """One message of a prompt, before the chat template renders it."""

    role: str
    content: str


class SessionOpened(Message):
    """The session is reset and ready, or the environment failed."""

    messages: list[ChatMessage]
    """The prompt. Empty when `failure` is set."""
    tools: list[ToolSpec]
    failure: Wire[FailureKind] | None = None
    detail: str = ""


class OpenSession(Request[SessionOpened]):
    """Open (or find again) the session of one trajectory and reset its environment.

    Idempotent by session id. Refused with `OVERLOADED` at capacity and with `NOT_FOUND` when
    the environment is not served here, or when `resume` is set and the session is gone.
    """

    session_id: str
    environment: str
    task: str
    """The task's row as JSON."""
    ttl_s: float
    """The session is reaped when nothing touches it for so long."""
    resume: bool = False
    """True when calls were made in the session already: a fresh one would forget them."""


class ToolReturned(Message):
    """The typed outcome of one call."""

    status: Wire[ToolStatus]
    content: str
    """What the model sees."""
    latency_s: float
    done: bool = False
    """True when the environment ends the episode with this call."""


class CallTool(Request[ToolReturned]):
    """Run one tool. Idempotent by call id within the session.

    Refused with `NOT_FOUND` when the session is unknown (the server restarted, or the TTL
    passed).
    """

    session_id: str
    call_id: str
    tool: str
    arguments: str
    """JSON object."""
    timeout_s: float
    """Wall-clock limit of the call itself; past it the outcome is `TIMEOUT`."""


class TranscriptTurn(Message):
    """One turn as text, for graders."""

    action: str
    observation: str


class SessionGraded(Message):
    """A reward, or a typed failure, never both."""

    reward: float | None
    scores: dict[str, float] = {}
    failure: Wire[FailureKind] | None = None
    detail: str = ""


class GradeSession(Request[SessionGraded]):
    """Grade the trajectory of a session. Idempotent: the first result is kept."""

    session_id: str
    turns: list[TranscriptTurn]
    stop_reason: str
    timeout_s: float


class SessionClosed(Message):
    """The session is gone."""


class CloseSession(Request[SessionClosed]):
    """End a session and free what it holds. Idempotent; an unknown id is fine."""

    session_id: str
