"""What the trainer receives: questions about where it stands, and the replicas' share of steps."""

from common.messages.base import Message, Request
from common.messages.blob import Blob


class TrainerStatus(Message):
    """Where the training loop is."""

    step: int
    phase: str
    """`loading`, `waiting`, `training`, `publishing` or `stopping`."""
    phase_s: float
    """Seconds in this phase."""


class GetTrainerStatus(Request[TrainerStatus]):
    """Read-only."""


class SequenceData(Message):
    """One training sequence; the packed arrays are little-endian."""

    tokens: bytes
    """int32."""
    actions: bytes
    """int32: positions in `tokens` that the policy sampled."""
    behaviour: bytes
    """float32: log-probability of each action token under the policy that sampled it."""
    advantage: float
    weight: float
    """Of each action token in the loss; the true totals of the whole batch are in it."""
    prompt: int
    """Leading tokens that precede the first turn."""


class PackData(Message):
    """One micro-batch."""

    members: list[int]
    """Indices into the offer's sequences."""
    shared: int
    """Leading tokens that all members have in common and that are run once."""


class WorkOffer(Message):
    """Micro-batches of the current step, or none for now."""

    lease: int
    """Number of this lease, never used twice; -1: nothing to do, ask again."""
    step: int
    version: int
    """Policy version whose weights they must be computed with."""
    sequences: list[SequenceData]
    packs: list[PackData]


class LeaseWork(Request[WorkOffer]):
    """Ask for micro-batches. Sent by an awake replica; answered within a second, also with none."""

    slot: str
    fence: int
    version: int
    """Applied by the replica; work is for this version only."""
    returning: int = -1
    """Lease whose gradient is on its way, or -1; what else the slot had is given back."""


class GradientTaken(Message):
    """The gradient is in the sum, or not needed any more: its memory may be reused."""

    counted: bool


class ReturnGradient(Request[GradientTaken]):
    """The gradient sum of leased micro-batches.

    Refused with `STALE_FENCE` when lease, step, version or fence are not the current ones: the
    core has run these micro-batches itself, or will.
    """

    slot: str
    fence: int
    lease: int
    step: int
    version: int
    blob: Blob
    """The gradient as one flat array over all trainable parameters, in the model's order."""
    dtype: str
    """`F32` or `BF16`."""
    layout: str
    """Digest of the parameters' names and shapes: both sides must mean the same."""
    sources: list[str]
    """Where the blob can be streamed from when its path is not there."""
    tokens: int
    """Action tokens in it."""
    sums: list[float]
    """What the step's metrics are made of, in the order of `services.trainer.pieces.REPORTED`."""
