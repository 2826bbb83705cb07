"""The peers of a rollout worker: a tool server and a scheduler that do as the test says."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import Refusal, RequestRefused
from common.membership import Membership
from common.messages.scheduler import (
    ReportWorker,
    TurnFinished,
    TurnRecorded,
    WorkerReported,
)
from common.messages.tools import (
    CallTool,
    ChatMessage,
    CloseSession,
    GradeSession,
    OpenSession,
    SessionClosed,
    SessionGraded,
    SessionOpened,
    ToolReturned,
    ToolSpec,
)
from common.service import Runtime
from common.trajectory import ToolStatus

CALCULATOR = ToolSpec(
    name="calculator",
    description="Evaluates an expression.",
    parameters='{"type": "object", "properties": {"expression": {"type": "string"}}}',
)


Call = Callable[[CallTool], ToolReturned]


def returns(content: str, status: ToolStatus = ToolStatus.OK, *, done: bool = False) -> Call:
    """A `call` that always returns this."""
    return lambda _request: ToolReturned(status=status, content=content, latency_s=0.0, done=done)


@dataclass
class FakeTools:
    """A tool server. Sessions and results are kept per incarnation, as a real one's are."""

    environments: str = "calculator"
    opened_as: SessionOpened = field(
        default_factory=lambda: SessionOpened(
            messages=[ChatMessage(role="user", content="2+2")], tools=[CALCULATOR]
        )
    )
    call: Call = field(default_factory=lambda: returns("4"))
    graded_as: SessionGraded = field(default_factory=lambda: SessionGraded(reward=1.0))
    call_s: float = 0.05
    refuse_opening: int = 0
    """So many first requests are refused as overloaded."""
    calls: list[CallTool] = field(default_factory=list)
    """Executed ones; a repeated call id is executed once."""
    openings: list[OpenSession] = field(default_factory=list)
    gradings: list[GradeSession] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    """A call has begun."""

    def __call__(self, runtime: Runtime) -> "FakeTools":
        """Be the service of this process; a second process starts without sessions."""
        self.sessions = set()
        self._returned: dict[tuple[str, str], ToolReturned] = {}
        self._runtime = runtime
        runtime.mesh.serve(OpenSession, self._open)
        runtime.mesh.serve(CallTool, self._call)
        runtime.mesh.serve(GradeSession, self._grade)
        runtime.mesh.serve(CloseSession, self._close)
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        await member(self._runtime, stopping, {"environments": self.environments})

    def _open(self, _sender: str, request: OpenSession) -> SessionOpened:
        self.openings.append(request)
        if self.refuse_opening:
            self.refuse_opening -= 1
            raise RequestRefused(Refusal.OVERLOADED)
        if request.resume:
            self._known(request.session_id)
        self.sessions.add(request.session_id)
        return self.opened_as

    async def _call(self, _sender: str, request: CallTool) -> ToolReturned:
        self._known(request.session_id)
        key = request.session_id, request.call_id
        if key not in self._returned:
            self.calls.append(request)
            json.loads(request.arguments)
            self.entered.set()
            await asyncio.sleep(self.call_s)
            self._returned[key] = self.call(request)
        return self._returned[key]

    def _grade(self, _sender: str, request: GradeSession) -> SessionGraded:
        self._known(request.session_id)
        self.gradings.append(request)
        return self.graded_as

    def _close(self, _sender: str, request: CloseSession) -> SessionClosed:
        self.closed.append(request.session_id)
        self.sessions.discard(request.session_id)
        return SessionClosed()

    def _known(self, session_id: str) -> None:
        if session_id not in self.sessions:
            raise RequestRefused(Refusal.NOT_FOUND, session_id)


@dataclass
class FakeScheduler:
    """Records turns and reports; `record` may refuse or stop a trajectory."""

    turns: list[TurnFinished] = field(default_factory=list)
    reports: list[ReportWorker] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    go_on: bool = True
    refusal: Refusal | None = None

    def __call__(self, runtime: Runtime) -> "FakeScheduler":
        self._runtime = runtime
        runtime.mesh.serve(TurnFinished, self._record)
        runtime.mesh.serve(ReportWorker, self._note)
        return self

    async def run(self, stopping: asyncio.Event) -> None:
        await member(self._runtime, stopping)

    def of(self, trajectory_id: str) -> list[TurnFinished]:
        """The turns of one trajectory."""
        return [turn for turn in self.turns if turn.trajectory_id == trajectory_id]

    def ended(self, count: int = 1) -> bool:
        """Whether so many trajectories have a result."""
        return sum(turn.result is not None for turn in self.turns) >= count

    def _record(self, _sender: str, turn: TurnFinished) -> TurnRecorded:
        if self.refusal:
            raise RequestRefused(self.refusal)
        same = [t for t in self.of(turn.trajectory_id) if t.turn == turn.turn]
        if same:
            assert same == [turn], "a repeated turn has the same content"
        else:
            self.turns.append(turn)
        return TurnRecorded(go_on=self.go_on and turn.result is None)

    def _note(self, _sender: str, report: ReportWorker) -> WorkerReported:
        self.reports.append(report)
        return WorkerReported(drop=self.drop)


async def member(
    runtime: Runtime, stopping: asyncio.Event, labels: dict[str, str] | None = None
) -> None:
    """Be a member until asked to stop."""
    async with asyncio.TaskGroup() as tasks:
        membership = tasks.create_task(Membership(runtime, labels).run())
        await stopping.wait()
        membership.cancel()
