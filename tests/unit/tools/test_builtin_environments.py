"""The built-in environments: what they ask, evaluate and reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.tools import TranscriptTurn
from services.tools.builtin.arithmetic import answer_in, number_in, same_number, worked_examples
from services.tools.builtin.calculator import Calculator, evaluate
from services.tools.builtin.examples import EXAMPLES
from services.tools.builtin.python import shown
from services.tools.sandbox import SandboxResult, SandboxStatus
from services.tools.sdk import ToolFault, ToolTimeout, Transcript


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37+48", "85"),
        (" 2 * (3 + 4) - -1 ", "15"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7 // 2 % 2", "1"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("3 × 4 ÷ 2 − 1", "5"),  # noqa: RUF001
        ("0.1+0.2", "0.3"),
        ("1e3", "1000"),
    ],
)
def test_arithmetic_is_evaluated(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["1/0", "", "1+", "x", "__import__('os')", "'a'*9", "9**9**9", "10**101", "2**401", "1j",
     "True", "(-8)**0.5", "1" * 600, "-" * 300 + "1", "(" * 400, "1e400", "[1]", "1 if 1 else 2",
     "0**-1"],
)  # fmt: skip
def test_all_else_is_the_models_error(expression: str) -> None:
    with pytest.raises(ToolFault):
        evaluate(expression)


@given(st.text("0123456789+-*/%().e ", max_size=60))
def test_no_expression_breaks_the_calculator(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ToolFault:
        return
    assert number_in(value) is not None


@pytest.mark.parametrize(
    ("given_text", "expected", "same"),
    [
        ("85", "85", True),
        (" 85.0 ", "85", True),
        ("1,234", "1234", True),
        ("$12.", "12", True),
        ("0.333333333", "0.33333333333", True),
        ("100000000000000001", "100000000000000002", False),
        ("84", "85", False),
        ("eighty", "85", False),
        ("nan", "nan", False),
        ("inf", "inf", False),
        ("1e999999999", "85", False),
        ("", "85", False),
    ],
)
def test_answers_are_compared_as_numbers(given_text: str, expected: str, same: bool) -> None:
    assert same_number(given_text, expected) is same


def test_the_last_answer_counts() -> None:
    assert answer_in("<answer>1</answer> no, <answer>\n2</answer>") == "\n2"
    assert answer_in("2") is None


def transcript(action: str) -> Transcript:
    return Transcript((TranscriptTurn(action=action, observation=""),), "answered")


TASK = {"question": "37+48", "answer": "85", "shots": 2}


async def test_a_right_answer_is_rewarded_and_the_call_is_scored() -> None:
    calculator = Calculator()
    messages = await calculator.reset(TASK)
    assert messages[-1].content == "37+48"
    assert len(messages) == len(worked_examples("calculator", 2)) + 1
    assert await calculator.grade(transcript("<answer>85</answer>")) == {
        "reward": 1.0, "correct": 1.0, "called": 0.0,
    }  # fmt: skip
    await calculator.calculator("37+48")
    graded = await calculator.grade(transcript("85"))
    assert graded == {"reward": 0.0, "correct": 0.0, "called": 1.0}


@pytest.mark.parametrize("task", [{"question": "1"}, TASK | {"answer": "x"}, TASK | {"shots": 99}])
async def test_a_task_that_cannot_be_graded_is_refused_at_reset(task: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        await Calculator().reset(task)


@pytest.mark.parametrize("environment", ["calculator", "python"])
def test_worked_examples_end_with_an_answer(environment: str) -> None:
    for example in EXAMPLES[environment]:
        assert example[0].role == "user"
        assert answer_in(example[-1].content) is not None


def result(status: SandboxStatus, stdout: str = "", stderr: str = "") -> SandboxResult:
    return SandboxResult(status, stdout, stderr, 1, wall_s=2.0, cpu_s=1.0)


def test_the_model_sees_what_its_code_printed() -> None:
    assert shown(result(SandboxStatus.OK, "85\n")) == "85"
    assert shown(result(SandboxStatus.OK)) == ""


def test_the_model_sees_why_its_code_failed() -> None:
    with pytest.raises(ToolFault, match=r"^NameError: x\nPrinted before: 1$"):
        shown(result(SandboxStatus.FAILED, "1\n", "Traceback\n  line\nNameError: x\n"))
    with pytest.raises(ToolTimeout, match=r"did not end within 2\.0 s"):
        shown(result(SandboxStatus.TIMEOUT))
    for status in (SandboxStatus.FLOOD, SandboxStatus.KILLED):
        with pytest.raises(ToolFault):
            shown(result(status))
