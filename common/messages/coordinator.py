"""What the coordinator receives: membership, heartbeats, weight versions."""

from common.messages.base import Message, Request


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
    (comma-separated)."""


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
    """Seconds since it was told to apply a version that it has not yet acknowledged, or 0."""


class Fleet(Message):
    """All members and the newest version."""

    members: list[MemberStatus]
    version: int
    versions_published: int


class GetFleet(Request[Fleet]):
    """Who is there, with which version, how busy. For status and metrics."""
