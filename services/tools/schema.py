"""From a typed function with a docstring to the JSON schema of its arguments, and back.

Decides what of a function is understood; an author's omission is reported with file and line.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from common.errors import ConfigError

_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?|Source):")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
PROBLEMS_SHOWN = 3
"""Of one call's arguments; more would only fill the model's context."""


class _UntitledSchema(GenerateJsonSchema):
    """Titles repeat the names and cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BadArguments(ValueError):
    """The model's arguments do not fit the tool. The message is written for the model."""


@dataclass(frozen=True)
class Arguments:
    """The parameters of one tool."""

    names: tuple[str, ...]
    model: type[BaseModel]
    """Its fields are the parameters in order, known to JSON by their names."""
    schema: str
    """JSON schema, as JSON."""

    def parse(self, text: str) -> dict[str, Any]:
        """Check the JSON that a model wrote and convert it to the declared types.

        Raises:
            BadArguments: not a JSON object, or not these parameters.
        """
        try:
            raw = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise BadArguments(f"the arguments are not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise BadArguments("the arguments must be a JSON object")
        try:
            checked = self.model.model_validate(raw)
        except ValidationError as error:
            raise BadArguments(_explain(error, self.names)) from error
        return {name: getattr(checked, _field(i)) for i, name in enumerate(self.names)}


def name_of(function: Callable[..., Any]) -> str:
    """The name under which the model calls the function."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        _refuse(function, "a tool must be a named function, written with def")
    return name


def summary_of(function: Callable[..., Any]) -> str:
    """The docstring up to its first section."""
    lines: list[str] = []
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        if _SECTION.match(line):
            break
        lines.append(line)
    summary = "\n".join(lines).strip()
    if not summary:
        _refuse(function, "has no docstring; say in one sentence what the tool does, for the model")
    return summary


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """The parameters, from type hints, defaults and the `Args:` section.

    Raises:
        ConfigError: a parameter has no type hint, or none that JSON can fill.
    """
    hints = _hints_of(function)
    described = described_arguments(function.__doc__ or "")
    parameters = dict(inspect.signature(function).parameters)
    if next(iter(parameters), "") == "self":
        del parameters["self"]
    for name in described:
        if name not in parameters:
            _refuse(function, f"documents {name!r} under Args:, but has no such parameter")
    fields: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        _check_parameter(function, parameter, hints)
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=name, description=described.get(name))
        fields[_field(index)] = (hints[name], field)
    try:
        model = create_model("arguments", __base__=_Arguments, **fields)
        schema = model.model_json_schema(schema_generator=_UntitledSchema)
    except (PydanticUserError, NameError) as error:
        reason = str(error).splitlines()[0]
        _refuse(function, f"has a parameter whose type JSON cannot express ({reason})")
    schema.pop("title", None)
    return Arguments(tuple(parameters), model, json.dumps(schema))


def described_arguments(docstring: str) -> dict[str, str]:
    """The `Args:` section of a Google docstring, by parameter."""
    found: dict[str, str] = {}
    inside, current = False, ""
    for line in inspect.cleandoc(docstring).splitlines():
        if section := _SECTION.match(line):
            inside = section[1] in ("Args", "Arguments")
        elif inside and (entry := _ARGUMENT.match(line.strip())) and _indent(line) <= 4:
            current = entry[1]
            found[current] = entry[2].strip()
        elif inside and current and line.strip():
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found


def location_of(function: Callable[..., Any]) -> str:
    """`file:line` of a function's definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        _refuse(function, f"has a type hint that cannot be resolved ({error})")


def _check_parameter(
    function: Callable[..., Any], parameter: inspect.Parameter, hints: Mapping[str, Any]
) -> None:
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        _refuse(function, f"takes {parameter}; the model passes arguments by name only")
    if name not in hints:
        _refuse(function, f"parameter {name!r} has no type hint; write for example {name}: str")


def _refuse(function: Callable[..., Any], problem: str) -> NoReturn:
    name = getattr(function, "__name__", repr(function))
    raise ConfigError(f"{location_of(function)}: tool {name!r} {problem}")


def _field(index: int) -> str:
    """A name that no attribute of pydantic's has, whatever the author calls the parameter."""
    return f"p{index}"


def _explain(error: ValidationError, known: tuple[str, ...]) -> str:
    lines = [
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_context=False)
    ]
    cut = ["..."] if len(lines) > PROBLEMS_SHOWN else []
    parameters = ", ".join(known) or "none"
    return "; ".join([*lines[:PROBLEMS_SHOWN], *cut]) + f" (the parameters are: {parameters})"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
