"""A tool server for tests: any text scores, and two samples hardly ever score the same."""

from services.tools.sdk import Environment, tool


class Vowels(Environment):
    """Rewards the share of one letter class in what the model wrote."""

    name = "vowels"

    def reset(self, task: dict[str, object]) -> str:
        """The question is the prompt."""
        return str(task["question"])

    @tool
    def shout(self, text: str) -> str:
        """Say it louder.

        Args:
            text: What to say.
        """
        return text.upper()

    def grade(self, trajectory: object) -> float:
        """Share of characters in the first half of the alphabet."""
        text = "".join(turn.action for turn in trajectory.turns)  # type: ignore[attr-defined]
        low = sum(character.lower() < "n" for character in text)
        return low / max(1, len(text))
