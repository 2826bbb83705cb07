"""A network in one process, on any loop: seeded delay, loss, duplication, reordering, partitions.

The same seed and program give the same trace, whatever the hash seed. On `common.clock.run_sim`
delays cost no time.
"""

import asyncio
import hashlib
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Self

import structlog

from common.errors import ConfigError, PeerUnreachable, ProtocolError
from common.identity import Identity
from common.transport.base import (
    QUEUE_BYTES_MAX,
    QUEUE_PAYLOADS_MAX,
    PeerLost,
    Receive,
    Transport,
)

log = structlog.get_logger()

GAP_S = 1e-6
"""Arrivals of one pair differ by so much: the order of equal deadlines is nobody's promise."""
DIAL_S_MIN = 0.001
TRACE_LINES = 1000


@dataclass(frozen=True)
class Faults:
    """What the network does to payloads. The default is a network without faults."""

    loss: float = 0.0
    """Probability that a payload is lost."""
    duplicate: float = 0.0
    """Probability that a payload arrives a second time."""
    delay_s: tuple[float, float] = (0.0001, 0.001)
    """Range from which each delay is drawn."""
    reorder: float = 0.0
    """Probability that a payload may overtake or be overtaken."""
    lose: frozenset[int] = frozenset()
    """Payloads that are lost by their number in order of sending, from 0: single-fault sweeps."""


@dataclass(order=True)
class _Event:
    """Something that happens at a time; ties in the order of making."""

    at: float
    number: int
    sender: str = field(compare=False)
    receiver: str = field(compare=False)
    payload: bytes | None = field(compare=False)
    """None: the connection is lost, for `reason`."""
    reason: str = field(compare=False, default="")
    connection: int = field(compare=False, default=0)


class SimNetwork:
    """All transports of one simulation."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.payloads_sent = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        """The last things that happened, for people."""
        self._random = random.Random(seed)
        self._hash = hashlib.blake2b(digest_size=16)
        self._ports: dict[str, SimTransport] = {}
        """Entered transports by address."""
        self._live: dict[str, SimTransport] = {}
        self._cut: set[frozenset[str]] = set()
        self._events: list[_Event] = []
        self._event_number = 0
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._incarnations = 0
        self._connections = 0

    def connect(self, name_or_identity: str, address: str = "") -> Transport:
        """Make a transport: of a plain name in a run called `sim`, or of a full identity.

        Args:
            name_or_identity: `worker-0`, or `run_id/role/name/incarnation`.
            address: Where it listens. By default an address of its own; a restarted process
                may give the one of its predecessor.
        """
        self._incarnations += 1
        if "/" in name_or_identity:
            identity = Identity.parse(name_or_identity)
        else:
            incarnation = f"{self._incarnations:04d}"
            identity = Identity("sim", name_or_identity, name_or_identity, incarnation)
        return SimTransport(self, str(identity), address or f"sim://{identity}")

    def partition(self, one: str, other: str) -> None:
        """Lose everything between two identities until `heal`; nobody is told."""
        self._note("partition", one, other, b"")
        self._cut.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """End a partition."""
        self._note("heal", one, other, b"")
        self._cut.discard(frozenset((one, other)))

    def kill(self, identity: str) -> None:
        """End a process without a word: its peers lose the connection, it hears nothing more.

        What it sends from now on vanishes. Its tasks are the test's to cancel.
        """
        self._note("kill", identity, "", b"")
        if victim := self._live.get(identity):
            victim.dead = True
            self._leave(victim, "connection closed")

    def digest(self) -> str:
        """Hash of everything that has happened; equal digests are equal traces."""
        return self._hash.hexdigest()

    # What transports call.

    def enter(self, transport: "SimTransport") -> None:
        if transport.address in self._ports:
            raise ConfigError(f"{transport.address}: the address is in use")
        self._ports[transport.address] = transport
        self._live[transport.identity] = transport

    def leave(self, transport: "SimTransport") -> None:
        if self._live.get(transport.identity) is transport:
            self._leave(transport, "the peer left")

    async def dial(self, caller: "SimTransport", address: str) -> str:
        """Shake hands, trying again until somebody answers."""
        while True:
            await asyncio.sleep(max(2 * self._delay(), DIAL_S_MIN))
            callee = self._ports.get(address)
            if callee and not caller.dead and not self._is_cut(caller.identity, callee.identity):
                break
        ours, theirs = Identity.parse(caller.identity), Identity.parse(callee.identity)
        if ours.run_id != theirs.run_id:
            callee.refuse_once(caller.identity)
            raise ProtocolError(address, f"it belongs to run {theirs.run_id!r}")
        if callee.identity not in caller.peers:
            self._connections += 1
            caller.peers[callee.identity] = self._connections
            callee.peers[caller.identity] = self._connections
        self._note("connect", caller.identity, callee.identity, b"")
        return callee.identity

    def hang_up(self, transport: "SimTransport", peer: str, reason: str) -> None:
        """Close one connection; the other side is told after a delay."""
        connection = transport.peers.pop(peer, None)
        if connection is not None and not self._is_cut(transport.identity, peer):
            event = self._event(transport.identity, peer, None)
            event.reason, event.connection = reason, connection
            self._schedule(event)

    def send(self, sender: "SimTransport", receiver: str, payload: bytes) -> None:
        number, faults = self.payloads_sent, self.faults
        self.payloads_sent += 1
        lost = self._random.random() < faults.loss or number in faults.lose
        copies = 2 if self._random.random() < faults.duplicate else 1
        if sender.dead or lost or self._is_cut(sender.identity, receiver):
            self._note("lose", sender.identity, receiver, payload)
            return
        for _ in range(copies):
            event = self._event(sender.identity, receiver, payload)
            event.connection = sender.peers[receiver]
            sender.add_in_flight(receiver, 1, len(payload))
            self._schedule(event)

    # The queue of events.

    def _leave(self, transport: "SimTransport", reason: str) -> None:
        for peer in list(transport.peers):
            self.hang_up(transport, peer, reason)
        self._live.pop(transport.identity, None)
        self._ports.pop(transport.address, None)

    def _delay(self) -> float:
        return self._random.uniform(*self.faults.delay_s)

    def _is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def _event(self, sender: str, receiver: str, payload: bytes | None) -> _Event:
        """Draw the time of arrival: after the pair's last one, unless this one is reordered."""
        at = asyncio.get_running_loop().time() + self._delay()
        if payload is None or self._random.random() >= self.faults.reorder:
            pair = sender, receiver
            at = max(at, self._last_arrival.get(pair, 0.0) + GAP_S)
            self._last_arrival[pair] = at
        self._event_number += 1
        return _Event(at, self._event_number, sender, receiver, payload)

    def _schedule(self, event: _Event) -> None:
        heapq.heappush(self._events, event)
        if self._timer is None or event.at < self._timer.when():
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._events:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._events[0].at, self._deliver_due)

    def _deliver_due(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + GAP_S / 2
        try:
            while self._events and self._events[0].at <= now:
                self._deliver(heapq.heappop(self._events))
        finally:
            self._arm()

    def _deliver(self, event: _Event) -> None:
        sender, receiver = self._live.get(event.sender), self._live.get(event.receiver)
        if sender and event.payload is not None:
            sender.add_in_flight(event.receiver, -1, -len(event.payload))
        if receiver is None or receiver.peers.get(event.sender) != event.connection:
            if sender and sender.peers.get(event.receiver) == event.connection:
                self._reset(event)
        elif event.payload is None:
            self._note("lost", event.sender, event.receiver, b"")
            del receiver.peers[event.sender]
            receiver.lost(event.sender, event.reason)
        elif not self._is_cut(event.sender, event.receiver):
            self._note("deliver", event.sender, event.receiver, event.payload)
            receiver.receive([(event.sender, event.payload)])

    def _reset(self, event: _Event) -> None:
        """Tell a sender that the other side no longer knows the connection."""
        answer = self._event(event.receiver, event.sender, None)
        answer.reason, answer.connection = "connection reset", event.connection
        self._schedule(answer)

    def _note(self, what: str, sender: str, receiver: str, payload: bytes) -> None:
        try:
            now = asyncio.get_running_loop().time()
        except RuntimeError:  # Set up before the loop runs.
            now = 0.0
        line = f"{now:.6f} {what} {sender} {receiver} {len(payload)}"
        self.trace.append(line)
        self._hash.update(line.encode())
        self._hash.update(payload)


class SimTransport:
    """One process's end of a `SimNetwork`; keeps the contract of `Transport`."""

    receive: Receive
    lost: PeerLost

    def __init__(self, network: SimNetwork, identity: str, address: str) -> None:
        self._network = network
        self.identity, self.address = identity, address
        self.dead = False
        self.peers: dict[str, int] = {}
        """Number of the connection by peer; a new connection hears nothing of an old one."""
        self._in_flight: dict[str, tuple[int, int]] = {}
        self._refused: set[str] = set()

    def receive_with(self, receive: Receive, lost: PeerLost) -> None:
        """Set the callbacks."""
        self.receive, self.lost = receive, lost

    async def __aenter__(self) -> Self:
        self._network.enter(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._network.leave(self)

    async def connect(self, address: str, *, timeout_s: float) -> str:
        """See `Transport.connect`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._network.dial(self, address)
        except TimeoutError:
            raise PeerUnreachable(address, f"no answer within {timeout_s:g} s") from None

    def send(self, peer: str, payload: bytes) -> None:
        """See `Transport.send`."""
        if peer not in self.peers:
            raise PeerUnreachable(peer, "not connected")
        payloads, size = self._in_flight.get(peer, (0, 0))
        if payloads >= QUEUE_PAYLOADS_MAX or size >= QUEUE_BYTES_MAX:
            raise PeerUnreachable(peer, "queue full")
        self._network.send(self, peer, payload)

    def disconnect(self, peer: str) -> None:
        """See `Transport.disconnect`."""
        self._network.hang_up(self, peer, "the peer disconnected")

    def add_in_flight(self, peer: str, payloads: int, size: int) -> None:
        """Count what the network carries to a peer."""
        old_payloads, old_size = self._in_flight.get(peer, (0, 0))
        self._in_flight[peer] = old_payloads + payloads, old_size + size

    def refuse_once(self, peer: str) -> None:
        """Log that a foreign peer was refused, the first time."""
        if peer not in self._refused:
            self._refused.add(peer)
            log.warning("mesh.peer_refused", peer=peer, reason="foreign_run")
