"""Worked examples, by environment: earlier turns that show a model how to call the tool."""

from collections.abc import Sequence

from common.messages.tools import ChatMessage

Example = Sequence[ChatMessage]


def _example(question: str, call: str, result: str, answer: str) -> Example:
    return (
        ChatMessage(role="user", content=question),
        ChatMessage(role="assistant", content=f"<tool>{call}</tool>"),
        ChatMessage(role="user", content=f"<result>{result}</result>"),
        ChatMessage(role="assistant", content=f"<answer>{answer}</answer>"),
    )


EXAMPLES: dict[str, Sequence[Example]] = {
    "calculator": (
        _example("What is 58 + 24?", "58 + 24", "82", "82"),
        _example("What is 91 - 36?", "91 - 36", "55", "55"),
        _example("What is 23 * 17?", "23 * 17", "391", "391"),
    ),
    "python": (
        _example("What is 12 + 30?", "print(12+30)", "42", "42"),
        _example("What is 7 * 8?", "print(7*8)", "56", "56"),
        _example("What is 95 - 18?", "print(95-18)", "77", "77"),
    ),
}
