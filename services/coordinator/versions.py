"""Which version is the newest, where it lies, who is told to apply it, what must stay. Pure.

A version is announced only when its manifest is complete. It reaches another host once, by one
worker there, and then every worker of that host by mapping. Intermediate versions are skipped: a
host fetches, and a worker applies, the newest one that it can get, one at a time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from common.messages.coordinator import Manifest
from common.weights import NO_VERSION
from services.coordinator.relay import Link, links

FAILURES_MAX = 3
"""A worker that failed so many times in a row is not told this version again."""
SEGMENTS_KEPT_MAX = 2
"""Of the trainer's segments; the third is the one that it writes next. Only what is being read
may keep more."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """A process that decodes or computes gradients with versions, as last heard of."""

    peer: str
    version: int = NO_VERSION
    """That it says it has applied."""
    memory: str = ""
    """Label of the memory file system that it sees; empty when it does not say."""
    stream: str = ""
    """Address at which it passes chunks on; empty when it does not."""
    decodes: bool = True
    """A rollout worker, awake; else a replica, whose pause stops no trajectory."""


@dataclass(frozen=True, slots=True)
class Order:
    """A version that a peer was told to fetch or to apply, and has not answered for."""

    manifest: Manifest
    since_s: float
    memory: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have a peer bring a version to its host."""

    link: Link
    manifest: Manifest


@dataclass
class Versions:
    """The newest version and its way to the workers. No method reads a clock."""

    memory: str = ""
    """Label of the memory file system in which the trainer's segments lie."""
    newest: Manifest | None = None
    previous: Manifest | None = None
    """What deltas to the newest are made from, as long as its segment is kept."""
    published: int = 0
    applying: dict[str, Order] = field(default_factory=dict[str, Order])
    fetching: dict[str, Order] = field(default_factory=dict[str, Order])
    failures: dict[str, int] = field(default_factory=dict[str, int])
    judged: dict[str, int] = field(default_factory=dict[str, int])
    """Newest version of each peer that this coordinator has seen proof of. What a worker says by
    itself is no proof, so a restarted coordinator asks everybody once."""
    quarantined: set[str] = field(default_factory=set[str])
    copies: dict[str, Manifest] = field(default_factory=dict[str, Manifest])
    """Newest complete copy on each other host."""

    @property
    def version(self) -> int:
        """Newest complete version, or `NO_VERSION`."""
        return NO_VERSION if self.newest is None else self.newest.version

    def announce(self, manifest: Manifest) -> bool:
        """Make a complete version the newest.

        Returns:
            False when it is not newer than the announced one: nothing changes.
        """
        if manifest.version <= self.version:
            return False
        self.previous, self.newest = self.newest, manifest
        self.published += 1
        self.failures.clear()  # What failed may have been the version, not the worker.
        return True

    # ── who is told what ─────────────────────────────────────────────────────────────────────

    def fetches(self, receivers: Collection[Receiver], source: str, now: float) -> list[Fetch]:
        """Name a peer of each other host that lacks the newest version, and its sources.

        Args:
            receivers: all live ones.
            source: address of this process's stream server; empty when it has none.
            now: seconds; noted as the start of each order.
        """
        if self.newest is None or not source:
            return []
        busy = {order.memory for order in self.fetching.values()}
        chosen: dict[str, Receiver] = {}
        for receiver in sorted(receivers, key=lambda r: (self.failures.get(r.peer, 0), r.peer)):
            host = receiver.memory
            lacks = self._copy_at(host) is not self.newest
            able = self.failures.get(receiver.peer, 0) < FAILURES_MAX
            if lacks and able and host not in busy:
                chosen.setdefault(host, receiver)
        due = links([(r.peer, r.stream) for r in chosen.values()], source)
        for host, receiver in chosen.items():
            self.fetching[receiver.peer] = Order(self.newest, now, host)
        return [Fetch(link, self.newest) for link in due]

    def orders(
        self,
        receivers: Collection[Receiver],
        now: float,
        *,
        share_min: float,
        patience_s: float,
    ) -> list[tuple[str, Manifest]]:
        """Name those to be told to apply now, and what. Each is told one version at a time.

        Args:
            receivers: all live ones.
            now: seconds; noted as the start of each order.
            share_min: of the workers that decode, so many go on while others swap.
            patience_s: one that takes longer to swap holds up nobody any more.
        """
        places = self._places(receivers, now, share_min, patience_s)
        told: list[tuple[str, Manifest]] = []
        for receiver in sorted(receivers, key=lambda r: (self._judged(r), r.peer)):
            manifest = self._due(receiver)
            if manifest is None:
                continue
            if self._counts(receiver):
                if places <= 0:
                    continue
                places -= 1
            self.applying[receiver.peer] = Order(manifest, now, receiver.memory)
            told.append((receiver.peer, manifest))
        return told

    def _places(
        self, receivers: Collection[Receiver], now: float, share_min: float, patience_s: float
    ) -> int:
        decoding = [receiver.peer for receiver in receivers if self._counts(receiver)]
        most = max(1, int((1 - share_min) * len(decoding) + 1e-9))
        orders = [self.applying[peer] for peer in decoding if peer in self.applying]
        return most - sum(now - order.since_s <= patience_s for order in orders)

    def _counts(self, receiver: Receiver) -> bool:
        """Whether trajectories stand still when it swaps."""
        return (
            receiver.decodes
            and receiver.version != NO_VERSION
            and receiver.peer not in self.quarantined
        )

    def _due(self, receiver: Receiver) -> Manifest | None:
        manifest = self._copy_at(receiver.memory)
        if (
            manifest is None
            or receiver.peer in self.applying
            or self._judged(receiver) >= manifest.version
            or self.failures.get(receiver.peer, 0) >= FAILURES_MAX
        ):
            return None
        return manifest

    def _judged(self, receiver: Receiver) -> int:
        return self.judged.get(receiver.peer, NO_VERSION)

    def _copy_at(self, memory: str) -> Manifest | None:
        """Newest version that can be mapped there; whoever does not say where it is will try."""
        if memory in ("", self.memory):
            return self.newest
        return self.copies.get(memory)

    # ── what came of it ──────────────────────────────────────────────────────────────────────

    def fetched(self, peer: str) -> None:
        """The version lies on the peer's host."""
        order = self.fetching.pop(peer, None)
        if order is None:
            return
        held = self.copies.get(order.memory)
        if held is None or held.version < order.manifest.version:
            self.copies[order.memory] = order.manifest

    def fetch_failed(self, peer: str) -> bool:
        """Another worker of its host is asked next; False when its order was void already."""
        if self.fetching.pop(peer, None) is None:
            return False
        self.failures[peer] = self.failures.get(peer, 0) + 1
        return True

    def acknowledged(self, peer: str, version: int) -> bool:
        """The worker decodes with the version, by proof; True when that ends its quarantine."""
        self.applying.pop(peer, None)
        self.failures.pop(peer, None)
        self.judged[peer] = version
        cleared = peer in self.quarantined
        self.quarantined.discard(peer)
        return cleared

    def failed(self, peer: str) -> bool:
        """Note a version that was not applied; True when the worker is not told it again.

        Its older weights stay, and go on to be used as long as they are new enough.
        """
        order = self.applying.pop(peer, None)
        if order is not None and order.manifest is not self._copy_at(order.memory):
            return False  # It may be gone by now, and the worker skips to a newer one.
        self.failures[peer] = self.failures.get(peer, 0) + 1
        return self.failures[peer] >= FAILURES_MAX

    def quarantine(self, peer: str) -> bool:
        """What the worker decodes with is not what it says; True when it is out from now on."""
        self.failed(peer)
        self.judged.pop(peer, None)
        fresh = peer not in self.quarantined
        self.quarantined.add(peer)
        return fresh

    def slept(self, peer: str) -> None:
        """The worker holds no weights any more."""
        self.judged.pop(peer, None)

    def gone(self, peer: str) -> None:
        """Forget a worker that left."""
        for known in (self.applying, self.fetching, self.failures, self.judged):
            known.pop(peer, None)
        self.quarantined.discard(peer)

    def forget_hosts(self, receivers: Mapping[str, Receiver]) -> None:
        """A host without receivers keeps no copy: the last to leave unlinks it."""
        hosts = {receiver.memory for receiver in receivers.values()}
        for memory in [memory for memory in self.copies if memory not in hosts]:
            del self.copies[memory]

    # ── what must stay ───────────────────────────────────────────────────────────────────────

    def readers(self) -> list[Manifest]:
        """Versions whose segment is or may be read at any moment, the newest first."""
        local = [o.manifest for o in self.applying.values() if o.memory in ("", self.memory)]
        read = [*local, *(order.manifest for order in self.fetching.values())]
        if self.newest is not None:
            read.append(self.newest)
        by_version = {manifest.version: manifest for manifest in read}
        return [by_version[version] for version in sorted(by_version, reverse=True)]

    def base(self) -> Manifest | None:
        """What deltas are made from now: the previous version, or nothing.

        It is kept while other hosts have it, and as long as that costs the trainer no segment.
        """
        wanted = self.previous is not None and (
            self.previous in self.copies.values() or bool(self.fetching)
        )
        spare = len({m.segment for m in self.readers()}) < SEGMENTS_KEPT_MAX
        kept = self.previous in self.readers()
        return self.previous if wanted and (spare or kept) else None

    def release(self) -> list[str]:
        """Segments that the trainer may not overwrite; what is not among them is given up."""
        base = self.previous = self.base()
        kept = [*self.readers(), *([base] if base else [])]
        return sorted({manifest.segment for manifest in kept})
