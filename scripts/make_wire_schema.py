"""Write the shapes of all messages to tests/tidy/wire_schema.json."""

import importlib
import json
import pkgutil
import sys
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

import common.messages
from common.messages.base import PROTOCOL_VERSION, Message, Request

TARGET = Path(__file__).parent.parent / "tests" / "tidy" / "wire_schema.json"


def message_types() -> list[type[Message]]:
    """Return every message class of `common.messages`, by name."""
    for module in pkgutil.iter_modules(common.messages.__path__):
        importlib.import_module(f"common.messages.{module.name}")
    found = {cls.__name__: cls for cls in _subclasses(Message)}
    return [found[name] for name in sorted(found)]


def _subclasses(cls: type[Message]) -> Iterator[type[Message]]:
    for subclass in cls.__subclasses__():
        # Request and its parametrised forms are no messages; those of tests have other homes.
        in_protocol = subclass.__module__.startswith("common.messages.")
        if in_protocol and subclass is not Request and "[" not in subclass.__name__:
            yield subclass
        yield from _subclasses(subclass)


def schema() -> str:
    """Describe all shapes as JSON, one field a line, so that a change reads well."""
    shapes = {cls.__name__: _shape(cls) for cls in message_types()}
    content = {"protocol_version": PROTOCOL_VERSION, "messages": shapes}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _shape(cls: type[Message]) -> dict[str, str]:
    fields = {
        name: _words(field.annotation) + ("" if field.is_required() else " = …")
        for name, field in cls.model_fields.items()
    }
    if issubclass(cls, Request):
        fields["→"] = cls.reply_type.__name__
    return fields


def _words(annotation: Any) -> str:
    if annotation is types.NoneType:
        return "none"
    if hasattr(annotation, "__metadata__"):
        return _words(get_args(annotation)[0])
    words = [_words(argument) for argument in get_args(annotation)]
    if get_origin(annotation) in (list, dict):
        return f"{get_origin(annotation).__name__}[{', '.join(words)}]"
    if words:
        return " | ".join(words)
    if issubclass(annotation, Enum):
        return f"{annotation.__name__}({', '.join(str(member.value) for member in annotation)})"
    return annotation.__name__


if __name__ == "__main__":
    TARGET.write_text(schema())
    sys.stdout.write(f"wrote {TARGET}\n")
