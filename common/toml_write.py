"""Write plain data as TOML: the resolved configuration in the run directory."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from common.config import Config

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

Table = Mapping[str, Any]


def to_toml(config: Config) -> str:
    """Write every key of a configuration, defaults included; loading it gives an equal one."""
    return dump(config.model_dump(mode="json"))


def dump(data: Table) -> str:
    """Write tables, lists and scalars as TOML. Lists that hold only tables become `[[…]]`."""
    return "\n".join(_table(data, ())).lstrip("\n") + "\n"


def _table(table: Table, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of one table: its own values first, then the tables inside it."""
    for key, value in table.items():
        if not isinstance(value, Mapping) and not _is_table_list(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        inner = (*path, _key(key))
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join(inner)}]"
            yield from _table(cast("Table", value), inner)
        elif _is_table_list(value):
            for entry in value:
                yield f"\n[[{'.'.join(inner)}]]"
                yield from _table(entry, inner)


def _is_table_list(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, Mapping) for entry in cast("list[object]", value))


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case _:
            assert isinstance(value, Sequence), f"no TOML for {type(value).__name__}"
            entries = cast("Sequence[object]", value)
            return f"[{', '.join(_value(entry) for entry in entries)}]"


def _string(text: str) -> str:
    # JSON's escapes are TOML's too, except that TOML wants DEL escaped as well.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)
