from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ProtocolError
from common.identity import Identity, new_identity

parts = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True)


@given(parts, parts, parts, parts)
def test_an_identity_survives_its_text(run: str, role: str, name: str, incarnation: str) -> None:
    identity = Identity(run, role, name, incarnation)
    assert Identity.parse(str(identity)) == identity
    assert len(str(identity)) < 250


@given(st.text(max_size=40))
def test_other_texts_are_protocol_errors(text: str) -> None:
    with suppress(ProtocolError):
        assert str(Identity.parse(text)) == text


@pytest.mark.parametrize("text", ["", "a/b/c", "a/b/c/d/e", "a//c/d", "a/b/c/d\n", "a/b/c/ü"])
def test_near_misses_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        Identity.parse(text)


def test_a_restarted_process_is_somebody_else() -> None:
    first, second = new_identity("run", "tools", "python"), new_identity("run", "tools", "python")
    assert first != second
    assert (first.run_id, first.role, first.name) == ("run", "tools", "python")


def test_a_part_that_would_break_the_text_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="a/b"):
        new_identity("a/b", "role", "name")
