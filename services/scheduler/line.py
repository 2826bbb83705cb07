"""Groups in the order in which they must be trained at the latest, kept sorted as they change."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.state import Group, LineKey


def key_of(group: Group) -> LineKey:
    """Taken groups first, then those with the oldest weights, then those admitted first."""
    return (not group.taken, group.oldest_step, group.row.admission)


class Line:
    """A sorted set of groups. No two have the same key, because admissions are numbered."""

    def __init__(self) -> None:
        self._keys: list[LineKey] = []
        self._groups: dict[LineKey, Group] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Group]:
        """In order. Take a list of it before changing anything on the way."""
        return map(self._groups.__getitem__, self._keys)

    def add(self, group: Group) -> None:
        """Put a group in its place; fine when it is there already."""
        if group.key not in self._groups:
            insort(self._keys, group.key)
            self._groups[group.key] = group

    def discard(self, group: Group) -> None:
        """Take a group out; fine when it is not there."""
        if self._groups.pop(group.key, None) is not None:
            del self._keys[bisect_left(self._keys, group.key)]

    def rank(self, group: Group) -> int:
        """Its place in the line, from 1."""
        return bisect_left(self._keys, group.key) + 1
