"""The calculator with a slow tool and a slow grader: trajectories are in mid-life for a while."""

import asyncio

from services.tools.builtin.arithmetic import ArithmeticEnvironment
from services.tools.builtin.calculator import evaluate
from services.tools.sdk import Transcript, tool

CALL_S = 1.0
GRADE_S = 1.0


class SlowCalculator(ArithmeticEnvironment):
    """Questions that the calculator answers, in its own time."""

    name = "calculator"
    shots_from = "calculator"

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression and return the number.

        Args:
            expression: Numbers with + - * / // % ** and parentheses.
        """
        self.calls += 1
        await asyncio.sleep(CALL_S)
        return evaluate(expression)

    async def grade(self, trajectory: Transcript) -> dict[str, float]:
        """The reward, after some thought."""
        await asyncio.sleep(GRADE_S)
        return await super().grade(trajectory)
