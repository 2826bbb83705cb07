"""Everything that can be known to be wrong before a process starts."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config import Config
from common.config_check import check_config
from common.config_combine import Problem
from common.config_load import load_config
from common.config_source import Source, read_source
from common.errors import ConfigError
from common.toml_lines import KeyPath
from services.rollout.parsers import PARSERS
from services.rollout.render import Renderer
from services.rollout.tokenizer import load_tokenizer
from services.scheduler.tasks import load_tasks

_HAS_LINE = re.compile(r"\S+:\d+: ")
IMPORT_TIMEOUT_S = 60.0
"""For the target of a tool server to be imported."""


def check_job(path: Path, overrides: Sequence[str]) -> Config:
    """Load a configuration and check all that it names.

    Raises:
        ConfigError: with every problem found, one line each.
    """
    config = load_config(path, overrides)
    problems: list[str] = []
    environments: set[str] = set()

    def collect(check: Callable[[], object], key: KeyPath = ()) -> None:
        try:
            check()
        except ConfigError as error:
            problems.extend(_located(text, source, key) for text in error.problems)

    source = read_source(path, overrides)
    collect(lambda: check_config(config, path, overrides))
    if not problems:  # Else the model is known to be unusable.
        collect(lambda: _check_template(config))
    for index, server in enumerate(config.tools):
        collect(
            lambda target=server.target: environments.update(environments_of(target)),
            ("tools", index, "target"),
        )
    known = environments if not problems else None
    collect(lambda: _check_tasks(config, known), ("tasks", "path"))
    if problems:
        raise ConfigError(*problems)
    return config


def _located(text: str, source: Source, key: KeyPath) -> str:
    """Say where the job names what is wrong, unless a line of another file is to blame."""
    if not key or _HAS_LINE.match(text):
        return text
    return source.describe(Problem((key,), text))


def environments_of(target: str) -> list[str]:
    """Import a tool server's target in a process of its own and name what it serves.

    Its code is the author's: it may end the process that imports it, or never return.

    Raises:
        ConfigError: it cannot be imported, or serves nothing.
    """
    command = [sys.executable, "-m", "services.tools.registry", target]
    try:
        result = subprocess.run(  # noqa: S603  (our own module)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"tool server {target!r}: its import did not end within {IMPORT_TIMEOUT_S:g} s"
        ) from error
    try:
        return json.loads(result.stdout.splitlines()[-1])["environments"]
    except (IndexError, ValueError, KeyError, TypeError) as error:
        code = result.returncode
        ended = f"tool server {target!r}: its import ended the process with exit code {code}"
        raise ConfigError(*(result.stderr.splitlines() if code == 2 else [ended])) from error


def _check_template(config: Config) -> None:
    """Whether the model's chat template can be used with the tool format."""
    if importlib.util.find_spec("transformers") is None:  # The base install: workers will tell.
        return
    model = config.model.path
    Renderer(load_tokenizer(model), PARSERS[config.rollout.tool_format], model)


def _check_tasks(config: Config, environments: set[str] | None) -> None:
    """Read every row; and, where all tool servers load, that each names an environment."""
    tasks = load_tasks(config)
    groups, step = len(tasks) * config.tasks.epochs, config.training.groups_per_step
    if groups < step:
        raise ConfigError(
            f"{config.tasks.path}: {len(tasks)} tasks in {config.tasks.epochs} epochs are not"
            f" enough for one step; lower training.groups_per_step ({step}), or add tasks or"
            " epochs"
        )
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
