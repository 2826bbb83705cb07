"""What a fence means: which orders of a slot's coordinator count, and until when. Pure.

Shared by the two ends, so that what one may assume is what the other keeps.
"""

from dataclasses import dataclass
from enum import Enum

NO_FENCE = -1
LAPSE_LEASES = 2.0
"""Without a coordinator for so long, a tenant yields by itself…"""
FREE_LEASES = 3.0
"""…and after so long without a word of it, the coordinator counts it as asleep or dead."""
DRAIN_GRACE_S = 20.0
"""Past its deadline a drain must end; it has given up all work by then."""
RELEASE_S = 60.0
"""Freeing devices is a matter of seconds; a process that cannot must end."""


@dataclass(frozen=True, slots=True)
class Order:
    """Take or yield, by its fence."""

    fence: int
    take: bool


class Verdict(Enum):
    """What an order means to a tenant."""

    NEW = "new"
    SAME = "same"
    """It was followed, or is being followed: answer it again."""
    STALE = "stale"


def judge(seen: Order, order: Order, *, lapsed: bool) -> Verdict:
    """Compare an order with the newest one seen.

    Once a tenant has `lapsed`, which is to yield by itself, a repeated `take` is stale: to answer
    it as before would say what was.
    """
    if order.fence > seen.fence:
        return Verdict.NEW
    if order == seen and not (order.take and lapsed):
        return Verdict.SAME
    return Verdict.STALE
