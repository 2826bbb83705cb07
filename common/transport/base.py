"""The seam to the network: opaque bytes between identities, in order per pair, maybe lost.

Two transports keep it, under the same contract tests: `zmq` (production) and `sim` (a seeded
network on a virtual clock). Everything above (`common.mesh`) is the same code on both.
"""

from collections.abc import Callable
from typing import Protocol, Self

QUEUE_PAYLOADS_MAX = 16_384
QUEUE_BYTES_MAX = 256 << 20
"""What may wait for one peer before `send` raises: seconds of control traffic, or some batches."""

Receive = Callable[[list[tuple[str, bytes]]], None]
"""Called with all (peer identity, payload) pairs that one connection had ready."""
PeerLost = Callable[[str, str], None]
"""Called with (peer identity, reason) when a connection that was made is lost."""


class Transport(Protocol):
    """Connections to peers of the same run, by identity.

    An identity is `run_id/role/name/incarnation`; the incarnation is random, so a process that
    restarts is a new peer. A peer of another run is refused at the handshake.
    """

    identity: str
    address: str
    """Where others connect to; known once the transport is entered."""

    def receive_with(self, receive: Receive, lost: PeerLost) -> None:
        """Set the callbacks. Called once, before the transport is entered."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def connect(self, address: str, *, timeout_s: float) -> str:
        """Connect, shake hands, and return the identity of whoever answered.

        Connecting twice to the same address and process gives the same identity.

        Raises:
            PeerUnreachable: nobody answered the handshake in time.
            ProtocolError: the peer belongs to another run or speaks another version.
        """
        ...

    def send(self, peer: str, payload: bytes) -> None:
        """Queue one payload. Delivery is not promised; order is, for what is delivered.

        A peer can be sent to when this side connected to it, or when it connected to this
        side (replies travel back over the connection on which requests came).

        Raises:
            PeerUnreachable: no connection, or its bounded queue is full.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Close the connection to a peer. Unknown peers are fine."""
        ...
