"""Write docs/CONFIG.md from the models in common/config.py."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from common.config import Config, Section
from common.config_load import table_at
from common.toml_write import dump

TARGET = Path(__file__).parent.parent / "docs" / "CONFIG.md"

HEAD = """\
# Configuration

<!-- Written by scripts/make_config_doc.py from common/config.py; do not edit. -->

A job is one TOML file. Every key is listed here; any other key, a value of another type and an
impossible combination are refused before anything starts, with file, line and a suggestion.
Environment variables configure nothing. Relative paths are relative to the working directory of
the process, not to the file.

`libra run CONFIG section.key=value …` overrides single keys. Values are TOML; a value that is
none is a string, so `run.name=demo` needs no quotes. Entries of lists are named by index or by
name: `buckets.0.workers=2`, `buckets.short.workers=2`. `libra check CONFIG` validates without
running. The configuration as it was resolved, defaults included, lies in the run directory as
`config.toml`.
"""


def document() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(line for name in Config.model_fields for line in section(name))])


def section(name: str) -> Iterator[str]:
    """Yield the lines of one table's chapter."""
    model, is_list = table_at((name,)), get_origin(Config.model_fields[name].annotation) is list
    yield f"## `{f'[[{name}]]' if is_list else f'[{name}]'}`"
    yield ""
    yield flat(model.__doc__)
    yield ""
    if is_list:
        yield "One table for each; at least one."
        yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{toml(field.default)}`"
        yield f"| `{key}` | {type_of(field)} | {default} | {flat(field.description)} |"
    yield ""


def flat(text: str | None) -> str:
    """Join the lines of a docstring, safe inside a table's cell."""
    return " ".join((text or "").split()).replace("|", "\\|")


def toml(value: Any) -> str:
    """Write one value as it would stand in the file."""
    return dump({"x": value}).removeprefix("x = ").rstrip("\n")


def type_of(field: FieldInfo) -> str:
    """Name the type in words, with its bounds."""
    words = annotation_words(field.annotation)
    bounds = [bound for item in field.metadata for bound in bounds_of(item)]
    return ", ".join([words, *bounds])


def annotation_words(annotation: Any) -> str:
    """Name an annotation as the writer of a TOML file would."""
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{toml(option)}`" for option in get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        inner = {annotation_words(argument) for argument in get_args(annotation)}
        return f"list of {' or '.join(map(plural, sorted(inner)))}"
    if hasattr(annotation, "__metadata__"):
        return annotation_words(get_args(annotation)[0])
    assert not isinstance(annotation, types.UnionType), "optional keys have no TOML value"
    return {bool: "boolean", int: "integer", float: "number", str: "string"}[annotation]


def plural(words: str) -> str:
    """Name several of what `annotation_words` names one of."""
    return f"lists{words.removeprefix('list')}" if words.startswith("list ") else f"{words}s"


def bounds_of(item: Any) -> Iterator[str]:
    """Name the limits that one item of a field's metadata sets; those of every integer not."""
    for attribute, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        limit = getattr(item, attribute, None)
        if limit is not None and limit < 1e6:
            yield f"{sign} {limit}"
    if pattern := getattr(item, "pattern", None):
        yield f"`{pattern}`"


if __name__ == "__main__":
    assert all(issubclass(table_at((name,)), Section) for name in Config.model_fields)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(document())
    sys.stdout.write(f"wrote {TARGET}\n")
