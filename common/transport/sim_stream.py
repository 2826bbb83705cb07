"""Streams in one process, on any loop: seeded delay, loss, corruption, death, a bound on links.

The same protocol code as on ZeroMQ (`Desk`, `Transfer`); only the way between them is another one.
"""

import asyncio
import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from common.messages.blob import Blob
from common.stream import Base, ChunkSource, Fetched, ignore
from common.stream_receive import Answer, Ask, Transfer
from common.stream_serve import Desk, Reply

LOOK_S = 0.05
"""How often a server looks after who waits."""
GAP_S = 1e-6


@dataclass
class StreamFaults:
    """What the network does. The default is a network without faults."""

    loss: float = 0.0
    """Probability that a question or an answer is lost."""
    flip: float = 0.0
    """Probability that a piece has one bit flipped."""
    delay_s: tuple[float, float] = (0.0001, 0.001)
    bytes_per_s: float = 0.0
    """Of each server's link, which its receivers share; 0: no bound."""


class SimStreamNetwork:
    """All stream servers and receivers of one simulation."""

    def __init__(self, seed: int, faults: StreamFaults | None = None) -> None:
        self.faults = faults or StreamFaults()
        self.sent_bytes: dict[str, int] = {}
        """By server address: pieces that left it."""
        self._random = random.Random(seed)
        self._servers: dict[str, SimStreamServer] = {}
        self._receivers: dict[str, SimReceiver] = {}
        self._numbers = 0
        self._last: dict[tuple[str, str], float] = {}
        self._link_free: dict[str, float] = {}

    def server(self, address: str) -> "SimStreamServer":
        """Make a server; enter it to start it."""
        return SimStreamServer(self, address)

    def streamer(self, bytes_per_s_max: int = 0) -> "SimStreamer":
        """Make a receiving end."""
        return SimStreamer(self, bytes_per_s_max)

    def kill(self, address: str) -> None:
        """End a server without a word; its receivers lose the connection."""
        self._servers.pop(address, None)
        for receiver in list(self._receivers.values()):
            if receiver.transfer.source == address:
                self._later(address, receiver.name, 0, functools.partial(receiver.lose, address))

    # What servers and receivers call.

    def enter(self, server: "SimStreamServer") -> None:
        self._servers[server.address] = server

    def leave(self, server: "SimStreamServer") -> None:
        if self._servers.get(server.address) is server:
            self.kill(server.address)

    def join(self, receiver: "SimReceiver") -> None:
        self._numbers += 1
        receiver.name = f"receiver-{self._numbers}"
        self._receivers[receiver.name] = receiver

    def part(self, receiver: "SimReceiver") -> None:
        self._receivers.pop(receiver.name, None)
        for server in self._servers.values():
            server.desk.forget(receiver.name)

    def ask(self, receiver: "SimReceiver", address: str, digest: str, ask: Ask) -> None:
        if address not in self._servers:
            self._later(address, receiver.name, 0, functools.partial(receiver.lose, address))
        elif self._random.random() >= self.faults.loss:
            self._later(
                receiver.name, address, 0, lambda: self._deliver(receiver, address, digest, ask)
            )

    def reply(self, address: str, reply: Reply) -> None:
        name, answer, piece = reply
        if self._random.random() < self.faults.loss:
            return
        content = bytearray(piece)
        if content and self._random.random() < self.faults.flip:
            content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        self.sent_bytes[address] = self.sent_bytes.get(address, 0) + len(content)

        def arrive() -> None:
            if receiver := self._receivers.get(name):
                receiver.hear(address, answer, content)

        self._later(address, name, len(content), arrive)

    def _deliver(self, receiver: "SimReceiver", address: str, digest: str, ask: Ask) -> None:
        if server := self._servers.get(address):
            server.serve(receiver.name, digest, ask)

    def _later(self, sender: str, target: str, length: int, act: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        if self.faults.bytes_per_s and length:
            at = max(at, self._link_free.get(sender, 0.0)) + length / self.faults.bytes_per_s
            self._link_free[sender] = at
        pair = sender, target
        at = max(at + self._random.uniform(*self.faults.delay_s), self._last.get(pair, 0.0) + GAP_S)
        self._last[pair] = at
        loop.call_at(at, act)


class SimStreamServer:
    """Keeps the contract of `StreamServer`."""

    def __init__(self, network: SimStreamNetwork, address: str) -> None:
        self._network, self.address = network, address
        self.desk = Desk()
        self.silent = False
        """Accept questions and never answer."""
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._network.enter(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._network.leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def offer(self, digest: str, source: ChunkSource) -> None:
        """See `StreamServer.offer`."""
        self.desk.offer(digest, source)
        self._look()

    def withdraw(self, digest: str) -> None:
        """See `StreamServer.withdraw`."""
        self.desk.withdraw(digest)

    def arrived(self) -> None:
        """See `StreamServer.arrived`."""
        self._look()

    def serve(self, receiver: str, digest: str, ask: Ask) -> None:
        """Take a question."""
        if not self.silent:
            now = asyncio.get_running_loop().time()
            self._send(self.desk.ask(receiver, digest, ask, now))

    def _look(self) -> None:
        self._send(self.desk.look(asyncio.get_running_loop().time()))

    def _send(self, replies: list[Reply]) -> None:
        for reply in replies:
            self._network.reply(self.address, reply)
        if self.desk.waited_for and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()


class SimReceiver:
    """One transfer under way."""

    name: str

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.changed = asyncio.Event()
        self._heard: deque[tuple[str, Answer | None, bytearray]] = deque()
        """What came from where; None: the connection was lost."""

    def hear(self, source: str, answer: Answer, piece: bytearray) -> None:
        """A piece came."""
        self._heard.append((source, answer, piece))
        self.changed.set()

    def lose(self, source: str) -> None:
        """The connection is gone."""
        self._heard.append((source, None, bytearray()))
        self.changed.set()

    def take(self, now: float) -> None:
        """Handle all that came."""
        while self._heard and not self.transfer.done:
            source, answer, piece = self._heard.popleft()
            if source != self.transfer.source:
                continue
            if answer is None:
                self.transfer.lost("connection lost", now)
                continue
            place = self.transfer.lands(answer)
            if place is not None:
                place[:] = piece
            self.transfer.landed(answer, now, placed=place is not None)


class SimStreamer:
    """Keeps the contract of `Streamer`."""

    def __init__(self, network: SimStreamNetwork, bytes_per_s_max: int = 0) -> None:
        self._network, self._bytes_per_s_max = network, bytes_per_s_max

    async def fetch(  # noqa: PLR0913  As the protocol says.
        self,
        blob: Blob,
        into: memoryview,
        have: bytearray,
        sources: Sequence[str],
        *,
        chunks: Sequence[int] | None = None,
        base: Base | None = None,
        timeout_s: float,
        on_chunk: Callable[[int], None] = ignore,
    ) -> Fetched:
        """See `Streamer.fetch`."""
        loop = asyncio.get_running_loop()
        transfer = Transfer(
            blob=blob,
            into=into,
            have=have,
            sources=sources,
            wanted=range(len(blob.chunks)) if chunks is None else chunks,
            base=base,
            began=loop.time(),
            timeout_s=timeout_s,
            bytes_per_s_max=self._bytes_per_s_max,
            on_chunk=on_chunk,
        )
        receiver = SimReceiver(transfer)
        self._network.join(receiver)
        try:
            while not transfer.done:
                await self._turn(receiver)
        finally:
            self._network.part(receiver)
        return transfer.fetched

    async def _turn(self, receiver: SimReceiver) -> None:
        transfer, loop = receiver.transfer, asyncio.get_running_loop()
        for ask in transfer.asks(loop.time()):
            self._network.ask(receiver, transfer.source, transfer.blob.digest, ask)
        try:
            async with asyncio.timeout_at(transfer.wake_at() + GAP_S):
                await receiver.changed.wait()
        except TimeoutError:
            transfer.expire(loop.time())
            return
        receiver.changed.clear()
        receiver.take(loop.time())
