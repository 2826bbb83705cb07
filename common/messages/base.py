"""What a message is: a frozen pydantic model with a registered kind and msgpack-native fields."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Strict

PROTOCOL_VERSION = 1
"""Raised with every change of a message's shape; peers with another one are refused."""

E = TypeVar("E", bound=StrEnum)

Wire = Annotated[E, Strict(strict=False)]
"""An enum field: it travels as its string. `status: Wire[ToolStatus]`."""


class Message(BaseModel):
    """A value that travels. Fields are int, float, str, bytes, bool, list, dict or messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


R = TypeVar("R", bound=Message)

REQUESTS: dict[str, type["Request[Any]"]] = {}
"""Every request type by kind, for decoding. Filled as the message modules are imported."""


class Request(Message, Generic[R]):
    """A message that is answered by one `R`, or refused."""

    reply_type: ClassVar[type[Message]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "[" in cls.__name__:  # `Request[Reply]` itself is also a subclass.
            arguments = get_args(cls) or cls.__pydantic_generic_metadata__["args"]
            cls.reply_type = arguments[0]
            return
        assert cls.__name__ not in REQUESTS, f"two requests named {cls.__name__}"
        REQUESTS[cls.__name__] = cls
