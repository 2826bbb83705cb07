"""What each ending of a call or grader means. Pure: values in, messages out.

Who is to blame decides. What the model caused, the model sees, and the trajectory is graded; what
we caused is a typed failure, and the trajectory is never trained.
"""

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any, cast

from common.messages.tools import ChatMessage, SessionGraded, SessionOpened
from common.trajectory import FailureKind, ToolStatus
from services.tools.schema import BadArguments
from services.tools.sdk import EpisodeOver, StatusReader, ToolFault, ToolTimeout
from services.tools.threads import StillRunning

CONTENT_MAX_CHARS = 8000
"""Of what one call returns to the model; about 2,000 tokens. More is cut, with a note."""
ARGUMENTS_MAX_CHARS = 256 * 1024
"""Of one call. Models write large arguments by accident only."""
EMPTY_CONTENT = "(empty)"
MODEL_ERRORS = (ToolFault, ValueError, ArithmeticError)
"""Exceptions of a tool that mean: the model asked for something impossible."""


class NotAnAnswer(Exception):
    """A tool or grader returned something that is no answer. Its author's mistake."""


def outcome_of_value(
    value: Any, read_status: StatusReader | None = None
) -> tuple[ToolStatus, str, bool]:
    """Status, content, and whether the episode is over.

    Raises:
        NotAnAnswer: JSON cannot express the value, or its status cannot be read.
    """
    if isinstance(value, EpisodeOver):
        status, content, _ = outcome_of_value(value.content, read_status)
        return status, content, True
    content = render(value)
    status = ToolStatus.OK if content else ToolStatus.EMPTY
    if read_status is not None:
        status = _read(read_status, content)
    return status, cut(content) or EMPTY_CONTENT, False


def _read(read_status: StatusReader, content: str) -> ToolStatus:
    """Ask the author's reader; its failure is not the model's."""
    try:
        status = read_status(content)
    except Exception as error:
        raise NotAnAnswer(f"read_status failed: {described(error)}") from error
    if not isinstance(status, ToolStatus):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise NotAnAnswer(f"read_status returned {type(status).__name__}, not a ToolStatus")
    return status


def outcome_of_error(error: Exception) -> tuple[ToolStatus, str]:
    """Status and content of a call that raised."""
    match error:
        case BadArguments():
            return ToolStatus.MALFORMED, shown_error(words_of(error))
        case ToolTimeout() | StillRunning():
            return ToolStatus.TIMEOUT, shown_error(words_of(error))
        case _ if isinstance(error, MODEL_ERRORS):
            return ToolStatus.ERROR, shown_error(words_of(error) or type(error).__name__)
        case _:
            return ToolStatus.INFRASTRUCTURE, described(error)


def words_of(error: Exception) -> str:
    """What an error says; the author's class may fail even at that."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return "(its message could not be made)"


def shown_error(message: str) -> str:
    """An error as the model sees it."""
    return cut(f"Error: {message}")


def described(error: Exception) -> str:
    """An error for people: its type and the first of what it says."""
    return cut(f"{type(error).__name__}: {words_of(error)}")[:1000]


def render(value: Any) -> str:
    """A tool's whole answer as text: strings as they are, all else as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAnAnswer(f"{type(value).__name__} is neither text nor JSON ({error})") from error


def cut(text: str) -> str:
    """Bound a text and replace what UTF-8 cannot express."""
    if len(text) > CONTENT_MAX_CHARS:
        text = f"{text[:CONTENT_MAX_CHARS]}\n[{len(text) - CONTENT_MAX_CHARS} characters cut]"
    return text.encode("utf-8", "replace").decode()


def prompt_of(value: Any) -> list[ChatMessage]:
    """What `reset` returned, as messages.

    Raises:
        NotAnAnswer: neither a string nor messages.
    """
    kind = type(value).__name__
    if isinstance(value, str):
        return [ChatMessage(role="user", content=value.encode("utf-8", "replace").decode())]
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if items and all(isinstance(item, ChatMessage) for item in items):
            return items
    raise NotAnAnswer(f"reset() returned {kind}, not a prompt")


def not_opened(error: Exception) -> SessionOpened:
    """The environment could not be reset: never the model's doing."""
    return SessionOpened(
        messages=[], tools=[], failure=FailureKind.ENVIRONMENT, detail=described(error)
    )


def graded(value: Any) -> SessionGraded:
    """A reward from what `grade` returned.

    Raises:
        NotAnAnswer: not a finite number or a mapping of such with a `reward`.
    """
    if not isinstance(value, Mapping):
        return SessionGraded(reward=_number("reward", value))
    scores = {
        str(name): _number(str(name), score)
        for name, score in cast("Mapping[Any, Any]", value).items()
    }
    if "reward" not in scores:
        raise NotAnAnswer(f"grade() returned {', '.join(scores) or 'nothing'}, but no 'reward'")
    return SessionGraded(reward=scores.pop("reward"), scores=scores)


def not_graded(error: Exception) -> SessionGraded:
    """The grader could not be run: a typed failure, never a reward of zero."""
    return SessionGraded(reward=None, failure=FailureKind.GRADER, detail=described(error))


def _number(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise NotAnAnswer(f"{name} is {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise NotAnAnswer(f"{name} is too large") from error
    if not math.isfinite(number):
        raise NotAnAnswer(f"{name} is {number}, not finite")
    return number
