"""Everything that can be known to be wrong before a process starts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from common.config import Config
from common.config_check import check_config
from common.config_load import load_config
from common.errors import ConfigError
from services.scheduler.tasks import load_tasks
from services.tools.registry import load_target


def check_job(path: Path, overrides: Sequence[str]) -> Config:
    """Load a configuration and check all that it names.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    config = load_config(path, overrides)
    problems: list[str] = []
    environments: set[str] = set()

    def collect(check: Callable[[], object]) -> None:
        try:
            check()
        except ConfigError as error:
            problems.extend(error.problems)

    collect(lambda: check_config(config, path, overrides))
    for server in config.tools:
        collect(lambda target=server.target: environments.update(load_target(target).environments))
    collect(lambda: _check_tasks(config, environments if not problems else None))
    if problems:
        raise ConfigError(*problems)
    return config


def _check_tasks(config: Config, environments: set[str] | None) -> None:
    """Read every row; and, where all tool servers load, that each names an environment."""
    tasks = load_tasks(config)
    if environments is None:
        return
    wanted = {task.environment: task for task in reversed(tasks)}
    missing = [
        f"{config.tasks.path}: task {task.task_id!r} needs environment {name!r}, which no tool"
        f" server has; served: {', '.join(sorted(environments))}"
        for name, task in sorted(wanted.items())
        if name not in environments
    ]
    if missing:
        raise ConfigError(*missing)
