"""What is known of a hybrid slot, what can happen to it, and what is to be done. Values only."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from common.fence import DRAIN_GRACE_S, FREE_LEASES, NO_FENCE, RELEASE_S
from common.weights import NO_VERSION


class Side(StrEnum):
    """Which of the two tenants."""

    ROLLOUT = "rollout"
    TRAIN = "train"

    @property
    def other(self) -> "Side":
        """The opposite one."""
        return Side.TRAIN if self is Side.ROLLOUT else Side.ROLLOUT


class Phase(StrEnum):
    """How far a slot is."""

    IDLE = "idle"
    DRAINING = "draining"
    LOADING = "loading"
    ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take."""

    lease_s: float
    drain_s: float
    """For a tenant to hand back its work."""
    load_s: float
    """For a tenant to wake and to apply the newest version."""

    @property
    def silence_s(self) -> float:
        """A tenant that was unheard for so long holds nothing."""
        return FREE_LEASES * self.lease_s

    @property
    def draining_s(self) -> float:
        """A tenant that keeps its rules has yielded by then, or ended itself."""
        return self.drain_s + DRAIN_GRACE_S + RELEASE_S + self.silence_s


@dataclass(frozen=True, slots=True)
class Tenant:
    """What is known of one tenant. Without a `peer`, nobody has been heard of yet."""

    heard_s: float
    peer: str = ""
    fence: int = NO_FENCE
    awake: bool = False
    version: int = NO_VERSION
    told: int = NO_FENCE
    """Fence of the newest order to take the slot that this incarnation was sent."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of one change of hands, in seconds."""

    drain_s: float = 0.0
    release_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot."""

    name: str
    rollout: Tenant
    train: Tenant
    wanted: Side | None = None
    """None: the split is not decided yet."""
    phase: Phase = Phase.IDLE
    holder: Side = Side.ROLLOUT
    """Who drains, loads or is active; who was it last, when idle."""
    since_s: float = 0.0
    fence: int = 0
    """Of the order that this phase is about."""
    top: int = 0
    """The highest fence that was used, here or by a tenant."""
    refused: int = NO_FENCE
    """The tenant that is awake under this fence, or a lower one, is so no more by an order."""
    sent_s: float = -inf
    """When the order was told last."""
    pending: bool = False
    """It was, and neither answered nor given up since."""
    taken: bool = False
    """The order to take the slot was carried out; the version may be missing."""
    needs: int = NO_VERSION
    """Version that was the newest then."""
    newest: int = NO_VERSION
    evicted: str = ""
    """Peer that did not yield in time; it is heard no more."""
    last: Side | None = None
    """Who was active last."""
    switches: int = 0
    changing: Times = field(default_factory=Times)
    times: Times = field(default_factory=Times)
    """Of the last completed change."""

    def tenant(self, side: Side) -> Tenant:
        """The tenant of a side."""
        return self.rollout if side is Side.ROLLOUT else self.train

    @property
    def side(self) -> Side:
        """Whose the slot is, or is becoming."""
        if self.phase in (Phase.IDLE, Phase.DRAINING):
            return self.wanted or self.holder
        return self.holder


# ── events ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Wanted:
    """The split asks for this side."""

    side: Side


@dataclass(frozen=True, slots=True)
class Heard:
    """What a tenant said of itself last, and when."""

    side: Side
    peer: str
    fence: int
    awake: bool
    version: int
    heard_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """An order was carried out; the times are those of a `SlotYielded`."""

    side: Side
    peer: str
    fence: int
    take: bool
    drain_s: float = 0.0
    release_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Unanswered:
    """An order got no answer, or one that says to try again."""

    fence: int


@dataclass(frozen=True, slots=True)
class Refused:
    """An order is stale to its receiver."""

    fence: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Time has passed; this is the newest version."""

    newest: int


Event = Wanted | Heard | Answered | Unanswered | Refused | Passed

# ── commands ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tell:
    """Send an order to a tenant."""

    side: Side
    peer: str
    fence: int
    take: bool
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Evict:
    """Answer a tenant no more: it must yield by itself, or end."""

    peer: str


@dataclass(frozen=True, slots=True)
class Switched:
    """The slot is active on a side."""

    side: Side
    fence: int
    times: Times


Command = Tell | Evict | Switched


def new_slot(name: str, began_s: float) -> SlotState:
    """A slot of which nothing is known.

    Args:
        name: of the slot.
        began_s: when this coordinator began: who holds the slot may not have found it yet. Minus
            infinity when nobody can hold it, at the start of a run.
    """
    return SlotState(name, Tenant(began_s), Tenant(began_s))
