"""What travels between two `ZmqTransport`s: control frames, and payloads packed into frames."""

from collections import deque
from dataclasses import dataclass, field

from common.codec import pack
from common.messages.base import PROTOCOL_VERSION, Message
from common.transport.base import QUEUE_BYTES_MAX, QUEUE_PAYLOADS_MAX
from common.transport.zmq_link import Link

FRAME_PAYLOADS_MAX = 256
FRAME_BYTES_SOFT = 1 << 20
"""Payloads packed into one frame stop here, so that one peer's backlog is no giant message."""
PROBE = pack(None)
"""Tells nothing; sending it tells whether there is a connection."""


class Control(Message):
    """A frame that is about the connection itself."""

    what: str
    """`hello` from who dials; `welcome` or `refuse` from who listens; `bye` from either."""
    identity: str
    """The sender's."""
    protocol_version: int
    detail: str = ""


def control_frame(what: str, identity: str, detail: str) -> bytes:
    """Make a control frame of this version."""
    return pack(
        Control(what=what, identity=identity, protocol_version=PROTOCOL_VERSION, detail=detail)
    )


@dataclass(eq=False, slots=True)
class Connection:
    """One way to a peer, and what waits to be written to it."""

    link: Link
    route: bytes
    """Routing id at our ROUTER; empty at a DEALER."""
    peer: str = ""
    """Identity of the other side, once it shook hands."""
    payloads: deque[bytes] = field(default_factory=deque[bytes])
    payload_bytes: int = 0
    frame: bytes = b""
    """Made, and not yet taken by ZeroMQ."""
    waiting: bool = False
    """Whether the transport has it among those to write."""

    def put(self, payload: bytes) -> bool:
        """Queue a payload; False when the queue is full."""
        size = self.payload_bytes + len(payload)
        if len(self.payloads) >= QUEUE_PAYLOADS_MAX or size > QUEUE_BYTES_MAX:
            return False
        self.payloads.append(payload)
        self.payload_bytes = size
        return True

    def next_frame(self) -> bytes:
        """The frame to write now: the one that was not taken, or as many payloads as fit one."""
        if self.frame or not self.payloads:
            return self.frame
        queue = self.payloads
        payloads = [queue.popleft()]
        size = len(payloads[0])
        while queue and len(payloads) < FRAME_PAYLOADS_MAX and size < FRAME_BYTES_SOFT:
            payloads.append(queue.popleft())
            size += len(payloads[-1])
        self.payload_bytes -= size
        self.frame = pack(payloads)
        return self.frame

    def clear(self) -> None:
        """Drop what waits: nobody will take it."""
        self.frame = b""
        self.payloads.clear()
        self.payload_bytes = 0
