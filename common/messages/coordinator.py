"""What the coordinator receives: membership, heartbeats, weight versions, the split of slots."""

from common.messages.base import Message, Request
from common.messages.blob import Blob


class Member(Message):
    """One live process of the run."""

    peer: str
    """Identity on the mesh: run id / role / name / incarnation."""
    role: str
    name: str
    address: str
    """Where its listening socket is bound."""
    labels: dict[str, str] = {}
    """What others choose it by: a rollout worker's `bucket`, a tool server's `environments`
    (comma-separated); of a tenant of a hybrid slot, the `slot`; of whoever reads weights, `memory`
    (which memory file system it sees) and `stream` (where it passes chunks on)."""


class MemberUpdate(Message):
    """One numbered change of the membership."""

    number: int
    member: Member
    gone: bool
    """True when the member left or its lease lapsed."""


class Registered(Message):
    """The sender is a member until its lease lapses."""

    lease_s: float
    number: int
    """Number of the last change that `members` includes."""
    members: list[Member]
    version: int
    """Newest complete policy version, or -1 when none was published yet."""


class Register(Request[Registered]):
    """Become a member. Sent at start and again after every loss of the coordinator.

    Idempotent by identity. A second member of the same role and name replaces the first:
    the first one's process is gone or will be told so at its next heartbeat.
    """

    member: Member
    pid: int
    version: int
    """Version that the sender already has applied, or -1."""
    fence: int = -1
    """Of a slot's tenant: the newest order that it has followed, or -1."""
    awake: bool = True
    """Of a slot's tenant: whether it holds the slot's devices. A tenant starts asleep."""


class HeartbeatAck(Message):
    """The lease is renewed."""

    number: int
    updates: list[MemberUpdate]
    """Changes after the number that the sender had seen, in order."""
    version: int
    """Newest complete policy version, or -1."""


class Heartbeat(Request[HeartbeatAck]):
    """Renew the lease; sent from the event loop, so that a blocked loop loses it.

    Refused with `NOT_FOUND` when the sender is no member (any more): it must register again.
    """

    number: int
    """Last membership change that the sender has seen."""
    loop_lag_s: float
    """How late the sender's event loop ran its last heartbeat."""
    busy_s: float
    """Seconds since start in which the process did its work (decode, train, run tools)."""
    uptime_s: float
    version: int
    """Version that the sender has applied, or -1."""
    fence: int = -1
    awake: bool = True
    """Both as in `Register`: what a lost order or reply leaves unknown, the next beat tells."""


class Left(Message):
    """The sender is no member any more."""


class Leave(Request[Left]):
    """End membership on purpose, without waiting for the lease."""


class TensorSpec(Message):
    """One tensor inside a segment."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """Safetensors dtype: `F32`, `BF16`, `F16`."""
    shape: list[int]
    offset: int
    """First byte, counted from the start of the segment file."""
    length: int
    """Bytes."""


class Manifest(Message):
    """Names, shapes, dtypes and checksums of one version."""

    version: int
    segment: str
    """Path of the segment file: a valid safetensors file on a memory file system."""
    length: int
    """Bytes of the whole file."""
    chunk_bytes: int
    chunks: list[int]
    """xxh3-64 of each chunk of the file."""
    digest: str
    """blake3 over the tensor table and the chunk hashes, in hex. Names the content."""
    tensors: list[TensorSpec]
    canary: list[float] = []
    """Log-probabilities that the trainer computed for `common.canary.canary_tokens`; empty where
    it could not."""

    @property
    def blob(self) -> Blob:
        """The file, without what is in it."""
        return Blob(
            path=self.segment,
            length=self.length,
            chunk_bytes=self.chunk_bytes,
            chunks=self.chunks,
            digest=self.digest,
        )


class VersionAccepted(Message):
    """The version is complete and announced (or was already)."""

    version: int
    digest: str


class PublishVersion(Request[VersionAccepted]):
    """A complete version lies in the segment; hash and announce it. Sent by the trainer.

    Idempotent by version. Refused with `STALE_FENCE` when a newer version is announced, and
    with `INVALID` when the file is not what it says.
    """

    version: int
    segment: str
    """Path of a safetensors file, complete, that stays unchanged until it is released."""
    canary: list[float] = []
    """As in `Manifest`."""


class SegmentsInUse(Message):
    """Which segments may not be overwritten."""

    segments: list[str]


class GetSegmentsInUse(Request[SegmentsInUse]):
    """Ask which segments a worker may still read. Sent by the trainer before it reuses one."""


class MemberStatus(Message):
    """What the coordinator knows of one member."""

    member: Member
    pid: int
    version: int
    loop_lag_s: float
    busy_s: float
    uptime_s: float
    silent_s: float
    """Seconds since its last heartbeat."""
    applying_s: float
    """Seconds since it was told to fetch or apply a version that it has not yet answered for, or
    0."""
    quarantined: bool = False
    """It decodes with other weights than it names; the others are told that it is gone."""


class SlotStatus(Message):
    """Where one hybrid slot stands."""

    slot: str
    side: str
    """`rollout` or `train`: whose it is, or is becoming."""
    phase: str
    """`idle` (nobody holds it), `draining`, `loading` or `active`."""
    phase_s: float
    """Seconds in this phase."""
    fence: int
    switches: int
    """Completed changes of side."""
    drain_s: float
    release_s: float
    load_s: float
    """Of the last completed change, by phase."""


class Fleet(Message):
    """All members and the newest version."""

    members: list[MemberStatus]
    version: int
    versions_published: int
    slots: list[SlotStatus] = []


class GetFleet(Request[Fleet]):
    """Who is there, with which version, how busy. For status and metrics."""


class SplitSet(Message):
    """The coordinator works towards it from now on."""

    train: int
    rollout: int


class SetSplit(Request[SplitSet]):
    """How many hybrid slots train, and how many roll out.

    Sent by the scheduler's planner and by `libra scale`. Level-triggered: the newest order counts;
    the coordinator moves one slot after the other until it holds. Refused with `INVALID` when
    there are not so many hybrid slots, and a planner's with `STALE_FENCE` while an operator's
    order holds.
    """

    train: int
    rollout: int
    """Together: all hybrid slots."""
    by: str
    """`planner` or `operator`."""
    hold_s: float = 0.0
    """So long a planner may not change an operator's order."""
