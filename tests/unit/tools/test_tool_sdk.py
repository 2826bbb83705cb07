"""Typed functions become tools, and an author's omission is said with file and line."""

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from common.errors import ConfigError
from services.tools.schema import BadArguments, described_arguments
from services.tools.sdk import Environment, Tool, Transcript, tool, tools_of
from services.tools.statuses import status_from_text


class Point(BaseModel):
    x: int
    y: int = 0


@tool
def search(query: str, limit: int = 5, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the index.

    Several words are joined by AND.

    Args:
        query: Words to look for,
            in any order.
        limit (int): How many results.

    Returns:
        Titles.
    """
    return [query] * limit


def schema_of(made: Tool) -> dict[str, Any]:
    return json.loads(made.spec().parameters)


def test_a_tool_is_described_by_its_name_docstring_and_hints() -> None:
    spec = search.spec()
    assert spec.name == "search"
    assert spec.description == "Search the index.\n\nSeveral words are joined by AND."
    assert schema_of(search) == {
        "type": "object",
        "additionalProperties": False,
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "Words to look for, in any order."},
            "limit": {"type": "integer", "default": 5, "description": "How many results."},
            "order": {"enum": ["new", "old"], "type": "string", "default": "new"},
        },
    }


def test_arguments_get_their_defaults_and_types() -> None:
    assert search.arguments.parse('{"query": "a"}') == {"query": "a", "limit": 5, "order": "new"}
    assert search.arguments.parse('{"query": "a", "limit": "7"}')["limit"] == 7


def test_a_parameter_may_be_a_model_and_have_any_name() -> None:
    @tool
    def move(to: Point, json: list[int], copy: bool = False) -> str:  # noqa: FBT002
        """Move there."""
        return f"{to.x + to.y}{json}{copy}"

    arguments = move.arguments.parse('{"to": {"x": 3}, "json": [1]}')
    assert move(**arguments) == "3[1]False"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", "query: Field required (the parameters are: query, limit, order)"),
        ('{"query": 5}', "query: Input should be a valid string"),
        ('{"query": "a", "limit": "many"}', "limit: Input should be a valid integer"),
        ('{"query": "a", "page": 2}', "page: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_explained_to_the_model(text: str, message: str) -> None:
    with pytest.raises(BadArguments) as refused:
        search.arguments.parse(text)
    assert message in str(refused.value)


def undocumented(query: str) -> str:
    return query


def untyped(query) -> str:
    """Search."""
    return query


def starred(*words: str) -> str:
    """Search."""
    return words[0]


def misdocumented(query: str) -> str:
    """Search.

    Args:
        words: To look for.
    """
    return query


def unresolved(query: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Search."""
    return str(query)


def inexpressible(query: Callable[[], int]) -> str:
    """Search."""
    return str(query)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "has no docstring"),
        (untyped, "parameter 'query' has no type hint; write for example query: str"),
        (starred, "takes *words: str; the model passes arguments by name only"),
        (misdocumented, "documents 'words' under Args:, but has no such parameter"),
        (unresolved, "has a type hint that cannot be resolved"),
        (inexpressible, "has a parameter whose type JSON cannot express"),
        (lambda query: query, "a tool must be a named function"),
    ],
)
def test_what_an_author_forgot_is_said_with_its_place(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        tool(function)
    line = function.__code__.co_firstlineno
    assert str(refused.value).startswith(f"{__file__}:{line}: tool ")
    assert message in str(refused.value)


class Counter(Environment):
    name = "counter"
    tools = (search,)

    def __init__(self) -> None:
        self.count = 0

    @tool
    def add(self, number: int) -> int:
        """Add a number."""
        self.count += number
        return self.count


def test_an_environment_has_its_methods_and_the_shared_functions_as_tools() -> None:
    class Louder(Counter):
        name = "louder"

    assert sorted(tools_of(Louder)) == ["add", "search"]
    counter = Louder()
    assert counter.add(2) == 2
    assert tools_of(Louder)["add"].bound_to(counter)(number=3) == 5
    assert tools_of(Louder)["search"].bound_to(counter)(query="a", limit=1) == ["a"]


def test_two_tools_of_one_name_are_refused() -> None:
    class Twice(Counter):
        tools = (search, tool(misnamed_search()))

    with pytest.raises(ConfigError, match="two tools named 'search'"):
        tools_of(Twice)


def misnamed_search() -> Callable[..., Any]:
    def search(text: str) -> str:
        """Search."""
        return text

    return search


def test_a_tool_may_bring_a_reader_of_its_status() -> None:
    @tool(read_status=status_from_text)
    def shell(command: str) -> str:
        """Run a command."""
        return command

    assert shell.read_status is status_from_text
    assert shell.spec() == tool(shell.function).spec()
    assert search.read_status is None


def test_argument_descriptions_may_hold_colons_and_lines() -> None:
    text = (
        "Do.\n\nArgs:\n    a: one: two\n        and three\n    b (int): four\n\nReturns:\n    c: x"
    )
    assert described_arguments(text) == {"a": "one: two and three", "b": "four"}


def test_a_transcript_without_turns_has_an_empty_final_action() -> None:
    assert Transcript((), "answered").final_action == ""
