"""One ZeroMQ socket on an event loop.

The descriptor of a ZeroMQ socket tells *edges*: it is readable once after something changed, and
any send may swallow that edge. So a readable socket is drained until it has nothing, its `EVENTS`
are checked again after everything that was sent, and a watchdog counts what was missed all the
same. Works on asyncio's own loop and on uvloop.
"""

import asyncio
import errno
import select
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message

DRAIN_FRAMES_MAX = 256
"""Frames read before the loop gets a turn; some milliseconds of work."""
HIGH_WATER_FRAMES = 128
"""Safety net inside ZeroMQ; the queues above it are bounded by `common.transport.base`. Frames
grow under pressure, so few are enough."""
FRAME_BYTES_MAX = 512 << 20
LINGER_MS = 200
"""For a last word to leave a closing socket; also bounds how long leaving the network takes."""
RETRY_MS, RETRY_MS_MAX = 50, 1000
"""Between attempts to reach an address where nobody listens yet."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 15_000
"""ZeroMQ's own, to notice a host that vanished. Stuck processes are the leases' business."""

EVENTS, POLLIN, RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
NOBLOCK, ROUTE_FLAGS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain integers: arithmetic on enums costs as much as the calls it is used in."""
NOT_OURS = b"\xc1"
"""Stands for a message of several parts; never valid msgpack."""

Frame = tuple[bytes, bytes]
"""Routing id (empty at a DEALER) and content."""
Socket = zmq.Socket[bytes]


class Link:
    """A socket, its monitor, and their descriptors on the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: Socket,
        take: Callable[["Link", list[Frame]], None],
        disconnected: Callable[["Link"], None],
    ) -> None:
        """Prepare a fresh socket.

        Args:
            loop: Where the callbacks run.
            socket: A ROUTER or DEALER, not yet bound or connected.
            take: Called with what was read, possibly nothing, whenever the descriptor moved.
            disconnected: Called when a connection broke.
        """
        self._loop, self._socket = loop, socket
        self._take, self._disconnected = take, disconnected
        self._routes = socket.type == zmq.ROUTER
        self._scheduled = False
        self._wakeups = self._wakeups_before = 0
        self.closed = False
        _set_options(socket)
        self._monitor: Socket = socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        self._get = cast("Callable[[int], int]", socket.get)
        self._fd, self._monitor_fd = socket.fileno(), self._monitor.fileno()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def start(self) -> None:
        """Watch both descriptors, and look once: ZeroMQ signals only who has found nothing."""
        self._loop.add_reader(self._fd, self._readable)
        self._loop.add_reader(self._monitor_fd, self._monitor_readable)
        self.schedule()
        self._loop.call_soon(self._monitor_readable)

    def close(self) -> None:
        """Stop watching; the sockets close in a later loop turn than their readers go."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._loop.remove_reader(self._monitor_fd)
            self._loop.call_soon(self._close_sockets)

    def send(self, route: bytes, frame: bytes) -> bool:
        """Hand one frame to ZeroMQ; False when it takes no more now.

        Raises:
            ConnectionError: no connection has this routing id.
        """
        try:
            if route:
                self._socket.send(route, ROUTE_FLAGS)
            self._socket.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            raise ConnectionError("connection closed") from error
        return True

    def recheck(self) -> None:
        """Look for what arrived while something was sent: the send took its edge."""
        if not self.closed and self._get(EVENTS) & POLLIN:
            self.schedule()

    def schedule(self) -> None:
        """Drain in the next loop turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def lost_edge(self) -> bool:
        """Watchdog: whether messages wait that neither the descriptor nor a drain announces.

        Only a socket that did not move since the last look is examined: a message that comes
        between the look at the descriptor and the look at the socket is no lost edge.
        """
        moved = self._wakeups != self._wakeups_before
        self._wakeups_before = self._wakeups
        if moved or self._scheduled or self._poll.poll(0):
            return False
        self.recheck()
        return self._scheduled

    def _readable(self) -> None:
        self._wakeups += 1
        self._drain()

    def _drain(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        frames: list[Frame] = []
        try:
            self._read_into(frames)
        except zmq.Again:
            pass
        else:
            self.schedule()
        self._take(self, frames)

    def _read_into(self, frames: list[Frame]) -> None:
        receive, get = self._socket.recv, self._get
        if not self._routes:
            while len(frames) < DRAIN_FRAMES_MAX:
                frames.append((b"", receive(NOBLOCK)))
            return
        while len(frames) < DRAIN_FRAMES_MAX:
            route, frame = receive(NOBLOCK), receive(NOBLOCK)
            while get(RCVMORE):
                receive(NOBLOCK)
                frame = NOT_OURS
            frames.append((route, frame))

    def _monitor_readable(self) -> None:
        broken = False
        try:
            while not self.closed:
                recv_monitor_message(self._monitor, NOBLOCK)
                broken = True
        except zmq.Again:
            pass
        if broken and not self.closed:
            self._drain()  # What arrived before the connection broke comes first.
            self._disconnected(self)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


def _set_options(socket: Socket) -> None:
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.SNDHWM, HIGH_WATER_FRAMES)
    socket.set(zmq.RCVHWM, HIGH_WATER_FRAMES)
    socket.set(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    if socket.type == zmq.ROUTER:
        socket.set(zmq.ROUTER_MANDATORY, 1)
    else:
        # No IMMEDIATE: with it, what had arrived just before a connection broke was dropped
        # unread. A DEALER is closed when its connection breaks, so nothing queues for nobody.
        socket.set(zmq.RECONNECT_IVL, RETRY_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RETRY_MS_MAX)
