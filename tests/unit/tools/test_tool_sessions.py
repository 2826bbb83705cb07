"""The sessions of a server, for any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Refusal, RequestRefused
from services.tools.sessions import CALLS_KEPT, OPEN, Session, Sessions

TTL_S = 10.0
events = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from("abcdef")),
        st.tuples(st.just("touch"), st.sampled_from("abcdef")),
        st.tuples(st.just("close"), st.sampled_from("abcdef")),
        st.tuples(st.just("begin"), st.sampled_from("abcdef")),
        st.tuples(st.just("pass"), st.floats(0, 15)),
    )
)


def session(session_id: str, now_s: float = 0.0, environment: str = "e") -> Session[None, str]:
    return Session(session_id, environment, TTL_S, now_s, None)


@given(events, st.integers(1, 4))
def test_no_order_of_events_exceeds_the_capacity_or_keeps_a_lapsed_session(
    script: list[tuple[str, str | float]], capacity: int
) -> None:
    sessions: Sessions[None, str] = Sessions(capacity)
    model: dict[str, float] = {}
    running: set[str] = set()
    now_s = 0.0
    for event, value in script:
        if not isinstance(value, str):
            now_s += value
            lapsed = {entry.session_id for entry in sessions.reap(now_s)}
            expected = {k for k, at in model.items() if now_s - at >= TTL_S and k not in running}
            assert lapsed == expected
            model = {k: at for k, at in model.items() if k not in lapsed}
        elif event == "open":
            if sessions.find(value, "e", now_s):
                model[value] = now_s
            elif len(model) < capacity:
                sessions.add(session(value, now_s))
                model[value] = now_s
            else:
                with pytest.raises(RequestRefused) as full:
                    sessions.add(session(value, now_s))
                assert full.value.refusal is Refusal.OVERLOADED
        elif event == "close":
            assert (sessions.close(value) is not None) == (value in model)
            model.pop(value, None)
            running.discard(value)
        elif value in model:
            entry = sessions.touch(value, now_s)
            model[value] = now_s
            if event == "begin":
                entry.running += 1
                running.add(value)
        else:
            with pytest.raises(RequestRefused) as unknown:
                sessions.touch(value, now_s)
            assert unknown.value.refusal is Refusal.NOT_FOUND
        assert len(sessions) == len(model) <= capacity


def test_one_id_cannot_name_sessions_of_two_environments() -> None:
    sessions: Sessions[None, str] = Sessions(2)
    sessions.add(session("a"))
    with pytest.raises(RequestRefused) as refused:
        sessions.find("a", "other", 0.0)
    assert refused.value.refusal is Refusal.INVALID


def test_only_the_latest_calls_are_kept_but_always_how_it_was_opened() -> None:
    held = session("a")
    held.keep(OPEN, "reply")
    for number in range(CALLS_KEPT + 5):
        held.keep(f"call {number}", "reply")
    assert list(held.replies)[:2] == [OPEN, "call 5"]
    assert len(held.replies) == CALLS_KEPT + 1
