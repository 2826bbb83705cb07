"""Which version is the newest, who still has to apply it, which segments are in use. Pure.

A version is announced only when its manifest is complete. Intermediate versions are skipped: a
worker is always told to apply the newest one, one at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.messages.coordinator import Manifest
from common.weights import NO_VERSION

FAILURES_MAX = 3
"""A worker that failed to apply so many times in a row is quarantined."""


@dataclass(frozen=True, slots=True)
class Applying:
    """An order that is not acknowledged yet."""

    manifest: Manifest
    since_s: float


@dataclass
class Versions:
    """The newest version and its way to the workers."""

    newest: Manifest | None = None
    published: int = 0
    applying: dict[str, Applying] = field(default_factory=dict[str, Applying])
    failures: dict[str, int] = field(default_factory=dict[str, int])

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
        self.newest = manifest
        self.published += 1
        self.failures.clear()  # What failed may have been the version, not the worker.
        return True

    def orders(self, workers: Mapping[str, int], now: float) -> list[tuple[str, Manifest]]:
        """Name the workers to be told now, and what. Each is told one version at a time.

        Args:
            workers: applied version by peer, of all live rollout workers.
            now: seconds; noted as the start of each order.
        """
        if self.newest is None:
            return []
        due = [
            peer
            for peer in sorted(workers)
            if workers[peer] < self.newest.version
            and peer not in self.applying
            and self.failures.get(peer, 0) < FAILURES_MAX
        ]
        for peer in due:
            self.applying[peer] = Applying(self.newest, now)
        return [(peer, self.newest) for peer in due]

    def acknowledged(self, peer: str) -> None:
        """The worker decodes with the version it was told."""
        self.applying.pop(peer, None)
        self.failures.pop(peer, None)

    def failed(self, peer: str) -> bool:
        """Note a failed order; True when the worker is quarantined from now on."""
        self.applying.pop(peer, None)
        self.failures[peer] = self.failures.get(peer, 0) + 1
        return self.failures[peer] >= FAILURES_MAX

    def gone(self, peer: str) -> None:
        """Forget a worker that left."""
        self.applying.pop(peer, None)
        self.failures.pop(peer, None)

    def segments_in_use(self) -> list[str]:
        """Segments that may be read at any moment: the newest, and those being applied."""
        manifests = [applying.manifest for applying in self.applying.values()]
        if self.newest is not None:
            manifests.append(self.newest)
        return sorted({manifest.segment for manifest in manifests})
