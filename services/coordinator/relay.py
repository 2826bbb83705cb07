"""From whom each host streams a version. Pure.

With three or more hosts a chain costs each link the version once, and all hosts little more than
one: every receiver passes chunks on as they arrive. With fewer a chain saves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CHAIN_MIN = 3
"""Hosts from which on each receives from the one before it."""


@dataclass(frozen=True, slots=True)
class Link:
    """Who fetches a version for a host, and from where, best source first."""

    peer: str
    sources: tuple[str, ...]


def links(receivers: Sequence[tuple[str, str]], source: str) -> list[Link]:
    """Order receivers of different hosts.

    Args:
        receivers: of each host the peer that fetches for it, and the address at which that peer
            passes on what it has (empty when it does not).
        source: address of whoever has all of the version; always the last resort.
    """
    links: list[Link] = []
    before = ""
    chained = len(receivers) >= CHAIN_MIN
    for peer, address in sorted(receivers):
        sources = (before, source) if chained and before else (source,)
        links.append(Link(peer, sources))
        before = address or before
    return links
