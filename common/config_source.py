"""What was said and where: the file's data and lines, and the overrides laid over it.

An override is `section.key=value`, the value in TOML, bare strings allowed. Entries of lists
are named by index or by their `name`: `buckets.0.workers=2`, `buckets.short.workers=2`.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from common.config_combine import Problem
from common.errors import ConfigError
from common.toml_lines import KeyPath, locate

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SYNTAX_LINE = re.compile(r" \(at (?:line (?P<line>\d+), column \d+|end of document)\)$")


@dataclass
class Source:
    """A configuration as it was written, before it is checked."""

    path: Path
    data: dict[str, Any]
    """The file's tables with the overrides laid over them."""
    lines: dict[KeyPath, int]
    overrides: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Which override, as written, set a key."""

    def describe(self, problem: Problem) -> str:
        """Write a problem as one line that an editor can jump to."""
        return f"{self._where(problem.keys)}: {_show(problem.keys[0])}: {problem.text}"

    def _where(self, keys: Sequence[KeyPath]) -> str:
        """Say which override is to blame, else the first line that names one of the keys."""
        for key in keys:
            for length in range(len(key), 0, -1):
                if override := self.overrides.get(key[:length]):
                    return f"override '{override}'"
        for key in keys:
            if key in self.lines:
                return f"{self.path}:{self.lines[key]}"
        return self._nearest(keys[0])

    def _nearest(self, key: KeyPath) -> str:
        """Say who named the innermost table around a key that nobody wrote."""
        for length in range(len(key), 0, -1):
            table = key[:length]
            if table in self.lines:
                return f"{self.path}:{self.lines[table]}"
            for path, override in self.overrides.items():
                if path[:length] == table:
                    return f"override '{override}'"
        return f"{self.path}:1"


def read_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Read the file and lay the overrides over it.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or an override names nothing.
    """
    text = _read(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{_syntax_problem(text, str(error))}") from error
    source = Source(path, data, locate(text))
    problems = [problem for text in overrides if (problem := _override(source, text))]
    if problems:
        raise ConfigError(*problems)
    return source


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        problem = f"{path}: no such file; give the path of a TOML configuration"
    except OSError as error:
        reason = error.strerror or str(error)
        problem = f"{path}: cannot be read: {reason}; give the path of a TOML configuration"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = f"{path}:{line}: not UTF-8; save the file as UTF-8 text"
    raise ConfigError(problem)


def _syntax_problem(text: str, message: str) -> str:
    match = _SYNTAX_LINE.search(message)
    assert match is not None, f"tomllib says where it stopped: {message}"
    line = match["line"] or text.rstrip("\n").count("\n") + 1
    what = message[: match.start()]
    return (
        f"{line}: not TOML: {what}; strings need quotes, tables are [section], keys are key = value"
    )


def _override(source: Source, text: str) -> str | None:
    """Set one key; return the problem instead when the override names nothing."""
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not _KEY.fullmatch(key):
        return f"override '{text}': not an assignment; write section.key=value"
    try:
        value = _parse_value(written.strip())
        table, path = _walk(source.data, key.split("."))
    except ValueError as error:
        return f"override '{text}': {error}"
    table[path[-1]] = value
    source.overrides[path] = text
    return None


def _parse_value(text: str) -> Any:
    """Read a TOML value; what is none and does not begin like one is a bare string.

    Raises:
        ValueError: nothing there, or broken quotes or brackets.
    """
    if not text:
        raise ValueError('the value is missing; write "" for an empty string')
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[0] in "\"'[{":
            raise ValueError(f"{text} is no TOML value; close quotes and brackets") from error
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _walk(data: dict[str, Any], names: list[str]) -> tuple[dict[Any, Any], KeyPath]:
    """Find the table that holds the key `names`, making tables on the way.

    Raises:
        ValueError: the way leads through a value that is no table, or to no entry of a list.
    """
    here: Any = data
    path: KeyPath = ()
    for name in names[:-1]:
        if isinstance(here, list):
            index = _entry(cast("list[object]", here), name, path)
            here, path = cast("list[Any]", here)[index], (*path, index)
        else:
            here, path = _table(here, path).setdefault(name, {}), (*path, name)
    if isinstance(here, list):  # The last name is an entry as a whole: `buckets.0={…}`.
        last: str | int = _entry(cast("list[object]", here), names[-1], path)
        return cast("dict[Any, Any]", here), (*path, last)
    return _table(here, path), (*path, names[-1])


def _table(value: object, path: KeyPath) -> dict[Any, Any]:
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value)
    raise ValueError(f"{_show(path)} is a value, not a table; set {_show(path)} itself")


def _entry(entries: list[object], name: str, path: KeyPath) -> int:
    """Find an entry of a list by its index or by its `name`."""
    if name.isdecimal() and int(name) < len(entries):
        return int(name)
    tables = [cast("dict[str, object]", e) if isinstance(e, dict) else {} for e in entries]
    names = [str(table.get("name", index)) for index, table in enumerate(tables)]
    if name in names:
        return names.index(name)
    raise ValueError(f"no entry of {_show(path)} is called {name!r}; there are {', '.join(names)}")


def _show(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
