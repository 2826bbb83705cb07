"""Every error that Libra raises on purpose, named after the situation.

LibraError
├── ConfigError (ValueError)      the user's mistake; the process exits with 2
├── TransportError                raised by the mesh, handled by the caller of `request`
│   ├── PeerUnreachable           nothing answers there (any more)
│   ├── RequestTimeout            no reply in time; the peer may still have acted
│   └── ProtocolError             the bytes are not ours: other run, other version, malformed
├── RequestRefused                the handler said no, with a `Refusal` code
├── TrajectoryError               ends one trajectory; recorded as its failure
│   ├── ToolError
│   ├── EngineError
│   └── GradeError
├── WeightError
│   ├── ShardCorrupt              the bytes do not match the manifest
│   ├── VersionGone               the segment was released before it was read
│   └── StreamBroken              no source gave the bytes in time
├── LedgerError                   the ledger file is not usable as it is
└── RunFailed                     the run cannot go on; says why and what to do
"""

from enum import StrEnum
from pathlib import Path


class LibraError(Exception):
    """Base of everything that Libra raises on purpose."""


class ConfigError(LibraError, ValueError):
    """Something the user wrote cannot be used.

    Each problem is one line, `file:line: what is wrong; what to do`, so that an editor can jump
    to it and every problem is shown at once.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TransportError(LibraError):
    """A message could not be exchanged."""


class PeerUnreachable(TransportError, ConnectionError):
    """Nothing answers under this identity, or its connection was lost."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer!r} is unreachable: {reason}")
        self.peer, self.reason = peer, reason


class RequestTimeout(TransportError, TimeoutError):
    """The peer did not reply in time; it may still have acted."""

    def __init__(self, peer: str, kind: str, timeout_s: float) -> None:
        super().__init__(f"{peer!r} did not reply to {kind} within {timeout_s:g} s")
        self.peer, self.kind, self.timeout_s = peer, kind, timeout_s


class ProtocolError(TransportError):
    """Bytes from a peer are not a message of this run and protocol version."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"message of {peer!r} cannot be understood: {reason}")
        self.peer, self.reason = peer, reason


class Refusal(StrEnum):
    """Why a handler refused a request."""

    OVERLOADED = "overloaded"
    """No capacity now; ask again later."""
    DRAINING = "draining"
    """The process hands its work back and takes none."""
    STALE_FENCE = "stale_fence"
    """A newer order voids this one."""
    NOT_FOUND = "not_found"
    """The id is unknown here."""
    NOT_READY = "not_ready"
    """Still starting, or stopping already; ask again later, maybe another process of the name."""
    INVALID = "invalid"
    """The request contradicts itself or the configuration; do not repeat it."""
    FAILED = "failed"
    """The handler raised; the message says what."""

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later at the same peer."""
        return self in (Refusal.OVERLOADED, Refusal.NOT_READY)


class RequestRefused(LibraError):
    """A handler answered with a refusal instead of a reply."""

    def __init__(self, refusal: Refusal, detail: str = "") -> None:
        super().__init__(f"{refusal.value}: {detail}" if detail else refusal.value)
        self.refusal, self.detail = refusal, detail


class TrajectoryError(LibraError):
    """One trajectory cannot go on, through no fault of the policy."""


class ToolError(TrajectoryError):
    """A tool server broke its promise: no answer, garbage, or gone."""


class EngineError(TrajectoryError):
    """The engine failed a request."""


class GradeError(TrajectoryError):
    """The grader could not be run, so there is no reward."""


class WeightError(LibraError):
    """Weights could not be read or applied."""


class ShardCorrupt(WeightError):
    """Bytes of a version do not match its manifest."""

    def __init__(self, version: int, where: str) -> None:
        super().__init__(f"version {version}: {where} does not match the manifest")
        self.version, self.where = version, where


class VersionGone(WeightError):
    """The version's segment was released before it could be read."""

    def __init__(self, version: int) -> None:
        super().__init__(f"version {version} is no longer available")
        self.version = version


class StreamBroken(WeightError):
    """No source gave a chunk in time."""

    def __init__(self, source: str, digest: str, chunk: int, reason: str) -> None:
        super().__init__(f"chunk {chunk} of {digest[:16]} from {source}: {reason}")
        self.source, self.digest, self.chunk, self.reason = source, digest, chunk, reason


class LedgerError(LibraError):
    """The ledger cannot be used as it is."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class RunFailed(LibraError):
    """The run cannot go on. The message says why and what to do about it."""
