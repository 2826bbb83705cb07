"""What the two built-in environments share: questions with a number for an answer.

A task's row has `question`, `answer` and, if wanted, `shots`: how many worked examples stand before
the question. The answer is the last `<answer>…</answer>` of the final action.
"""

import math
import re
from typing import Any, ClassVar

from services.tools.builtin.examples import EXAMPLES
from services.tools.sdk import ChatMessage, Environment, Transcript

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d{1,400}")
ANSWER_MAX_CHARS = 400
RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9


class ArithmeticEnvironment(Environment):
    """A question, worked examples before it, and a number to compare with."""

    shots_from: ClassVar[str]
    """Whose worked examples these are: a key of `EXAMPLES`."""

    def __init__(self) -> None:
        self.answer = ""
        self.calls = 0

    async def reset(self, task: dict[str, Any]) -> list[ChatMessage]:
        """Worked examples, then the question."""
        self.answer = str(task["answer"])
        if number_in(self.answer) is None:
            raise ValueError(f"the task's answer {self.answer!r} is not a number")
        question = ChatMessage(role="user", content=str(task["question"]))
        return [*worked_examples(self.shots_from, int(task.get("shots", 0))), question]

    async def grade(self, trajectory: Transcript) -> dict[str, float]:
        """1 for the right number, else 0; and whether a tool was called at all."""
        given = answer_in(trajectory.final_action)
        correct = float(given is not None and same_number(given, self.answer))
        return {"reward": correct, "correct": correct, "called": float(self.calls > 0)}


def worked_examples(environment: str, shots: int) -> list[ChatMessage]:
    """The first `shots` worked examples as turns of an earlier conversation."""
    examples = EXAMPLES[environment]
    if not 0 <= shots <= len(examples):
        raise ValueError(f"shots is {shots}; there are {len(examples)} worked examples")
    return [message for example in examples[:shots] for message in example]


def answer_in(action: str) -> str | None:
    """The last answer in a text."""
    answers = _ANSWER.findall(action)
    return answers[-1] if answers else None


def same_number(given: str, expected: str) -> bool:
    """Whether two texts are the same number: exactly for integers, else within a tolerance."""
    a, b = number_in(given), number_in(expected)
    if a is None or b is None:
        return False
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    try:
        return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # An integer that no float can hold.
        return False


def number_in(text: str) -> int | float | None:
    """A text as a number; `1,234` and `$12` count, words do not."""
    text = text.strip().replace(",", "").removeprefix("$").removesuffix(".")
    if len(text) > ANSWER_MAX_CHARS:
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
