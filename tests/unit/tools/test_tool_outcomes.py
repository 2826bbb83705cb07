"""What each ending of a call or a grader means for training."""

from fractions import Fraction
from typing import Any

import pytest

from common.messages.tools import ChatMessage
from common.trajectory import FailureKind, ToolStatus
from services.tools.outcomes import (
    CONTENT_MAX_CHARS,
    NotAnAnswer,
    graded,
    not_graded,
    not_opened,
    outcome_of_error,
    outcome_of_value,
    prompt_of,
)
from services.tools.schema import BadArguments
from services.tools.sdk import EpisodeOver, InfrastructureFailure, ToolFault, ToolTimeout
from services.tools.statuses import status_from_text
from services.tools.threads import StillRunning


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("text", (ToolStatus.OK, "text", False)),
        ({"a": [1, "é"]}, (ToolStatus.OK, '{"a": [1, "é"]}', False)),
        (0, (ToolStatus.OK, "0", False)),
        ("0 errors found", (ToolStatus.OK, "0 errors found", False)),
        (None, (ToolStatus.EMPTY, "(empty)", False)),
        ("", (ToolStatus.EMPTY, "(empty)", False)),
        (EpisodeOver("won"), (ToolStatus.OK, "won", True)),
        ("lone \ud800 surrogate", (ToolStatus.OK, "lone ? surrogate", False)),
    ],
)
def test_an_answer_is_rendered_as_text(value: Any, outcome: tuple[ToolStatus, str, bool]) -> None:
    assert outcome_of_value(value) == outcome


def test_a_long_answer_is_cut_and_says_so() -> None:
    _, content, _ = outcome_of_value("x" * (CONTENT_MAX_CHARS + 7))
    assert content.endswith("x\n[7 characters cut]")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("bash: foo: command not found", ToolStatus.ERROR),
        ({"error": "boom"}, ToolStatus.ERROR),
        ({"status": "timed_out", "error": "killed"}, ToolStatus.TIMEOUT),
        ("x" * CONTENT_MAX_CHARS + "\nexit code: 1", ToolStatus.ERROR),
        (EpisodeOver("Error: lost"), ToolStatus.ERROR),
        ("No results found.", ToolStatus.EMPTY),
        (None, ToolStatus.EMPTY),
        (5, ToolStatus.OK),
        ("0 errors found", ToolStatus.OK),
    ],
)
def test_a_reader_says_how_a_call_went_that_returned(value: Any, status: ToolStatus) -> None:
    plain = outcome_of_value(value)
    read = outcome_of_value(value, status_from_text)
    assert read == (status, *plain[1:])


def test_without_a_reader_nothing_is_guessed() -> None:
    for value in ("Error: no", {"error": "boom"}, "Traceback (most recent call last)"):
        assert outcome_of_value(value)[0] is ToolStatus.OK


def test_a_reader_that_fails_is_the_authors_mistake() -> None:
    def failing(text: str) -> ToolStatus:
        raise ValueError(text)

    def lying(_text: str) -> ToolStatus:
        return "ok"  # type: ignore[return-value]

    for reader in (failing, lying):
        with pytest.raises(NotAnAnswer, match="read_status"):
            outcome_of_value("fine", reader)


def test_an_answer_that_is_no_json_is_the_authors_mistake() -> None:
    with pytest.raises(NotAnAnswer):
        outcome_of_value(object())
    assert outcome_of_error(NotAnAnswer("x"))[0] is ToolStatus.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadArguments("no tool"), ToolStatus.MALFORMED),
        (ToolFault("no such city"), ToolStatus.ERROR),
        (ValueError("negative"), ToolStatus.ERROR),
        (ZeroDivisionError("division by zero"), ToolStatus.ERROR),
        (ToolTimeout("too slow"), ToolStatus.TIMEOUT),
        (StillRunning("no end"), ToolStatus.TIMEOUT),
        (InfrastructureFailure("disk full"), ToolStatus.INFRASTRUCTURE),
        (RuntimeError("a bug"), ToolStatus.INFRASTRUCTURE),
        (KeyError("a bug"), ToolStatus.INFRASTRUCTURE),
        (ConnectionResetError("upstream"), ToolStatus.INFRASTRUCTURE),
        (TimeoutError("upstream"), ToolStatus.INFRASTRUCTURE),
    ],
)
def test_blame_decides_the_status(error: Exception, status: ToolStatus) -> None:
    assert outcome_of_error(error)[0] is status


def test_the_model_sees_what_it_did_wrong() -> None:
    assert outcome_of_error(ToolFault("no such city"))[1] == "Error: no such city"
    assert outcome_of_error(ValueError())[1] == "Error: ValueError"


@pytest.mark.parametrize("value", [1, 0.5, True, Fraction(1, 2)])
def test_a_number_is_a_reward(value: Any) -> None:
    assert graded(value).reward == float(value)


def test_a_mapping_is_a_reward_and_scores() -> None:
    result = graded({"reward": 1, "called": True})
    assert (result.reward, result.scores, result.failure) == (1.0, {"called": 1.0}, None)


@pytest.mark.parametrize(
    "value",
    [None, "1.0", float("nan"), float("inf"), [1.0], {}, {"score": 1.0}, {"reward": "1"}, 1j,
     {"reward": 1.0, "called": float("nan")}, 10**400],
)  # fmt: skip
def test_what_is_no_finite_number_is_no_reward(value: Any) -> None:
    with pytest.raises(NotAnAnswer):
        graded(value)


def test_a_failure_never_carries_a_reward() -> None:
    result = not_graded(RuntimeError("judge is down"))
    assert (result.reward, result.failure) == (None, FailureKind.GRADER)
    assert result.detail == "RuntimeError: judge is down"
    assert not_opened(KeyError("question")).failure is FailureKind.ENVIRONMENT


def test_an_error_that_cannot_say_what_it_is_is_an_outcome_all_the_same() -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise RuntimeError

    status, content = outcome_of_error(Mute())
    assert status is ToolStatus.ERROR
    assert "could not be made" in content
    assert "could not be made" in not_graded(Mute()).detail


def test_a_long_prompt_is_never_cut() -> None:
    prompt = "x" * (CONTENT_MAX_CHARS + 1)
    assert prompt_of(prompt)[0].content == prompt


def test_a_prompt_is_text_or_messages() -> None:
    message = ChatMessage(role="user", content="hi")
    assert prompt_of("hi") == [message] == prompt_of([message])
    for wrong in (None, [], ["hi"], 5):
        with pytest.raises(NotAnAnswer):
            prompt_of(wrong)
