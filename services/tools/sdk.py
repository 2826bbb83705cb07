"""What the author of a tool server imports.

    class Dictionary(Environment):
        name = "dictionary"

        def reset(self, task): return task["question"]

        @tool
        def look_up(self, word: str) -> str:
            '''Give the definition of a word.'''

        def grade(self, trajectory): return float(task answered)

An environment is made per session, so its attributes are the session's state. Every function may
be `async`; a plain one runs in a thread. Who is to blame for a failure decides what it means for
training, so say it: `ToolFault` is the model's mistake, `InfrastructureFailure` is ours.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, ClassVar, overload

from common.config import ToolServerConfig
from common.errors import ConfigError
from common.messages.tools import ChatMessage, ToolSpec, TranscriptTurn
from common.trajectory import ToolStatus
from services.tools.schema import Arguments, arguments_of, location_of, name_of, summary_of

__all__ = [
    "ChatMessage",
    "Environment",
    "EpisodeOver",
    "InfrastructureFailure",
    "StatusReader",
    "Tool",
    "ToolFault",
    "ToolTimeout",
    "Transcript",
    "call_limit_s",
    "tool",
]


class ToolFault(Exception):
    """The model asked for something that cannot be done; it sees the message and goes on."""


class ToolTimeout(ToolFault):
    """What the model asked for takes too long; it sees the message and goes on."""


class InfrastructureFailure(Exception):
    """Something of ours broke. The trajectory ends without a reward and is never trained."""


class Busy(InfrastructureFailure):
    """There is no room to run this now. The caller asks again, until its patience ends."""


@dataclass(frozen=True)
class EpisodeOver:
    """Returned by a tool whose call ends the episode."""

    content: Any = ""


@dataclass(frozen=True)
class Transcript:
    """What happened in a trajectory, as text, for its grader."""

    turns: tuple[TranscriptTurn, ...]
    stop_reason: str

    @property
    def final_action(self) -> str:
        """What the model wrote last; empty when it wrote nothing."""
        return self.turns[-1].action if self.turns else ""


_CALL_LIMIT_S: ContextVar[float] = ContextVar("call_limit_s", default=10.0)


def call_limit_s() -> float:
    """The wall-clock limit of the call that runs now, in seconds."""
    return _CALL_LIMIT_S.get()


def set_call_limit(limit_s: float) -> None:
    """Say what `call_limit_s` answers in this context. For whoever runs calls."""
    _CALL_LIMIT_S.set(limit_s)


StatusReader = Callable[[str], ToolStatus]
"""Reads a call's status from the text that the tool returned (JSON where it returned no text)."""


@dataclass(frozen=True)
class Tool:
    """A typed function that the model can call. Made by `@tool`."""

    name: str
    description: str
    arguments: Arguments
    function: Callable[..., Any]
    takes_self: bool
    read_status: StatusReader | None = None
    """For tools that say in their text only how a call went. Without it, what returns is ok."""

    def spec(self) -> ToolSpec:
        """The tool as the model is told of it."""
        return ToolSpec(
            name=self.name, description=self.description, parameters=self.arguments.schema
        )

    def bound_to(self, environment: "Environment") -> Callable[..., Any]:
        """The function, of this session where the tool is a method."""
        return MethodType(self.function, environment) if self.takes_self else self.function

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None or not self.takes_self else self.bound_to(instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(*, read_status: StatusReader) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, read_status: StatusReader | None = None
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function or method: `@tool`, or `@tool(read_status=status_from_text)`.

    Its name, type hints and docstring are the tool's name, JSON schema and description; an
    `Args:` section describes the parameters.

    Args:
        function: The function.
        read_status: Says from the returned text how the call went, where the tool does not raise.

    Raises:
        ConfigError: no docstring, a parameter without type hint, or one that JSON cannot fill.
    """
    if function is None:
        return partial(_made, read_status=read_status)
    return _made(function, read_status)


def _made(function: Callable[..., Any], read_status: StatusReader | None) -> Tool:
    takes_self = next(iter(inspect.signature(function).parameters), "") == "self"
    return Tool(
        name=name_of(function),
        description=summary_of(function),
        arguments=arguments_of(function),
        function=function,
        takes_self=takes_self,
        read_status=read_status,
    )


Prompt = str | list[ChatMessage]
Reward = float | Mapping[str, float]


class Environment:
    """A kind of task: its prompt, its tools, its reward. One instance per session."""

    name: ClassVar[str] = ""
    """What the `environment` column of a task names. A class without one is only a base."""
    tools: ClassVar[Sequence[Tool]] = ()
    """Tools that are functions of the module and not methods."""

    @classmethod
    async def start(cls, server: ToolServerConfig) -> None:
        """Prepare what all sessions share, once, before the server takes any.

        Raises:
            ConfigError: the environment cannot work on this machine; the server exits with 2.
        """

    def reset(self, task: dict[str, Any]) -> Prompt | Awaitable[Prompt]:
        """Take a task's row and return the prompt: one user message, or a list of messages."""
        raise NotImplementedError

    def grade(self, trajectory: Transcript) -> Reward | Awaitable[Reward]:
        """Return the reward, or a mapping with `reward` and any further scores."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Free what the session holds."""


def tools_of(environment: type[Environment]) -> dict[str, Tool]:
    """The tools of an environment by name, inherited ones included.

    Raises:
        ConfigError: two tools share a name.
    """
    methods = [value for _, value in inspect.getmembers_static(environment) if _is_tool(value)]
    found: dict[str, Tool] = {}
    for entry in (*methods, *environment.tools):
        if found.setdefault(entry.name, entry) is not entry:
            where = location_of(entry.function)
            raise ConfigError(f"{where}: {environment.__name__} has two tools named {entry.name!r}")
    return found


def _is_tool(value: Any) -> bool:
    return isinstance(value, Tool)
