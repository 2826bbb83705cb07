"""Which sessions are open: never more than the capacity, none for ever, each one once.

Only bookkeeping: what is in a session, and what its replies are, is the caller's.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.errors import Refusal, RequestRefused

S = TypeVar("S")
R = TypeVar("R")

CALLS_KEPT = 64
"""Replies to calls, per session. A caller repeats its latest request only."""
OPEN, GRADE = "open", "grade"
"""Operations that a session has once; their replies are kept for as long as it is open."""


@dataclass
class Session(Generic[S, R]):
    """One open session."""

    session_id: str
    environment: str
    ttl_s: float
    touched_at_s: float
    state: S
    running: int = 0
    """Operations that have begun and not ended; while there are any the session is in use."""
    replies: dict[str, R] = field(default_factory=dict[str, R])
    """By operation, so that a repeated request gets the first one's reply."""

    def keep(self, operation: str, reply: R) -> None:
        """Remember a reply; that of the oldest call makes room."""
        self.replies[operation] = reply
        calls = [name for name in self.replies if name not in (OPEN, GRADE)]
        if len(calls) > CALLS_KEPT:
            del self.replies[calls[0]]

    def forget(self, operation: str, reply: R) -> None:
        """Drop a reply, unless a later one took its place."""
        if self.replies.get(operation) is reply:
            del self.replies[operation]


class Sessions(Generic[S, R]):
    """The open sessions of one server. `now_s` is any clock that does not go back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open: dict[str, Session[S, R]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session_id: str, environment: str, now_s: float) -> Session[S, R] | None:
        """The session that an earlier request with this id opened.

        Raises:
            RequestRefused: INVALID when the id was used for another environment.
        """
        session = self._open.get(session_id)
        if session is None:
            return None
        if session.environment != environment:
            detail = f"session {session_id!r} is of environment {session.environment!r}"
            raise RequestRefused(Refusal.INVALID, detail)
        session.touched_at_s = now_s
        return session

    def check_room(self) -> None:
        """Refuse when one more session would be too many.

        Raises:
            RequestRefused: OVERLOADED at capacity.
        """
        if len(self._open) >= self.capacity:
            raise RequestRefused(Refusal.OVERLOADED, f"{self.capacity} sessions are open")

    def add(self, session: Session[S, R]) -> None:
        """Open a session.

        Raises:
            RequestRefused: OVERLOADED at capacity.
        """
        assert session.session_id not in self._open
        self.check_room()
        self._open[session.session_id] = session

    def touch(self, session_id: str, now_s: float) -> Session[S, R]:
        """A session in use.

        Raises:
            RequestRefused: NOT_FOUND when it was never opened, closed or reaped.
        """
        session = self._open.get(session_id)
        if session is None:
            raise RequestRefused(Refusal.NOT_FOUND, f"session {session_id!r}")
        session.touched_at_s = now_s
        return session

    def close(self, session_id: str) -> Session[S, R] | None:
        """Forget a session; None when there is none."""
        return self._open.pop(session_id, None)

    def reap(self, now_s: float) -> list[Session[S, R]]:
        """Forget the sessions that nothing has touched for their TTL, and return them."""
        lapsed = [
            session
            for session in self._open.values()
            if not session.running and now_s - session.touched_at_s >= session.ttl_s
        ]
        for session in lapsed:
            del self._open[session.session_id]
        return lapsed
