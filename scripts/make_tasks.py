"""Makes the task files of the demo: seeded, distinct, and never what the warm start saw.

A row is `{"task_id", "environment", "question", "answer", "shots"}`. `demo` is for the tiny agent,
with a family of questions for each of its tools; `smollm2` is for the real model. Which split a
question belongs to follows from a checksum of its text, so that no two splits can share a
question, whatever the seeds are.

    python scripts/make_tasks.py demo --output configs/demo/tasks.jsonl
    python scripts/make_tasks.py smollm2 --output configs/smollm2/tasks.jsonl --count 400
"""

import argparse
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

PYTHON_SHARE = 0.3
"""Of the demo's tasks. The rest need the calculator."""
WORDED_SHARE = 2 / 3
SPOKEN_SHOTS = 2
"""Fewer and the model never calls the tool; more and prompts grow faster than success."""
DRAWS_MAX = 200
"""Draws per wanted task; past that the family has too few distinct questions."""


class Split(StrEnum):
    """What a question may be used for."""

    WARM_START = "warm_start"
    TRAINING = "training"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Problem:
    """A question, the expression that solves it, and its value."""

    environment: str
    question: str
    expression: str
    answer: int
    shots: int = 0


@dataclass(frozen=True)
class Row:
    """One line of a task file."""

    task_id: str
    environment: str
    question: str
    answer: str
    shots: int


def split_of(question: str) -> Split:
    """The split that owns a question: half warm start, three eighths training, rest held out."""
    eighth = zlib.crc32(question.encode()) % 8
    if eighth < 4:
        return Split.WARM_START
    return Split.TRAINING if eighth < 7 else Split.HELD_OUT


def calculator_problem(rng: random.Random) -> Problem:
    """`37+48=?` and the like. Answers have at most three digits and are never negative."""
    left, right = rng.randint(10, 99), rng.randint(10, 99)
    match rng.choice("+-*3"):
        case "+":
            expression, answer = f"{left}+{right}", left + right
        case "-":
            left, right = max(left, right), min(left, right)
            expression, answer = f"{left}-{right}", left - right
        case "*":
            right = rng.randint(2, 9)
            expression, answer = f"{left}*{right}", left * right
        case _:
            last = rng.randint(2, 9)
            expression, answer = f"{left}+{right}-{last}", left + right - last
    return Problem("calculator", f"{expression}=?", expression, answer)


def python_problem(rng: random.Random) -> Problem:
    """`sum 12 40 7` or `product 12 34`: the question names what the code must do."""
    if rng.random() < 0.5:
        terms = [rng.randint(2, 60) for _ in range(3)]
        question, expression, answer = "sum", "+".join(map(str, terms)), sum(terms)
    else:
        terms = [rng.randint(10, 40), rng.randint(2, 24)]
        question, expression, answer = "product", "*".join(map(str, terms)), terms[0] * terms[1]
    return Problem("python", " ".join([question, *map(str, terms)]), expression, answer)


def demo_problem(rng: random.Random) -> Problem:
    """One problem of the tiny agent's mix."""
    return python_problem(rng) if rng.random() < PYTHON_SHARE else calculator_problem(rng)


WORDINGS = {
    "+": (
        "What is {left} plus {right}?",
        "Add {left} and {right}.",
        "What is the sum of {left} and {right}?",
    ),
    "-": (
        "What is {left} minus {right}?",
        "Subtract {right} from {left}.",
        "What is the difference between {left} and {right}?",
    ),
    "*": (
        "What is {left} times {right}?",
        "Multiply {left} by {right}.",
        "What is the product of {left} and {right}?",
    ),
}
"""Not stories: of those a 135M model solves one in thirty, too few to learn from."""


def spoken_problem(rng: random.Random) -> Problem:
    """For a model that knows English: a third in signs like its worked examples, else in words."""
    left, right = sorted((rng.randint(10, 99), rng.randint(10, 99)), reverse=True)
    sign = rng.choice("+-*")
    answer = {"+": left + right, "-": left - right, "*": left * right}[sign]
    wording = (
        rng.choice(WORDINGS[sign])
        if rng.random() < WORDED_SHARE
        else "What is {left} {sign} {right}?"
    )
    question = wording.format(left=left, right=right, sign=sign)
    return Problem("calculator", question, f"{left} {sign} {right}", answer, SPOKEN_SHOTS)


def problems(
    family: Callable[[random.Random], Problem], split: Split, rng: random.Random
) -> Iterator[Problem]:
    """Endless problems of one family and split; questions may repeat."""
    while True:
        problem = family(rng)
        if split_of(problem.question) is split:
            yield problem


def distinct(
    family: Callable[[random.Random], Problem], split: Split, count: int, seed: int
) -> list[Problem]:
    """`count` problems of which no two ask the same question."""
    found: dict[str, Problem] = {}
    for problem in islice(problems(family, split, random.Random(seed)), count * DRAWS_MAX):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            return list(found.values())
    raise SystemExit(f"the family has fewer than {count} distinct questions")


def rows_of(prefix: str, chosen: list[Problem]) -> Iterator[Row]:
    """Number the problems as rows of a task file."""
    for number, problem in enumerate(chosen):
        yield Row(
            task_id=f"{prefix}-{number:05d}",
            environment=problem.environment,
            question=problem.question,
            answer=str(problem.answer),
            shots=problem.shots,
        )


FAMILIES = {"demo": demo_problem, "smollm2": spoken_problem}


def main() -> None:
    """Write one task file."""
    parser = argparse.ArgumentParser(description="Make a task file.")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--split", type=Split, choices=list(Split), default=Split.TRAINING)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = distinct(FAMILIES[options.family], options.split, options.count, options.seed)
    lines = [json.dumps(asdict(row)) for row in rows_of(options.family, chosen)]
    options.output.write_text("\n".join(lines) + "\n")
    print(f"wrote {len(lines)} tasks to {options.output}")


if __name__ == "__main__":
    main()
