"""Who is a member, since when, and which changes others have not seen yet. Pure."""

from dataclasses import dataclass, field, replace

from common.messages.coordinator import Heartbeat, Member, MemberUpdate

UPDATES_KEPT = 512
"""Changes kept for heartbeats; whoever is further behind is sent the whole truth."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One member as last heard."""

    member: Member
    pid: int
    heard_s: float
    version: int
    loop_lag_s: float = 0.0
    busy_s: float = 0.0
    uptime_s: float = 0.0
    fence: int = -1
    awake: bool = True
    """Of a slot's tenant: the newest order that it has followed, and whether it is awake."""


@dataclass
class Members:
    """The membership. Every method takes `now` in seconds; none reads a clock."""

    lease_s: float
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    hidden: set[str] = field(default_factory=set[str])
    """Members that the others are not told of: nothing is sent to them but by this process."""
    number: int = 0
    _updates: list[MemberUpdate] = field(default_factory=list[MemberUpdate])

    def register(
        self,
        member: Member,
        pid: int,
        version: int,
        now: float,
        *,
        fence: int = -1,
        awake: bool = True,
    ) -> list[Member]:
        """Add a member; one of the same role and name is replaced.

        Returns:
            The members that it replaces (its own former incarnations).
        """
        replaced = [
            entry.member
            for entry in self.entries.values()
            if (entry.member.role, entry.member.name) == (member.role, member.name)
            and entry.member.peer != member.peer
        ]
        for old in replaced:
            self._remove(old)
        known = self.entries.get(member.peer)
        self.entries[member.peer] = Entry(member, pid, now, version, fence=fence, awake=awake)
        if known is None or known.member != member:
            self._record(member, gone=False)
        return replaced

    def heartbeat(self, peer: str, beat: Heartbeat, now: float) -> list[MemberUpdate] | None:
        """Renew a lease.

        Returns:
            The changes that the member has not seen, or None if it is no member.
        """
        entry = self.entries.get(peer)
        if entry is None:
            return None
        self.entries[peer] = replace(
            entry,
            heard_s=now,
            version=_version_now(entry, beat),
            loop_lag_s=beat.loop_lag_s,
            busy_s=beat.busy_s,
            uptime_s=beat.uptime_s,
            fence=beat.fence,
            awake=beat.awake,
        )
        return self.updates_after(beat.number)

    def applied(self, peer: str, version: int) -> None:
        """Note the version that a member has acknowledged."""
        entry = self.entries.get(peer)
        if entry is not None:
            self.entries[peer] = replace(entry, version=version)

    def leave(self, peer: str) -> Member | None:
        """Remove a member on purpose. Idempotent."""
        entry = self.entries.get(peer)
        if entry is None:
            return None
        self._remove(entry.member)
        return entry.member

    def expire(self, now: float) -> list[Member]:
        """Remove and return the members whose lease has lapsed."""
        silent = [e.member for e in self.entries.values() if now - e.heard_s > self.lease_s]
        for member in silent:
            self._remove(member)
        return silent

    def hide(self, peer: str) -> None:
        """To the others the member is gone; it stays one, and is told so. Idempotent."""
        entry = self.entries.get(peer)
        if entry is not None and peer not in self.hidden:
            self._record(entry.member, gone=True)
            self.hidden.add(peer)

    def show(self, peer: str) -> None:
        """Undo `hide`. Idempotent."""
        entry = self.entries.get(peer)
        if entry is not None and peer in self.hidden:
            self.hidden.discard(peer)
            self._record(entry.member, gone=False)

    def live(self) -> list[Member]:
        """All members that are not hidden, in order of their identity."""
        return [
            self.entries[peer].member for peer in sorted(self.entries) if peer not in self.hidden
        ]

    def updates_after(self, number: int) -> list[MemberUpdate]:
        """Changes after `number`; the whole membership when they are not all kept."""
        behind = self.number - number
        if 0 <= behind <= len(self._updates):
            return self._updates[len(self._updates) - behind :]
        return [MemberUpdate(number=self.number, member=m, gone=False) for m in self.live()]

    def _remove(self, member: Member) -> None:
        del self.entries[member.peer]
        self._record(member, gone=True)
        self.hidden.discard(member.peer)

    def _record(self, member: Member, *, gone: bool) -> None:
        if member.peer in self.hidden:
            return
        self.number += 1
        self._updates.append(MemberUpdate(number=self.number, member=member, gone=gone))
        del self._updates[:-UPDATES_KEPT]


def _version_now(entry: Entry, beat: Heartbeat) -> int:
    """It may have sent this before it acknowledged; a tenant that has slept has no weights."""
    if beat.awake and beat.fence == entry.fence:
        return max(entry.version, beat.version)
    return beat.version
