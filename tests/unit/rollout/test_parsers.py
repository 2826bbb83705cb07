import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.tools import ToolSpec
from services.rollout.parsers import (
    CALL_CHARS_MAX,
    PARSERS,
    HermesParser,
    MalformedCall,
    ParsedTurn,
    TagsParser,
    ToolCall,
    with_ignored,
)


def spec(name: str, **types: str) -> ToolSpec:
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties}
    return ToolSpec(name=name, description="", parameters=json.dumps(schema))


CALCULATOR = spec("calculator", expression="string")
PYTHON = spec("python", code="string")
ADD = spec("add", a="integer", b="integer")
TOOLS = [CALCULATOR, PYTHON, ADD]


def hermes(text: str) -> ParsedTurn:
    return HermesParser().parse(text, TOOLS)


def tags(text: str, tools: list[ToolSpec] = TOOLS) -> ParsedTurn:
    return TagsParser().parse(text, tools)


def told(turn: ParsedTurn) -> str:
    assert isinstance(turn.call, MalformedCall)
    return turn.call.message


def test_a_hermes_call_is_its_name_and_its_arguments() -> None:
    turn = hermes('Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    assert turn == ParsedTurn(ToolCall("add", '{"a": 1}'))


def test_a_tag_gives_its_text_to_the_only_string_parameter() -> None:
    turn = tags("<python>print('<b>')\n</python>")
    assert turn.call == ToolCall("python", json.dumps({"code": "print('<b>')\n"}))


def test_a_tag_of_a_tool_with_other_parameters_holds_json() -> None:
    assert tags('<add>{"a": 1, "b": 2}</add>').call == ToolCall("add", '{"a": 1, "b": 2}')
    assert "JSON" in told(tags("<add>1 2</add>"))


def test_the_tool_tag_calls_an_only_tool_and_is_refused_with_several() -> None:
    assert tags("<tool>1+1</tool>", [CALCULATOR]).call == ToolCall(
        "calculator", '{"expression": "1+1"}'
    )
    assert "calculator, python, add" in told(tags("<tool>1+1</tool>"))


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("text", ["", "<answer>4</answer>", "no <b>call</b>", "</tool_call>"])
def test_a_turn_without_a_call_is_the_final_answer(name: str, text: str) -> None:
    assert PARSERS[name].parse(text, TOOLS) == ParsedTurn(None)


@pytest.mark.parametrize("name", PARSERS)
def test_without_tools_nothing_is_a_call_of_one_and_nothing_stops_a_turn(name: str) -> None:
    assert PARSERS[name].stop_strings([]) == ()
    assert not isinstance(PARSERS[name].parse("<tool>1</tool>", []).call, ToolCall)


def test_the_first_of_several_calls_is_run_and_the_model_is_told_of_the_rest() -> None:
    turn = tags("<python>1</python><python>2</python><calculator>3</calculator>")
    assert turn == ParsedTurn(ToolCall("python", '{"code": "1"}'), ignored_calls=2)
    assert with_ignored("1", turn.ignored_calls).startswith("1\nError: only the first call")
    call = '<tool_call>{"name": "add"}</tool_call>'
    assert hermes(call * 2) == ParsedTurn(ToolCall("add", "{}"), ignored_calls=1)
    assert with_ignored("1", 0) == "1"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "not valid JSON"),
        ('{"name": "subtract", "arguments": {}}', "no tool 'subtract'; tools: calculator"),
        ('{"name": "add", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "add", "arguments": "{}"}', '"arguments" must be a JSON object'),
        ('{"name": 7}', 'no "name"'),
        ('{"arguments": {}}', 'no "name"'),
        ('["add"]', "must be a JSON object"),
        ('{"name": "add", "arguments": {"a": NaN}}', "number"),
        ('{"name": "add", "arguments": {"a": 1%s}}' % ("0" * 5000), "number"),
        ("[" * 100_000, "too deeply"),
        ('{"name": "\\ud800"}', "'\\ud800'"),
        ("x" * (1 << 20), "longer than"),
        ("", "not valid JSON"),
    ],
)
def test_the_model_is_told_what_is_wrong_with_its_call(body: str, message: str) -> None:
    assert message in told(hermes(f"<tool_call>{body}</tool_call>"))
    told(hermes(f"<tool_call>{body}</tool_call>")).encode()


def test_a_call_that_is_not_closed_is_malformed() -> None:
    assert "</python>" in told(tags("<python>1"))
    assert "</tool_call>" in told(hermes('<tool_call>{"name": "add"}'))


def test_a_huge_tagged_call_is_refused() -> None:
    assert "longer than" in told(tags(f"<python>{'x' * (CALL_CHARS_MAX + 1)}</python>"))


def test_closing_tags_end_a_turn() -> None:
    assert HermesParser().stop_strings(TOOLS) == ("</tool_call>",)
    assert TagsParser().stop_strings([PYTHON]) == ("</python>", "</tool>")
    assert TagsParser().stop_strings([spec("tool", text="string")]) == ("</tool>",)


def test_results_go_back_in_the_format_of_the_calls() -> None:
    assert TagsParser().result("4").model_dump() == {
        "role": "user",
        "content": "<result>4</result>",
    }
    assert HermesParser().result("4").model_dump() == {"role": "tool", "content": "4"}


PIECES = ["<tool_call>", "</tool_call>", "<python>", "</python>", "<tool>", "</tool>", "<add>"]
JSON_PIECES = ["</add>", '{"name": ', '"add"', ', "arguments": ', "{}", "}", "[", "\\ud800", "NaN"]


@given(st.lists(st.sampled_from(PIECES + JSON_PIECES) | st.text(max_size=8)).map("".join))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parser in PARSERS.values():
        call = parser.parse(text, TOOLS).call
        if isinstance(call, ToolCall):
            assert isinstance(json.loads(call.arguments), dict)
            assert call.tool in {tool.name for tool in TOOLS}
            call.arguments.encode()
        elif call:
            call.message.encode()
