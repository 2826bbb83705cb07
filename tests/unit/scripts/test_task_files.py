"""The shipped task files: rows that the environments take, right answers, nothing seen before."""

import json
import math
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from scripts.make_tasks import FAMILIES, Problem, Split, distinct, problems, rows_of, split_of
from services.tools.builtin.examples import EXAMPLES

FILES = {"demo": Path("configs/demo/tasks.jsonl"), "smollm2": Path("configs/smollm2/tasks.jsonl")}


def rows(family: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILES[family].read_text().splitlines()]


def recomputed(question: str) -> int:
    """The answer, worked out from the question's words alone."""
    numbers = [int(digits) for digits in re.findall(r"\d+", question)]
    signs = re.findall(r"[-+*]", question)
    if signs:
        value = numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            value = {"+": value + number, "-": value - number, "*": value * number}[sign]
        return value
    match re.findall(
        r"plus|add|sum|minus|subtract|difference|times|multiply|product", question.lower()
    ):
        case ["plus" | "add" | "sum"]:
            return sum(numbers)
        case ["minus" | "subtract" | "difference"]:
            return max(numbers) - min(numbers)
        case word:
            assert word
            return math.prod(numbers)


@pytest.mark.parametrize("family", FILES)
def test_every_answer_is_right(family: str) -> None:
    assert all(int(row["answer"]) == recomputed(row["question"]) for row in rows(family))


@pytest.mark.parametrize("family", FILES)
def test_no_two_tasks_share_an_id_or_a_question(family: str) -> None:
    found = rows(family)
    assert len({row["task_id"] for row in found}) == len(found)
    assert len({row["question"] for row in found}) == len(found)


@pytest.mark.parametrize("family", FILES)
def test_every_task_is_one_that_the_warm_start_never_saw(family: str) -> None:
    assert {split_of(row["question"]) for row in rows(family)} == {Split.TRAINING}


@pytest.mark.parametrize("family", FILES)
def test_every_task_asks_for_examples_that_exist(family: str) -> None:
    assert all(0 <= row["shots"] <= len(EXAMPLES[row["environment"]]) for row in rows(family))


@pytest.mark.parametrize("family", FILES)
def test_a_task_file_is_what_its_seed_makes(family: str) -> None:
    found = rows(family)
    made = rows_of(family, distinct(FAMILIES[family], Split.TRAINING, 20, 0))
    assert [vars(row) for row in made] == found[:20]


def test_the_demo_needs_both_tools() -> None:
    share = sum(row["environment"] == "python" for row in rows("demo")) / len(rows("demo"))
    assert 0.25 < share < 0.35


def test_problems_stay_in_their_split() -> None:
    stream = problems(FAMILIES["demo"], Split.HELD_OUT, random.Random(3))
    assert {split_of(problem.question) for problem in islice(stream, 50)} == {Split.HELD_OUT}


def test_too_few_questions_are_said_and_not_waited_for() -> None:
    with pytest.raises(SystemExit, match="fewer than 9 distinct"):
        distinct(one_problem, Split.TRAINING, 9, 0)


def one_problem(_: random.Random) -> Problem:
    return Problem("calculator", "48*5=?", "48*5", 240)
