"""The `calculator` environment: arithmetic on what the model wrote, and nothing else."""

import ast
import math
import operator
from collections.abc import Callable

from services.tools.builtin.arithmetic import ArithmeticEnvironment
from services.tools.sdk import ToolFault, tool

EXPRESSION_MAX_CHARS = 500
NODES_MAX = 200
MAGNITUDE_MAX = 10**100
"""Of every intermediate result, so that none costs more than microseconds."""
EXPONENT_MAX = 400

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_SYMBOLS = str.maketrans({"×": "*", "÷": "/", "\N{MINUS SIGN}": "-", "^": "**"})


class Calculator(ArithmeticEnvironment):
    """Questions that the calculator answers."""

    name = "calculator"
    shots_from = "calculator"

    @tool
    async def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression and return the number.

        Args:
            expression: Numbers with + - * / // % ** and parentheses.
        """
        self.calls += 1
        return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value of an expression, as text.

    Raises:
        ToolFault: not arithmetic, division by zero, or too large.
    """
    if len(expression) > EXPRESSION_MAX_CHARS:
        raise ToolFault(f"the expression is longer than {EXPRESSION_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.translate(_SYMBOLS).strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolFault("not an arithmetic expression") from error
    if sum(1 for _ in ast.walk(tree)) > NODES_MAX:
        raise ToolFault(f"the expression has more than {NODES_MAX} parts")
    try:
        return _text(_value(tree.body))
    except ZeroDivisionError as error:
        raise ToolFault("division by zero") from error
    except OverflowError as error:
        raise ToolFault("the result is too large") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _bounded(_BINARY[type(sign)](_value(left), _value(right)))
        case _:
            raise ToolFault("only numbers, + - * / // % ** and parentheses can be used")


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > EXPONENT_MAX:
        raise ToolFault(f"an exponent is larger than {EXPONENT_MAX}")
    result = base**exponent
    if isinstance(result, complex):
        raise ToolFault("a root of a negative number is not a real number")
    return _bounded(result)


def _bounded(number: Number) -> Number:
    if not math.isfinite(number) or abs(number) > MAGNITUDE_MAX:
        raise ToolFault("a number is too large")
    return number


def _text(number: Number) -> str:
    """Whole numbers without a point; others with as many digits as are sure to be right."""
    if isinstance(number, float):
        if number.is_integer() and abs(number) < 1e15:
            return str(int(number))
        return f"{number:.12g}"
    return str(number)
