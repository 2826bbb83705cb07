"""What the trajectories of one worker share, each as the trajectory sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.messages.scheduler import TurnFinished, TurnRecorded
from common.messages.tools import SessionGraded, SessionOpened, ToolReturned, TranscriptTurn
from services.rollout.engine import Engine, GenerateRequest, Generation
from services.rollout.limits import Limits
from services.rollout.moves import Miss
from services.rollout.parsers import Parser
from services.rollout.render import Renderer
from services.rollout.tool_client import SessionRef


class Tools(Protocol):
    """The tool servers, as one trajectory sees them: `ToolClient`, or the servers in process."""

    async def open(
        self, session_id: str, environment: str, task: str
    ) -> tuple[SessionRef, SessionOpened]:
        """Open a session where the environment is served."""
        ...

    async def resume(self, session: SessionRef, environment: str, task: str) -> SessionOpened:
        """Find a session again after a move."""
        ...

    async def call(
        self, session: SessionRef, call_id: str, tool: str, arguments: str
    ) -> ToolReturned:
        """Run one tool."""
        ...

    async def grade(
        self, session: SessionRef, turns: list[TranscriptTurn], stop_reason: str
    ) -> SessionGraded:
        """Ask for the reward."""
        ...

    async def close(self, session: SessionRef) -> None:
        """End the session."""
        ...

    def forget(self, session: SessionRef) -> None:
        """The session is not used from here any more."""
        ...


class Recorder(Protocol):
    """Where turns go: `Journal`, or a list."""

    async def record(self, turn: TurnFinished) -> TurnRecorded | None:
        """Report one turn; None when it could not be recorded."""
        ...


class Caches(Protocol):
    """The KV caches of the other workers: `KvClient`, or nobody's."""

    async def take_over(
        self, source: str, trajectory_id: str, context: Sequence[int]
    ) -> Miss | None:
        """Bring a context's cache from the peer `source` into the engine.

        Returns:
            Why it must be computed again, or None when it came. Takes seconds at most.
        """
        ...


class NoCaches:
    """For a job with one engine: nothing ever moves."""

    async def take_over(
        self, source: str, trajectory_id: str, context: Sequence[int]
    ) -> Miss | None:
        """There is nobody to ask."""
        del source, trajectory_id, context
        return Miss.NO_SOURCE


class Sampler(Protocol):
    """What generations pass through: the engine, or `Updates` before it."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue one context, as `Engine.generate`."""
        ...


@dataclass(frozen=True, slots=True)
class Equipment:
    """What the trajectories of one worker share."""

    engine: Engine
    sampler: Sampler
    renderer: Renderer
    parser: Parser
    tools: Tools
    journal: Recorder
    caches: Caches
    limits: Limits
    temperature: float
    draining: Callable[[], bool]
    """Whether trajectories stop at their next turn boundary, to go on elsewhere."""
