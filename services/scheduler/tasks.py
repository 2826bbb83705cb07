"""The tasks of a run: read from JSONL, every row checked, and their order in each epoch."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from common.config import Config
from common.config_load import did_you_mean
from common.errors import ConfigError

PROBLEMS_MAX = 20
"""A file that is wrong in every row needs one message, not a million."""
ID_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the file."""

    task_id: str
    environment: str
    row: str
    """The row as JSON, as the environment gets it."""


def load_tasks(config: Config) -> list[Task]:
    """Read and check the tasks of a run.

    Raises:
        ConfigError: with one line for each bad row, `file:line: what is wrong; what to do`.
    """
    path = Path(config.tasks.path)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        near = ", ".join(sorted(found.name for found in path.parent.glob("*.jsonl")))
        hint = did_you_mean(path.name, near) if near else ""
        raise ConfigError(f"{path}: cannot be read ({reason}){hint}; set tasks.path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 ({error.reason}); convert the file") from error
    tasks: list[Task] = []
    problems: list[str] = []
    lines: dict[str, int] = {}
    for number, line in _rows(content):
        found = _parse(line, config.tasks.id_column, config.tasks.environment_column)
        if isinstance(found, Task) and found.task_id in lines:
            found = (
                f"task id {found.task_id!r} was used in line {lines[found.task_id]} already; "
                "give each row its own id"
            )
        if isinstance(found, Task):
            lines[found.task_id] = number
            tasks.append(found)
        else:
            problems.append(f"{path}:{number}: {found}")
            if len(problems) == PROBLEMS_MAX:
                raise ConfigError(*problems, f"{path}: and maybe more; only these are shown")
    if problems:
        raise ConfigError(*problems)
    if not tasks:
        raise ConfigError(f"{path}: has no rows; write one JSON object per line")
    return tasks


def _rows(content: str) -> Iterator[tuple[int, str]]:
    """Line numbers and lines, without blank ones. Splits at newlines only, as JSONL does."""
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(line: str, id_column: str, environment_column: str) -> Task | str:
    """The task, or what is wrong with the row and what to do."""
    try:
        row = cast("object", json.loads(line))
    except ValueError as error:
        return f"is not JSON ({error}); write one JSON object per line"
    if not isinstance(row, dict):
        return f"is a JSON {type(row).__name__}; write an object"
    values = cast("dict[str, Any]", row)
    for column, key in ((id_column, "id_column"), (environment_column, "environment_column")):
        if column not in values:
            return f"has no column {column!r}; add it, or set tasks.{key} to the right name"
    task_id, environment = values[id_column], values[environment_column]
    if isinstance(task_id, int) and not isinstance(task_id, bool):
        task_id = str(task_id)
    if not isinstance(task_id, str) or not 0 < len(task_id) <= ID_CHARACTERS_MAX:
        return f"column {id_column!r} must be text of 1 to {ID_CHARACTERS_MAX} characters"
    if not isinstance(environment, str) or not environment:
        return f"column {environment_column!r} must be the name of an environment"
    return Task(task_id, environment, line.strip())


class TaskOrder:
    """All tasks of all epochs in the order of admission; the same for the same seed."""

    def __init__(self, task_ids: Sequence[str], *, seed: int, epochs: int) -> None:
        self._task_ids = task_ids
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self.length = len(task_ids) * epochs

    def at(self, place: int) -> tuple[int, str]:
        """Epoch and task id at a place of the whole order."""
        assert 0 <= place < self.length, place
        epoch, within = divmod(place, len(self._task_ids))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = list(range(len(self._task_ids)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return epoch, self._task_ids[self._order[within]]

    def digest(self) -> str:
        """Names the tasks and their order, to notice that a resumed run has others."""
        hasher = blake2b(str(self._seed).encode(), digest_size=16)
        for task_id in self._task_ids:
            hasher.update(b"\0" + task_id.encode())
        return hasher.hexdigest()


def trajectory_seed(run_seed: int, trajectory_id: str) -> int:
    """The sampling seed of one trajectory: a positive int32, different for each sibling."""
    text = f"{run_seed}/{trajectory_id}".encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") >> 1
