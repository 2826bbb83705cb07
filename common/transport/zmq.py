"""The production transport: one ROUTER to listen on, one DEALER for each peer that is dialled.

On the wire a frame is either a msgpack array of payloads (all that one loop turn had for the
peer), a `Control` map, or nil (a probe, ignored). The first frame of a connection is a hello,
which names run, protocol version and identity; until it is welcomed nothing else is accepted.
How a socket is driven is in `common.transport.zmq_link`; only these two modules know ZeroMQ.
"""

import asyncio
import itertools
from dataclasses import dataclass
from typing import Self, cast

import structlog
import zmq
from pydantic import ValidationError

from common.codec import explain, unpack, validate
from common.errors import ConfigError, PeerUnreachable, ProtocolError
from common.identity import Identity
from common.messages.base import PROTOCOL_VERSION
from common.transport.base import PeerLost, Receive
from common.transport.zmq_frames import PROBE, Connection, Control, control_frame
from common.transport.zmq_link import RETRY_MS, Frame, Link, Socket

log = structlog.get_logger()

WATCHDOG_S = 1.0
PROBE_S, PROBES = 0.005, 4
"""A broken connection is reported a moment before its route is gone, so probing is repeated."""
SOCKETS_MAX = 16_384
COMPLAINTS_MAX = 1024


@dataclass(eq=False, slots=True)
class _Dial:
    """An outgoing connection, from the first attempt on."""

    address: str
    identity: asyncio.Future[str]
    """Of who answers."""
    connection: Connection
    waiters: int = 0


@dataclass(eq=False, slots=True)
class _Peer:
    """A process that shook hands, over one connection or over one in each direction."""

    identity: str
    outgoing: Connection
    """The first connection, for as long as the peer lives: order is kept within one."""
    dial: _Dial | None = None
    incoming: Connection | None = None


class ZmqTransport:
    """Connections over TCP; keeps the contract of `Transport`."""

    def __init__(self, identity: str, bind: str = "tcp://127.0.0.1:0") -> None:
        self.identity, self.address = identity, ""
        self.lost_edges = 0
        """Times that a socket had messages and its descriptor did not tell. Must stay 0."""
        self._bind = bind
        self._run_id = Identity.parse(identity).run_id
        self._peers: dict[str, _Peer] = {}
        self._incoming: dict[bytes, Connection] = {}
        """Connections of peers that dialled us, by routing id."""
        self._dials: dict[str, _Dial] = {}
        self._dials_by_link: dict[Link, _Dial] = {}
        self._dial_numbers = itertools.count()
        self._dirty: list[Connection] = []
        self._blocked: list[Connection] = []
        """What ZeroMQ took no more from; tried again when a descriptor moves."""
        self._flush_scheduled = False
        self._complaints: dict[tuple[str, str], None] = {}
        self._probes_left = 0

    def receive_with(self, receive: Receive, lost: PeerLost) -> None:
        """Set the callbacks."""
        self._receive, self._lost = receive, lost

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        router = self._context.socket(zmq.ROUTER)
        try:
            self._router = Link(self._loop, router, self._take, self._route_broken)
            router.bind(self._bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{self._bind}: cannot listen here: {error}") from error
        self.address = cast("bytes", router.get(zmq.LAST_ENDPOINT)).decode()
        self._router.start()
        self._watchdog = self._loop.call_later(WATCHDOG_S, self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Say goodbye and close every socket, in little more than the linger time."""
        for peer in list(self._peers.values()):
            self._end(peer, "the peer left")
        for dial in list(self._dials.values()):
            self._close_dial(dial)
        self._watchdog.cancel()
        self._router.close()
        try:
            await asyncio.sleep(0)  # The sockets close in the next loop turn.
        finally:
            await asyncio.to_thread(self._context.term)

    # Connecting.

    async def connect(self, address: str, *, timeout_s: float) -> str:
        """See `Transport.connect`."""
        dial = self._dials.get(address) or self._start_dial(address)
        dial.waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dial.identity)
        except TimeoutError:
            raise PeerUnreachable(address, f"no answer within {timeout_s:g} s") from None
        finally:
            dial.waiters -= 1
            if not dial.waiters and not dial.identity.done():
                self._close_dial(dial)

    def _start_dial(self, address: str) -> _Dial:
        dial = _Dial(address, self._loop.create_future(), self._open(address))
        self._dials[address] = self._dials_by_link[dial.connection.link] = dial
        return dial

    def _open(self, address: str) -> Connection:
        """Open a socket to an address; its hello waits until somebody is there."""
        socket = self._context.socket(zmq.DEALER)
        # The number makes each connection its own route. With the bare identity the ROUTER
        # would ignore whoever connects again before it has noticed that the old one broke.
        socket.set(zmq.ROUTING_ID, f"{self.identity}/{next(self._dial_numbers)}".encode())
        link = Link(self._loop, socket, self._take, self._dial_broken)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            link.close()
            raise PeerUnreachable(address, str(error)) from error
        link.start()
        connection = Connection(link, b"")
        self._say(connection, "hello")
        return connection

    def _dial_broken(self, link: Link) -> None:
        dial = self._dials_by_link.get(link)
        if dial is None:
            return
        if peer := self._peers.get(dial.connection.peer):
            self._lose(peer, "connection closed")
        else:
            self._loop.call_later(RETRY_MS / 1000, self._dial_again, dial)

    def _dial_again(self, dial: _Dial) -> None:
        """Try on another route: whoever answered is gone, and its hello with it."""
        if not dial.identity.done():
            self._dials_by_link.pop(dial.connection.link).connection.link.close()
            dial.connection = self._open(dial.address)
            self._dials_by_link[dial.connection.link] = dial

    def _welcomed(self, dial: _Dial, identity: str) -> None:
        if dial.identity.done():
            return
        peer = self._peers.get(identity)
        if peer and peer.dial:  # The same process under another address; it heard the last.
            self._lose(peer, "it was connected again")
            peer = None
        if peer is None:
            peer = self._peers[identity] = _Peer(identity, dial.connection)
        peer.dial = dial
        dial.connection.peer = identity
        dial.identity.set_result(identity)

    def _accept(self, route: bytes, hello: Control) -> None:
        if problem := self._problem(route, hello):
            self._complain(hello.identity, problem)
            self._say(Connection(self._router, route), "refuse", problem)
            return
        connection = self._incoming.get(route)
        if connection is None:
            connection = Connection(self._router, route, hello.identity)
            self._incoming[route] = connection
            peer = self._peers.get(hello.identity)
            if peer and peer.incoming:
                self._lose(peer, "it connected again")
                self._incoming[route] = connection
                peer = None
            if peer is None:
                peer = self._peers[hello.identity] = _Peer(hello.identity, connection)
            peer.incoming = connection
        self._say(connection, "welcome")

    def _problem(self, route: bytes, hello: Control) -> str:
        """Why the sender of a hello cannot be a peer, or nothing."""
        run_id = Identity.parse(hello.identity).run_id
        if not route.startswith(hello.identity.encode() + b"/"):
            return "its routing id is not its identity"
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"version {hello.protocol_version} meets version {PROTOCOL_VERSION}"
        if run_id != self._run_id:
            return f"run {run_id!r} meets run {self._run_id!r}"
        return ""

    # Ending.

    def disconnect(self, peer: str) -> None:
        """See `Transport.disconnect`."""
        if found := self._peers.get(peer):
            self._end(found, "the peer disconnected")

    def _lose(self, peer: _Peer, reason: str) -> None:
        if self._peers.get(peer.identity) is peer:
            self._end(peer, "connection reset")
            self._lost(peer.identity, reason)

    def _end(self, peer: _Peer, farewell: str) -> None:
        """Forget a peer and both connections, with a last word on each in case it still hears."""
        del self._peers[peer.identity]
        if peer.incoming:
            self._incoming.pop(peer.incoming.route, None)
            self._say(peer.incoming, "bye", farewell)
        if peer.dial:
            self._say(peer.dial.connection, "bye", farewell)
            self._close_dial(peer.dial)

    def _close_dial(self, dial: _Dial) -> None:
        if self._dials.get(dial.address) is dial:
            del self._dials[dial.address]
        self._dials_by_link.pop(dial.connection.link, None)
        dial.connection.link.close()

    def _route_broken(self, _: Link) -> None:
        """Some connection to the ROUTER broke. Which one, only sending tells."""
        if not self._probes_left:
            self._loop.call_later(PROBE_S, self._probe)
        self._probes_left = PROBES

    def _probe(self) -> None:
        self._probes_left -= 1
        if self._router.closed:
            return
        for connection in list(self._incoming.values()):
            try:
                self._router.send(connection.route, PROBE)
            except ConnectionError:
                self._unroutable(connection)
        self._router.recheck()
        if self._probes_left:
            self._loop.call_later(PROBE_S, self._probe)

    def _unroutable(self, connection: Connection) -> None:
        connection.clear()
        if lost := self._incoming.pop(connection.route, None):
            self._loop.call_soon(self._lose, self._peers[lost.peer], "connection closed")

    # Sending.

    def send(self, peer: str, payload: bytes) -> None:
        """See `Transport.send`."""
        found = self._peers.get(peer)
        if found is None:
            raise PeerUnreachable(peer, "not connected")
        connection = found.outgoing
        if not connection.put(payload):
            raise PeerUnreachable(peer, "queue full")
        if not connection.waiting:
            self._mark(connection)

    def _mark(self, connection: Connection) -> None:
        """Write this connection at the end of the loop turn."""
        connection.waiting = True
        self._dirty.append(connection)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _say(self, connection: Connection, what: str, detail: str = "") -> None:
        """Write a control frame after everything queued, or in its place if that is stuck."""
        self._write(connection)
        connection.frame = control_frame(what, self.identity, detail)
        self._write(connection)
        self._loop.call_soon(connection.link.recheck)

    def _flush(self) -> None:
        """Write everything that this loop turn has queued; then look for swallowed edges."""
        self._flush_scheduled = False
        dirty, self._dirty = self._dirty, []
        touched: dict[Link, None] = {}
        for connection in dirty:
            connection.waiting = False
            self._write(connection)
            touched[connection.link] = None
        for link in touched:
            link.recheck()

    def _write(self, connection: Connection) -> None:
        link = connection.link
        while not link.closed and (frame := connection.next_frame()):
            try:
                taken = link.send(connection.route, frame)
            except ConnectionError:
                self._unroutable(connection)
                return
            if not taken:
                if not connection.waiting:
                    connection.waiting = True
                    self._blocked.append(connection)
                return
            connection.frame = b""

    # Receiving.

    def _take(self, link: Link, frames: list[Frame]) -> None:
        """Hand over what one socket had; what that makes this process send leaves at once."""
        batch: list[tuple[str, bytes]] = []
        for route, frame in frames:
            try:
                self._take_frame(link, route, frame, batch)
            except ProtocolError as error:
                self._complain(error.peer, error.reason)
        if batch:
            self._receive(batch)
        if self._blocked:
            blocked, self._blocked = self._blocked, []
            self._dirty.extend(blocked)
        if self._dirty:
            self._flush()

    def _take_frame(
        self, link: Link, route: bytes, frame: bytes, batch: list[tuple[str, bytes]]
    ) -> None:
        """Sort one frame: payloads into the batch, control frames to where they act."""
        if route:
            connection = self._incoming.get(route)
        else:
            dial = self._dials_by_link.get(link)
            connection = dial and dial.connection
        peer = connection.peer if connection else ""
        content = unpack(peer or route.decode(errors="replace"), frame)
        if isinstance(content, list) and peer:
            for payload in cast("list[object]", content):
                if type(payload) is not bytes:
                    raise ProtocolError(peer, "a payload is not bytes")
                batch.append((peer, payload))
        elif isinstance(content, list) and route:
            # Whoever sends without a hello believes in a connection that ended here.
            self._say(Connection(link, route), "bye", "connection reset")
        elif content is not None:
            if batch:  # What came before the control frame is heard before it acts.
                self._receive(list(batch))
                batch.clear()
            self._take_control(link, route, cast("object", content))

    def _take_control(self, link: Link, route: bytes, content: object) -> None:
        source = route.decode(errors="replace")
        try:
            control = validate(Control, content)
        except ValidationError as error:
            raise ProtocolError(source, explain(error)) from error
        dial = self._dials_by_link.get(link)
        if control.what == "hello" and route:
            self._accept(route, control)
        elif control.what == "welcome" and dial:
            self._welcomed(dial, control.identity)
        elif control.what == "refuse" and dial and not dial.identity.done():
            dial.identity.set_exception(ProtocolError(dial.address, control.detail))
            self._close_dial(dial)
        elif control.what == "bye":
            connection = self._incoming.get(route) if route else dial and dial.connection
            if connection and connection.peer:
                self._lose(self._peers[connection.peer], control.detail)

    def _complain(self, peer: str, reason: str) -> None:
        """Log what cannot be accepted, once for each peer and reason."""
        if (peer, reason) not in self._complaints and len(self._complaints) < COMPLAINTS_MAX:
            self._complaints[peer, reason] = None
            log.warning("mesh.peer_refused", peer=peer, reason=reason)

    def _watch(self) -> None:
        """Count the sockets whose edge got lost, and revive them."""
        self._watchdog = self._loop.call_later(WATCHDOG_S, self._watch)
        for link in (self._router, *self._dials_by_link):
            self.lost_edges += link.lost_edge()
