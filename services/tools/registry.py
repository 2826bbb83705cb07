"""From a target in the configuration to the environments behind it.

A target is a module name or the path of a Python file. What its author got wrong is said with the
file and line of theirs, never as a traceback of ours.
"""

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from common.errors import ConfigError
from common.service import EXIT_CONFIG, EXIT_OK
from services.tools.sdk import Environment, Tool, tools_of

BUILTIN = "services.tools.builtin"
"""Where those that come along are."""


@dataclass(frozen=True)
class Offer:
    """What one target serves."""

    environments: Mapping[str, type[Environment]]

    @cached_property
    def tools(self) -> Mapping[str, Mapping[str, Tool]]:
        """By environment and tool name."""
        return {name: tools_of(environment) for name, environment in self.environments.items()}


def load_target(target: str) -> Offer:
    """Import a target and find its environments.

    Raises:
        ConfigError: it is not there, fails to import, or serves nothing.
    """
    module = _import(target)
    environments: dict[str, type[Environment]] = {}
    for found in _environments_of(module):
        if other := environments.get(found.name):
            raise ConfigError(
                f"{_where(found)}: environment {found.name!r} is also {other.__name__}; rename one"
            )
        _check(found)
        environments[found.name] = found
    if not environments:
        raise ConfigError(f"{target}: serves no environment; {_advice(module)}")
    offer = Offer(environments)
    assert offer.tools  # Two tools of one name are found now, not at the first call.
    return offer


def _import(target: str) -> ModuleType:
    try:
        return _import_file(Path(target)) if target.endswith(".py") else _import_module(target)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        kind, reason = type(error).__name__, str(error) or "no message"
        where = _raised_at(error, target)
        raise ConfigError(
            f"{where}: tool server {target!r} cannot be imported: {kind}: {reason}"
        ) from error


def _import_module(target: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"tool server {target!r}: there is no Python module {error.name!r}"
            f"{_meant(error.name, target)}; give one that can be imported from here, or the path"
            " of a .py file"
        ) from error


def _meant(missing: str, target: str) -> str:
    """A hint to a neighbour of the missing module, or else to one of ours."""
    package, _, name = missing.rpartition(".")
    if not package:
        package, name = BUILTIN, target.rpartition(".")[2]
    places = getattr(importlib.import_module(package), "__path__", [])
    close = get_close_matches(name, [module.name for module in iter_modules(places)], n=1)
    return f" (did you mean '{package}.{close[0]}'?)" if close else ""


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"tool server {str(path)!r}: there is no such file")
    path = path.resolve()
    if str(path.parent) not in sys.path:  # As for a script: its neighbours can be imported.
        sys.path.insert(0, str(path.parent))
    name = f"tool_server_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Type hints and dataclasses are resolved through it.
    spec.loader.exec_module(module)
    return module


def _environments_of(module: ModuleType) -> list[type[Environment]]:
    """What the module exports: by `__all__`, or else what it defines itself."""
    exported: list[str] | None = getattr(module, "__all__", None)
    return [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Environment)
        and value.name
        and (name in exported if exported is not None else value.__module__ == module.__name__)
    ]


def _check(environment: type[Environment]) -> None:
    for needed in ("reset", "grade"):
        if getattr(environment, needed) is getattr(Environment, needed):
            raise ConfigError(f"{_where(environment)}: {environment.__name__} has no {needed}()")
    if "," in environment.name or environment.name != environment.name.strip():
        raise ConfigError(f"{_where(environment)}: {environment.name!r} is no environment name")


def _advice(module: ModuleType) -> str:
    if any(isinstance(value, Tool) for value in vars(module).values()):
        return "its tools need one: a class Environment with `tools = [...]`, reset() and grade()"
    return "define a subclass of services.tools.sdk.Environment with a `name`"


def _where(environment: type[Environment]) -> str:
    try:
        lines = inspect.getsourcelines(environment)
    except OSError:
        return environment.__module__
    return f"{inspect.getsourcefile(environment)}:{lines[1]}"


def _raised_at(error: BaseException, target: str) -> str:
    """Where the author should look: the deepest frame of the target itself, else of anything."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    if target.endswith(".py"):
        own_files: tuple[str, ...] = (str(Path(target).resolve()),)
    else:
        stem = "/" + target.replace(".", "/")
        own_files = (f"{stem}.py", f"{stem}/__init__.py")
    own = [frame for frame in frames if frame.filename.endswith(own_files)]
    for frame in reversed(own or frames):
        return f"{frame.filename}:{frame.lineno}"
    return target


def main(target: str) -> int:
    """Print what a target serves as one line of JSON, or say on stderr why it serves nothing."""
    try:
        environments = sorted(load_target(target).environments)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    sys.stdout.write(json.dumps({"environments": environments}) + "\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
