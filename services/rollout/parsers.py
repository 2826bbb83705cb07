"""How the model calls tools: from the text of one turn to a call, and from a result to a message.

Pure. A parser decides whether a turn calls a tool, calls one wrongly, or is the final answer;
whether the arguments suit the tool is the tool server's to say. No text makes a parser raise:
what the model wrote wrongly, the model is told.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from common.messages.tools import ChatMessage, ToolSpec

CALL_CHARS_MAX = 256 * 1024
"""Of one call. Models write larger ones by accident only."""
NAME_CHARS_SHOWN = 40
ANY_TOOL = "tool"
"""The tag that calls the session's only tool."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call of a tool that the session has."""

    tool: str
    arguments: str
    """JSON object."""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """The turn meant to call a tool; `message` tells the model what was wrong with it."""

    message: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What one turn asks for."""

    call: ToolCall | MalformedCall | None
    """The first call; None when the turn is the final answer."""
    ignored_calls: int = 0
    """Further calls of the same turn; they are not run, and the model is told so."""


class Parser(Protocol):
    """One way to write tool calls."""

    shows_tools: bool
    """Whether the chat template tells the model of the tools; else the prompt does."""

    def stop_strings(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Strings that end a turn: those that complete a call."""
        ...

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """Find the call in the text of one turn, without its end-of-turn token."""
        ...

    def result(self, content: str) -> ChatMessage:
        """The message in which the model sees what its call returned."""
        ...


class HermesParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, answered by a `tool` message."""

    shows_tools = True
    _call = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def stop_strings(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return ("</tool_call>",) if tools else ()

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        found = self._call.findall(text)
        if not found:
            return ParsedTurn(None)
        body, close = found[0]
        if not close:
            return ParsedTurn(MalformedCall("the call is not closed by </tool_call>"))
        return ParsedTurn(self._read(body, tools), len(found) - 1)

    def result(self, content: str) -> ChatMessage:
        return ChatMessage(role="tool", content=content)

    def _read(self, body: str, tools: Sequence[ToolSpec]) -> ToolCall | MalformedCall:
        call = _read_object(body, "the call")
        if isinstance(call, MalformedCall):
            return call
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str):
            return MalformedCall('the call has no "name"')
        if not isinstance(arguments, dict):
            return MalformedCall('"arguments" must be a JSON object')
        if name not in {tool.name for tool in tools}:
            return _unknown(name, tools)
        return ToolCall(name, json.dumps(arguments))


class TagsParser:
    """`<NAME>text</NAME>`, or `<tool>text</tool>` for an only tool; answered by the user.

    The text is the tool's only parameter when that is a string, and else the JSON object of its
    arguments. Tags of other names are ordinary text.
    """

    shows_tools = False

    def stop_strings(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        return tuple(f"</{name}>" for name in self._tags(tools))

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        tags = self._tags(tools)
        if not tags:
            return ParsedTurn(None)
        names = "|".join(re.escape(name) for name in tags)
        found = re.findall(rf"<({names})>(.*?)(</\1>|\Z)", text, re.DOTALL)
        if not found:
            return ParsedTurn(None)
        name, body, close = found[0]
        if not close:
            return ParsedTurn(MalformedCall(f"the call is not closed by </{name}>"))
        return ParsedTurn(self._read(name, body, tools), len(found) - 1)

    def result(self, content: str) -> ChatMessage:
        return ChatMessage(role="user", content=f"<result>{content}</result>")

    def _tags(self, tools: Sequence[ToolSpec]) -> list[str]:
        names = [tool.name for tool in tools]
        return names if ANY_TOOL in names or not names else [*names, ANY_TOOL]

    def _read(self, tag: str, body: str, tools: Sequence[ToolSpec]) -> ToolCall | MalformedCall:
        tool = next((tool for tool in tools if tool.name == tag), None)
        if tool is None and len(tools) > 1:
            return _unknown(tag, tools)
        tool = tool or tools[0]
        if len(body) > CALL_CHARS_MAX:
            return _too_long()
        if parameter := _only_string_parameter(tool):
            return ToolCall(tool.name, json.dumps({parameter: body}))
        arguments = _read_object(body, f"the text in <{tag}>")
        if isinstance(arguments, MalformedCall):
            return arguments
        return ToolCall(tool.name, json.dumps(arguments))


PARSERS: dict[str, Parser] = {"tags": TagsParser(), "hermes": HermesParser()}
"""By `rollout.tool_format`."""


def error_line(message: str) -> str:
    """An error as the model sees it."""
    return f"Error: {message}"


def with_ignored(content: str, ignored_calls: int) -> str:
    """Add to a result that the turn's further calls were not run."""
    if not ignored_calls:
        return content
    line = error_line(f"only the first call of a turn is run; {ignored_calls} more were ignored")
    return f"{content}\n{line}"


def _read_object(text: str, what: str) -> dict[str, Any] | MalformedCall:
    if len(text) > CALL_CHARS_MAX:
        return _too_long()
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return MalformedCall(f"{what} is nested too deeply")
    except json.JSONDecodeError as error:
        return MalformedCall(f"{what} is not valid JSON: {error.msg} at character {error.pos}")
    except ValueError:  # A number that is not finite or has thousands of digits.
        return MalformedCall(f"{what} holds a number that cannot be used")
    if not isinstance(value, dict):
        return MalformedCall(f"{what} must be a JSON object")
    return cast("dict[str, Any]", value)


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


def _too_long() -> MalformedCall:
    return MalformedCall(f"the call is longer than {CALL_CHARS_MAX} characters")


def _unknown(name: str, tools: Sequence[ToolSpec]) -> MalformedCall:
    known = ", ".join(tool.name for tool in tools) or "none"
    # ASCII, because JSON can spell characters that no tokenizer can encode.
    return MalformedCall(f"there is no tool {name[:NAME_CHARS_SHOWN]!a}; tools: {known}")


def _only_string_parameter(tool: ToolSpec) -> str | None:
    """Name of the tool's parameter when it has exactly one and that is a string."""
    properties: dict[str, Any] = json.loads(tool.parameters).get("properties", {})
    if len(properties) != 1:
        return None
    name, schema = next(iter(properties.items()))
    return name if schema.get("type") == "string" else None
