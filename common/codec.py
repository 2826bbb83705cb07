"""Bytes on the wire: msgpack arrays around the fields of pydantic models.

An envelope is an array whose first item says what it is:

    [REQUEST, call id, kind, budget in seconds, idempotency key or "", {field: value}]
    [REPLY,   call id, {field: value}]
    [REFUSAL, call id, code, detail]
    [CANCEL,  call id]

A model is sent as the map of its fields without a check, because it was checked when it was
made; it is checked in full (strict types, no unknown field) where it arrives.
"""

import threading
from typing import Any, NamedTuple, TypeVar, cast

import msgpack
from pydantic import BaseModel, ValidationError

from common.errors import ProtocolError
from common.messages.base import Message

M = TypeVar("M", bound=Message)

REQUEST, REPLY, REFUSAL, CANCEL = range(4)

BUDGET_MAX_S = 86_400.0
"""A request may be pending for a day at most; also refuses infinity and NaN."""


class RequestEnvelope(NamedTuple):
    """Asks the receiver to do something within `budget_s`."""

    call_id: int
    kind: str
    budget_s: float
    """Time that the sender still waits."""
    key: str
    """Idempotency key; empty when the request has none."""
    body: dict[str, Any]


class ReplyEnvelope(NamedTuple):
    """Answers a request with a message."""

    call_id: int
    body: dict[str, Any]


class RefusalEnvelope(NamedTuple):
    """Answers a request with a `Refusal` code."""

    call_id: int
    code: str
    detail: str


class CancelEnvelope(NamedTuple):
    """Tells that nobody waits for the request any more."""

    call_id: int


Envelope = RequestEnvelope | ReplyEnvelope | RefusalEnvelope | CancelEnvelope


def _fields(value: object) -> dict[str, Any]:
    """Let msgpack pack a nested model as the map of its fields."""
    if isinstance(value, BaseModel):
        return vars(value)
    raise TypeError(f"{type(value).__name__} cannot travel")


class _Local(threading.local):
    """A packer per thread: it keeps its buffer between calls and is not re-entrant."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(default=_fields).pack


_local = _Local()


def encode_request(call_id: int, request: Message, budget_s: float, key: str) -> bytes:
    """Make the envelope of a request; its kind is the name of its class."""
    return _local.pack([REQUEST, call_id, type(request).__name__, budget_s, key, request.__dict__])


def encode_reply(call_id: int, reply: Message) -> bytes:
    """Make the envelope that answers a call."""
    return _local.pack([REPLY, call_id, reply.__dict__])


def encode_refusal(call_id: int, code: str, detail: str) -> bytes:
    """Make the envelope that refuses a call."""
    return _local.pack([REFUSAL, call_id, code, detail])


def encode_cancel(call_id: int) -> bytes:
    """Make the envelope that ends a call whose answer nobody waits for."""
    return _local.pack([CANCEL, call_id])


def decode(peer: str, payload: bytes) -> Envelope:
    """Read an envelope. The body is still an unchecked map.

    Raises:
        ProtocolError: the bytes are no envelope.
    """
    items = unpack(peer, payload)
    if isinstance(items, list) and items:
        head, *rest = cast("list[Any]", items)
        for tag, envelope, types in _SHAPES:
            if head == tag and tuple(map(type, rest)) == types:
                return _checked(peer, envelope(*rest))
    raise ProtocolError(peer, "not an envelope")


def _checked(peer: str, envelope: Any) -> Envelope:
    if type(envelope) is RequestEnvelope and not 0.0 < envelope.budget_s <= BUDGET_MAX_S:
        raise ProtocolError(peer, f"a budget of {envelope.budget_s:g} s")
    return envelope


_SHAPES: tuple[tuple[int, type[Any], tuple[type, ...]], ...] = (
    (REQUEST, RequestEnvelope, (int, str, float, str, dict)),
    (REPLY, ReplyEnvelope, (int, dict)),
    (REFUSAL, RefusalEnvelope, (int, str, str)),
    (CANCEL, CancelEnvelope, (int,)),
)


def pack(value: object) -> bytes:
    """Pack msgpack-native values and messages."""
    return _local.pack(value)


def unpack(peer: str, data: bytes) -> Any:
    """Unpack one value.

    Raises:
        ProtocolError: the bytes are not exactly one msgpack value.
    """
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(peer, f"not msgpack: {error or type(error).__name__}") from None


def validate(message_type: type[M], body: object) -> M:
    """Make the message of an unpacked map: strict types, every field known.

    Raises:
        ValidationError: pydantic's; `explain` makes a line of it.
    """
    return message_type.__pydantic_validator__.validate_python(body)


def explain(error: ValidationError) -> str:
    """Say which fields are wrong, without their values (they may be tokens)."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'message'}: {problem['msg']}"
        for problem in problems
    )
