"""From a TOML file and overrides to a checked `Config`, or one error with every problem.

Each problem is `file:line: key.path: what; remedy`, or `override 'x=y': …`. Nothing is
converted, guessed or read from the environment. Relative paths stay relative to the working
directory of the process.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.config import Config, Section
from common.config_combine import Problem, combination_problems
from common.config_source import Source, read_source
from common.errors import ConfigError
from common.toml_lines import KeyPath

_ABSENT_ON_PURPOSE = ("top_p", "top_k", "min_p")

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "a string of Unicode text",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a configuration.

    Raises:
        ConfigError: one line for each problem.
    """
    source = read_source(path, overrides)
    try:
        config = Config.model_validate(source.data)
    except ValidationError as error:
        raise config_error(source, _value_problems(error)) from error
    if problems := combination_problems(config):
        raise config_error(source, problems)
    return config


def config_error(source: Source, problems: Sequence[Problem]) -> ConfigError:
    """Make one error of all problems, each with the place where it was written."""
    return ConfigError(*(source.describe(problem) for problem in problems))


def _value_problems(error: ValidationError) -> list[Problem]:
    details = error.errors(include_url=False)
    unknown = [d["loc"] for d in details if d["type"] == "extra_forbidden"]
    suggestions = {path: suggestion for path in unknown if (suggestion := _suggest(path))}
    meant = {(*path[:-1], name) for path, name in suggestions.items()}
    return [
        Problem((detail["loc"],), _explain(detail, suggestions))
        for detail in details
        if not (detail["type"] == "missing" and detail["loc"] in meant)
    ]


def _suggest(path: KeyPath) -> str | None:
    """Name the key of the same table that is most like the unknown one."""
    known = list(table_at(path[:-1]).model_fields)
    return next(iter(difflib.get_close_matches(str(path[-1]), known, n=1)), None)


def table_at(path: KeyPath) -> type[Section]:
    """Return the model of the table at a path of `Config`."""
    model: type[Section] = Config
    for part in path:
        if isinstance(part, str):  # An index stays in the model of the entries.
            annotation: Any = model.model_fields[part].annotation
            model = next(iter(get_args(annotation)), annotation)
    return model


def _explain(detail: ErrorDetails, suggestions: Mapping[KeyPath, str]) -> str:
    kind, path, value = detail["type"], detail["loc"], detail["input"]
    if kind == "extra_forbidden":
        return _explain_unknown(path, suggestions.get(path))
    if kind == "missing":
        return "is missing and has no default; add it"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {_show(value)}{_remedy(kind, value)}"
    return _explain_bound(detail)


def _explain_unknown(path: KeyPath, suggestion: str | None) -> str:
    if path[-1] in _ABSENT_ON_PURPOSE:
        return "does not exist on purpose: a cut distribution biases the loss; remove it"
    if suggestion:
        return f"unknown key; did you mean '{suggestion}'?"
    for section in _sections_with(str(path[-1])):
        return f"unknown key here; it belongs into [{section}]"
    return f"unknown key; known here: {', '.join(table_at(path[:-1]).model_fields)}"


def _sections_with(key: str) -> Iterator[str]:
    for name in Config.model_fields:
        if key in table_at((name,)).model_fields:
            yield name


_BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


def _explain_bound(detail: ErrorDetails) -> str:
    """Explain a value of the right type that is not allowed."""
    context: dict[str, Any] = detail.get("ctx", {})
    value, shown = detail["input"], _show(detail["input"])
    match detail["type"]:
        case "literal_error":
            expected = str(context["expected"]).replace("'", '"')
            text = f"got {shown}; write {expected}{did_you_mean(value, expected)}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            ((sign, bound),) = context.items()
            text = f"{value!r} is out of range; use {_BOUNDS[sign]} {bound}"
        case "finite_number":
            text = f"{value!r} is not finite; give a finite number"
        case "string_pattern_mismatch":
            text = (
                f"{shown} cannot name anything; use lower-case letters, digits, - and _, "
                "at most 41, beginning with a letter or digit"
            )
        case "string_too_short" | "too_short" if not value:
            text = "is empty; give it a value or remove the key"
        case _:
            text = f"got {shown}: {detail['msg']}; see docs/CONFIG.md"
    return text


def did_you_mean(value: object, expected: str) -> str:
    """A hint to the closest of the options, which commas (or `or`) part; empty if none is close."""
    options = [word.strip('"') for word in expected.replace(" or ", ", ").split(", ")]
    close = difflib.get_close_matches(str(value), options, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _show(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}" (a string)'
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a table"
    return str(value)


def _remedy(kind: str, value: object) -> str:
    if kind == "string_type":
        return "; put it in quotes"
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return "; write it without quotes"
    if kind in ("list_type", "tuple_type"):
        return "; write [ … ], or [[table]] for a list of tables"
    if kind.startswith("model"):
        return "; write [section], or [[section]] for an entry of a list"
    return "; write the value in that form"
