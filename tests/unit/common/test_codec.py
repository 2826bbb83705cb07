from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from common.codec import (
    BUDGET_MAX_S,
    CancelEnvelope,
    RefusalEnvelope,
    ReplyEnvelope,
    RequestEnvelope,
    decode,
    encode_cancel,
    encode_refusal,
    encode_reply,
    encode_request,
    explain,
    pack,
    unpack,
    validate,
)
from common.errors import ProtocolError
from common.messages.base import Message
from common.messages.coordinator import Member, MemberUpdate
from common.messages.scheduler import TrajectoryResult
from common.trajectory import StopReason

call_ids = st.integers(0, 2**63)
texts = st.text(max_size=20)
members = st.builds(
    Member, peer=texts, role=texts, name=texts, address=texts, labels=st.dictionaries(texts, texts)
)
results = st.builds(
    TrajectoryResult,
    stop_reason=st.sampled_from(StopReason),
    reward=st.none() | st.floats(allow_nan=False),
    scores=st.dictionaries(texts, st.floats(allow_nan=False)),
)
messages = st.one_of(
    members, results, st.builds(MemberUpdate, number=call_ids, member=members, gone=st.booleans())
)
budgets = st.floats(0, BUDGET_MAX_S, exclude_min=True)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(call_ids, messages, budgets, texts)
def test_a_request_survives_the_wire(
    call_id: int, message: Message, budget_s: float, key: str
) -> None:
    envelope = decode("p", encode_request(call_id, message, budget_s, key))
    assert isinstance(envelope, RequestEnvelope)
    assert envelope[:4] == (call_id, type(message).__name__, budget_s, key)
    assert validate(type(message), envelope.body) == message


@given(call_ids, messages)
def test_a_reply_survives_the_wire(call_id: int, message: Message) -> None:
    envelope = decode("p", encode_reply(call_id, message))
    assert isinstance(envelope, ReplyEnvelope)
    assert envelope.call_id == call_id
    assert validate(type(message), envelope.body) == message


@given(call_ids, texts, texts)
def test_refusals_and_cancellations_survive_the_wire(call_id: int, code: str, detail: str) -> None:
    refused = decode("p", encode_refusal(call_id, code, detail))
    assert refused == RefusalEnvelope(call_id, code, detail)
    assert decode("p", encode_cancel(call_id)) == CancelEnvelope(call_id)


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(garbage: bytes) -> None:
    with suppress(ProtocolError):
        decode("p", garbage)


@given(plain)
def test_msgpack_that_is_no_envelope_is_a_protocol_error(value: object) -> None:
    try:
        decode("p", pack(value))
    except ProtocolError:
        return
    assert isinstance(value, list)
    assert value[0] in range(4)


@given(messages, st.data())
def test_a_request_with_changed_bytes_is_refused_or_valid(
    message: Message, data: st.DataObject
) -> None:
    encoded = bytearray(encode_request(1, message, 1.0, ""))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError, ValidationError):
        envelope = decode("p", bytes(encoded))
        if isinstance(envelope, RequestEnvelope):
            validate(type(message), envelope.body)


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan"), float("inf"), BUDGET_MAX_S * 2])
def test_a_budget_without_bounds_is_a_protocol_error(budget_s: float) -> None:
    with pytest.raises(ProtocolError, match="budget"):
        decode("p", pack([0, 1, "Kind", budget_s, "", {}]))


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        unpack("p", b"\x91" * 100_000)


def test_what_is_no_message_cannot_travel() -> None:
    with pytest.raises(TypeError, match="object cannot travel"):
        pack([object()])


def test_validation_is_strict_and_names_the_field_but_not_the_value() -> None:
    body = {"peer": 7, "role": "r", "name": "n", "address": "a", "secret": "token"}
    with pytest.raises(ValidationError) as caught:
        validate(Member, body)
    explained = explain(caught.value)
    assert "peer: Input should be a valid string" in explained
    assert "secret: Extra inputs" in explained
    assert "token" not in explained
    with pytest.raises(ValidationError) as caught:
        validate(Member, [])
    assert explain(caught.value).startswith("message: ")
