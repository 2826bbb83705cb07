"""What a rollout worker receives: trajectories (scheduler) and versions (coordinator)."""

from common.messages.base import Message, Request
from common.messages.coordinator import Manifest


class TrajectoryAssigned(Message):
    """The worker owns the trajectory from now on."""

    holding: int
    """Trajectories that the worker now holds, this one included."""


class AssignTrajectory(Request[TrajectoryAssigned]):
    """Start (or go on with) one trajectory on this worker.

    Sent by the scheduler. Refused with `DRAINING` while the worker hands its trajectories
    back, with `NOT_READY` before its first version is applied, and with `STALE_FENCE` when
    it already holds the trajectory under a newer lease.
    """

    trajectory_id: str
    group_id: str
    """Trajectories of one group share a prompt and are baselined together."""
    lease: int
    """Number of this placement; turns reported under an older one are refused."""
    environment: str
    task: str
    """The task's row as JSON."""
    seed: int
    """Seed of this trajectory's sampling."""
    turn: int
    """Turn to do next; 0 means that nothing is journaled and the prompt is not rendered yet."""
    prompt_tokens: bytes
    """Packed int32; empty when `turn` is 0."""
    later_tokens: list[bytes]
    """Packed int32: action and observation tokens of each journaled turn, alternating."""
    session_id: str
    tool_server: str
    """Name of the server that holds the session; empty before the first turn."""
    kv_source: str = ""
    """Peer of the worker that held it last and may still have its KV cache; empty: recompute."""


class KvChunk(Message):
    """Part of an exported KV cache."""

    payload: bytes
    length: int
    """Bytes in all; 0 when there is none to have."""
    digest: str
    """xxh3 of the whole, in hexadecimal."""
    reason: str
    """Why there is none, or empty."""


class FetchKv(Request[KvChunk]):
    """Read the KV cache of a context from the worker that computed it. Changes nothing.

    Sent by the worker that the trajectory moves to.
    """

    trajectory_id: str
    context: bytes
    """Packed int32: the tokens whose cache is wanted."""
    version: int
    """Policy version that must have computed it."""
    offset: int


class TrajectoryDropped(Message):
    """The worker does not hold the trajectory (any more)."""


class DropTrajectory(Request[TrajectoryDropped]):
    """Stop working on a trajectory and free what it holds. Sent by the scheduler."""

    trajectory_id: str
    lease: int


class VersionFetched(Message):
    """The version lies on the receiver's host, complete and checked."""

    version: int
    streamed_bytes: int
    """0 when it was there already."""
    fetch_s: float


class FetchVersion(Request[VersionFetched]):
    """Bring a version to this host without applying it. Sent by the coordinator.

    Idempotent. Refused with `FAILED` when no source gave bytes that match the manifest in time.
    """

    manifest: Manifest
    sources: list[str]
    """Addresses of stream servers, best first; the last one is the coordinator's."""


class VersionApplied(Message):
    """The engine decodes with the version from the next token on."""

    version: int
    digest: str
    """Of what the receiver itself found in its memory after the swap."""
    apply_s: float
    canary: list[float] = []
    """Log-probabilities of `common.canary.canary_tokens` under the applied weights; empty from
    a replica."""


class ApplyVersion(Request[VersionApplied]):
    """Map the segment, check it, and swap it in between two decode steps.

    Sent by the coordinator to rollout workers and replicas. Idempotent; an older version than the
    applied one is answered with the applied one. Refused with `FAILED` when the bytes do not match
    the manifest.
    """

    manifest: Manifest
    sources: list[str] = []
    """As in `FetchVersion`, for whoever has not fetched it."""
