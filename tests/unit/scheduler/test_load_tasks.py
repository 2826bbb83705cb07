"""Reading tasks: every bad row is named with its line and a remedy."""

from collections import Counter
from pathlib import Path

import pytest

from common.config import TasksConfig
from common.errors import ConfigError
from services.scheduler.tasks import PROBLEMS_MAX, TaskOrder, load_tasks, trajectory_seed
from tests.support.sim import sim_config

GOOD = '{"task_id": "a", "environment": "calculator", "question": "1+1"}'


def load(directory: Path, content: str, **columns: str):  # noqa: ANN201
    path = directory / "tasks.jsonl"
    path.write_text(content)
    return load_tasks(sim_config(tasks=TasksConfig.model_validate({"path": str(path), **columns})))


def problems(directory: Path, content: str, **columns: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(directory, content, **columns)
    return list(raised.value.problems)


def test_rows_become_tasks_with_their_json_as_written(tmp_path: Path) -> None:
    tasks = load(tmp_path, GOOD + "\n\n" + GOOD.replace('"a"', "7") + "\n")
    assert [(task.task_id, task.environment) for task in tasks] == [
        ("a", "calculator"),
        ("7", "calculator"),
    ]
    assert tasks[0].row == GOOD


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    (task,) = load(tmp_path, '{"id": "x", "env": "e"}', id_column="id", environment_column="env")
    assert (task.task_id, task.environment) == ("x", "e")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a JSON list; write an object"),
        ('"text"', "is a JSON str; write an object"),
        ('{"environment": "e"}', "has no column 'task_id'; add it, or set tasks.id_column"),
        ('{"task_id": "b"}', "has no column 'environment'; add it, or set"),
        ('{"task_id": 1.5, "environment": "e"}', "column 'task_id' must be text"),
        ('{"task_id": true, "environment": "e"}', "column 'task_id' must be text"),
        ('{"task_id": "", "environment": "e"}', "column 'task_id' must be text"),
        ('{"task_id": "b", "environment": null}', "column 'environment' must be the name"),
        (GOOD, "task id 'a' was used in line 1 already; give each row its own id"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_a_remedy(
    tmp_path: Path, row: str, expected: str
) -> None:
    (problem,) = problems(tmp_path, f"{GOOD}\n{row}\n")
    assert problem.startswith(f"{tmp_path / 'tasks.jsonl'}:2: ")
    assert expected in problem


def test_all_bad_rows_are_shown_up_to_a_limit(tmp_path: Path) -> None:
    assert len(problems(tmp_path, "{\n" * 3)) == 3
    many = problems(tmp_path, "{\n" * 1000)
    assert len(many) == PROBLEMS_MAX + 1
    assert "only these are shown" in many[-1]


def test_a_missing_an_empty_and_a_binary_file_say_what_to_do(tmp_path: Path) -> None:
    missing = sim_config(tasks=TasksConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(ConfigError, match=r"cannot be read .*; set tasks\.path"):
        load_tasks(missing)
    assert problems(tmp_path, "\n") == [
        f"{tmp_path / 'tasks.jsonl'}: has no rows; write one JSON object per line"
    ]
    (tmp_path / "tasks.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_tasks(sim_config(tasks=TasksConfig(path=str(tmp_path / "tasks.jsonl"))))


def test_each_epoch_has_every_task_once_in_its_own_order() -> None:
    ids = [f"t{n}" for n in range(50)]
    order = TaskOrder(ids, seed=3, epochs=2)
    places = [order.at(place) for place in range(order.length)]
    assert Counter(places) == Counter((epoch, i) for epoch in (0, 1) for i in ids)
    first, second = places[:50], places[50:]
    assert [i for _, i in first] != [i for _, i in second]
    again = TaskOrder(ids, seed=3, epochs=2)
    assert [again.at(place) for place in reversed(range(100))][::-1] == places
    assert [TaskOrder(ids, seed=4, epochs=1).at(place) for place in range(50)] != first


def test_the_digest_names_the_tasks_and_the_seed_and_not_the_epochs() -> None:
    digest = TaskOrder(["a", "b"], seed=0, epochs=1).digest()
    assert TaskOrder(["a", "b"], seed=0, epochs=5).digest() == digest
    assert TaskOrder(["a", "c"], seed=0, epochs=1).digest() != digest
    assert TaskOrder(["a", "b"], seed=1, epochs=1).digest() != digest


def test_seeds_are_equal_for_the_same_trajectory_and_different_for_siblings() -> None:
    seeds = [trajectory_seed(0, f"t.e0.a0.{n}") for n in range(100)]
    assert len(set(seeds)) == 100
    assert seeds == [trajectory_seed(0, f"t.e0.a0.{n}") for n in range(100)]
    assert all(0 <= seed < 2**31 for seed in seeds)
