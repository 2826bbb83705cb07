"""Which micro-batches of a step are run by whom: the core from the front, replicas from the back.

Pure: no clock, no I/O. What a replica leases and does not return in time is run by the core; each
micro-batch counts once, whatever is lost, late or repeated. The core waits for replicas at most as
long as it would need for their micro-batches itself, once a step.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

NO_LEASE = -1
NEW_RATE_SHARE = 0.5
"""A replica that was never measured is taken to be so fast, as a share of the core."""
FAILED_RATE_SHARE = 0.5
"""What a lease that brought nothing leaves of a replica's rate, so that it is given less…"""
RECOVERY = 1.1
"""…and what each step gives back: who fails always is tried about every seventh step."""
RATE_WEIGHT = 0.5
"""Of the newest measurement."""
LEASE_SHARE = 0.5
"""Of a replica's fair share of what is left: the last leases are small, so all end together."""


@dataclass(frozen=True, slots=True)
class Own:
    """The core runs these now, one on each rank; short of packs, the last ranks run nothing."""

    packs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """The core adds what was returned under this lease."""

    lease: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before a replica returns, but no longer than this."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Every micro-batch counts."""


Decision: TypeAlias = Own | Add | Wait | Done


@dataclass(slots=True)
class Lease:
    """Micro-batches that a replica has."""

    number: int
    slot: str
    packs: tuple[int, ...]
    cost: float
    granted_s: float
    returning: bool = False
    """Its gradient is on its way into the core's hands."""


@dataclass(slots=True)
class Tally:
    """How many micro-batches of a step were run by whom."""

    own: int = 0
    replicas: int = 0
    again: int = 0
    """Of the core's own: those that a replica had, and did not return in time."""


class Leases:
    """Outlives the steps: rates are remembered, and no number is used twice."""

    def __init__(self) -> None:
        self._number = NO_LEASE
        self._rates: dict[str, float] = {}
        self._own_rate = 0.0
        self._costs: Sequence[float] = ()
        self._clear()

    def _clear(self) -> None:
        self._free: list[int] = []
        self._held: dict[int, Lease] = {}
        self._arrived: list[Lease] = []
        self._counted: set[int] = set()
        self._barred: set[str] = set()
        self._asked: set[str] = set()
        self._until_s: float | None = None
        self._closed = True
        self.tally = Tally()

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def begin(self, costs: Sequence[float]) -> None:
        """Open a step with micro-batches of these costs, in any unit."""
        self._clear()
        self._costs = costs
        self._free = list(range(len(costs)))
        self._closed = False
        for slot, rate in self._rates.items():
            self._rates[slot] = max(rate, min(rate * RECOVERY, self._own_rate))

    def end(self) -> None:
        """Void every lease."""
        tally, counted = self.tally, self._counted
        self._clear()
        self.tally, self._counted = tally, counted

    def next(self, now: float, ranks: int) -> Decision:
        """What the core does next. It does an `Own` or `Add` before it asks again."""
        if self._arrived:
            lease = self._arrived.pop(0)
            self._counted.add(lease.number)
            self.tally.replicas += len(lease.packs)
            return Add(lease.number)
        if not self._free and self._held:
            if self._until_s is None:
                cost = sum(lease.cost for lease in self._held.values())
                self._until_s = now + cost / self._own_rate
            if now < self._until_s:
                return Wait(self._until_s)
            self._reclaim(now)
        if not self._free:
            return Done()
        taken, self._free = self._free[:ranks], self._free[ranks:]
        self.tally.own += len(taken)
        return Own(tuple(taken))

    def ran(self, packs: Sequence[int], seconds: float) -> None:
        """The core has run these."""
        if seconds > 0:
            rate = sum(self._costs[pack] for pack in packs) / seconds
            self._own_rate = _smoothed(self._own_rate, rate)

    def _reclaim(self, now: float) -> None:
        """Take back all that replicas have, and lease nothing more in this step."""
        self._closed = True
        for lease in list(self._held.values()):
            self.tally.again += len(lease.packs)
            elapsed_s = max(now - lease.granted_s, 1e-9)
            self._fail(lease, lease.cost / elapsed_s)

    # ── replicas ─────────────────────────────────────────────────────────────────────────────

    def grant(self, slot: str, now: float, *, keep: int = NO_LEASE) -> Lease | None:
        """Lease micro-batches to the replica of a slot; None when there are none for it.

        Whoever asks has nothing at work: what it had is given back, unless it is the lease `keep`,
        whose gradient is on its way.
        """
        self._release(slot, keep)
        self._asked.add(slot)
        if self._closed or not self._free or not self._own_rate or slot in self._barred:
            return None
        left = sum(self._costs[pack] for pack in self._free)
        rate = self._rates.setdefault(slot, NEW_RATE_SHARE * self._own_rate)
        everybody = self._own_rate + sum(self._rates[name] for name in self._asked)
        share = LEASE_SHARE * left * rate / everybody
        taken = [self._free[-1]]
        cost = self._costs[taken[0]]
        if cost * self._own_rate > left * rate:  # The core would be through with all before it.
            return None
        for pack in reversed(self._free[:-1]):
            if cost + self._costs[pack] > share:
                break
            taken.append(pack)
            cost += self._costs[pack]
        self._free = self._free[: -len(taken)]
        self._number += 1
        lease = Lease(self._number, slot, tuple(taken), cost, now)
        self._held[lease.number] = lease
        return lease

    def find(self, number: int, slot: str) -> Lease | None:
        """The lease, while its gradient would count."""
        lease = self._held.get(number)
        return lease if lease and lease.slot == slot else None

    def counts(self, number: int) -> bool:
        """Whether what was returned under the lease is in the sum already."""
        return number in self._counted

    def arrive(self, number: int, now: float) -> bool:
        """The lease's gradient is here and sound; False when it does not count any more."""
        lease = self._held.pop(number, None)
        if lease is None:
            return False
        rate = lease.cost / max(now - lease.granted_s, 1e-9)
        self._rates[lease.slot] = _smoothed(self._rates[lease.slot], rate)
        self._arrived.append(lease)
        return True

    def give_back(self, number: int) -> None:
        """Its gradient could not be had; somebody else runs the micro-batches."""
        if lease := self._held.get(number):
            self._fail(lease, self._rates[lease.slot])

    def refuse(self, number: int) -> None:
        """Its gradient is unsound: the replica gets nothing more in this step."""
        if lease := self._held.get(number):
            self._barred.add(lease.slot)
            self._fail(lease, self._rates[lease.slot])

    def gone(self, slot: str) -> None:
        """The replica is no more. What it has returned may still come to count."""
        self._release(slot, NO_LEASE)

    def _release(self, slot: str, keep: int) -> None:
        for lease in list(self._held.values()):
            if lease.slot == slot and not lease.returning and lease.number != keep:
                self._fail(lease, self._rates[slot])

    def _fail(self, lease: Lease, rate: float) -> None:
        del self._held[lease.number]
        self._rates[lease.slot] = FAILED_RATE_SHARE * min(rate, self._rates[lease.slot])
        for pack in lease.packs:
            insort(self._free, pack)


def _smoothed(rate: float, measured: float) -> float:
    return rate + RATE_WEIGHT * (measured - rate) if rate else measured
