"""What a tenant of a hybrid slot receives from the coordinator: take the devices, or yield them.

A slot has two tenants, a rollout worker and a trainer replica, both started; exactly one is awake.
Every order carries the slot's fence, a number that grows with each order; a lower one than the
tenant has seen is refused with `STALE_FENCE`, the same one again is answered as the first time.
"""

from common.messages.base import Message, Request


class SlotTaken(Message):
    """The tenant is awake. It is of use once it has applied the newest version."""

    fence: int


class TakeSlot(Request[SlotTaken]):
    """Wake up and hold the slot's devices. The other tenant has yielded them, or is dead."""

    fence: int


class SlotYielded(Message):
    """The tenant is asleep and holds nothing on the devices."""

    fence: int
    drain_s: float
    """Until its work was finished or handed back."""
    release_s: float
    """Until memory was free after that."""


class YieldSlot(Request[SlotYielded]):
    """Hand back all work and free the devices.

    A rollout worker hands its trajectories back at their next turn boundary, a replica returns
    the micro-batches that it has begun. What is not finished by the deadline is given up: it is
    done again elsewhere.
    """

    fence: int
    deadline_s: float
