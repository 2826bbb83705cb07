"""Streams over ZeroMQ, in threads of their own: no event loop ever carries a weight.

A server is one ROUTER in one thread. A fetch is one thread with one DEALER, which it closes when
its source changes. Both may be called from any loop.
"""

import asyncio
import contextlib
import ctypes
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.errors import PeerUnreachable, ProtocolError
from common.messages.blob import Blob
from common.stream import PIECES_OUTSTANDING, Base, ChunkSource, Fetched, ignore
from common.stream_receive import Answer, Transfer
from common.stream_serve import (
    Desk,
    Reply,
    pack_answer,
    pack_ask,
    unpack_answer,
    unpack_ask,
)

log = structlog.get_logger()

LOOK_S = 0.1
"""How often a server looks after who waits, and a fetch whether it was given up."""
STOP_S = 5.0
"""For a thread to end: it looks every `LOOK_S` and may have a chunk to encode."""
HIGH_WATER_FRAMES = 4 * PIECES_OUTSTANDING
"""Safety net: receivers ask for so few pieces that queues stay shorter."""
QUESTION_BYTES_MAX = 1024
RECONNECT_MS = 100
REFUSED_MAX = 5
"""Attempts to connect until a source counts as gone."""
FETCHES_MAX = 4
"""At once, of one process; others wait for their turn."""
ZERO_COPY_BYTES = 64 << 10
"""Shorter pieces are cheaper to copy than to keep account of."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 6_000

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's own upper bound."""

Socket = zmq.Socket[bytes]
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_CONNECT_RETRIED


class ZmqStreamServer:
    """Keeps the contract of `StreamServer`."""

    def __init__(self, bind: str = "tcp://127.0.0.1:0") -> None:
        self.address = bind
        """Known once the server is entered."""
        self._orders: deque[Callable[[Desk], None]] = deque()
        self._context = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._serve, name="stream server", daemon=True)
        self._stopping = threading.Event()
        self._waking = threading.Lock()
        self._awake: Socket | None = None

    async def __aenter__(self) -> Self:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_FRAMES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, QUESTION_BYTES_MAX)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise PeerUnreachable(self.address, f"cannot listen: {error}") from error
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._orders_here = self._context.socket(zmq.PULL)
        self._orders_here.bind("inproc://orders")
        self._awake = self._context.socket(zmq.PUSH)
        self._awake.set(zmq.LINGER, 0)
        self._awake.connect("inproc://orders")
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        self._wake()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, STOP_S)
        with self._waking:
            assert self._awake is not None
            self._awake.close(linger=0)
            self._awake = None
        # What is on its way keeps views of the source's memory until here.
        self._context.destroy(linger=0)

    def offer(self, digest: str, source: ChunkSource) -> None:
        """See `StreamServer.offer`."""
        self._order(lambda desk: desk.offer(digest, source))

    def withdraw(self, digest: str) -> None:
        """See `StreamServer.withdraw`."""
        self._order(lambda desk: desk.withdraw(digest))

    def arrived(self) -> None:
        """See `StreamServer.arrived`."""
        self._wake()

    def _order(self, order: Callable[[Desk], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        with self._waking:
            if self._awake is not None:
                with contextlib.suppress(zmq.Again):  # Full: it is awake.
                    self._awake.send(b"", zmq.NOBLOCK)

    def _serve(self) -> None:
        """The thread."""
        desk = Desk()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._orders_here, zmq.POLLIN)
        looked = 0.0
        while not self._stopping.is_set():
            ready = dict(poller.poll(int(LOOK_S * 1000)))
            woken = self._orders_here in ready
            while self._orders_here.poll(0):
                self._orders_here.recv()
            while self._orders:
                self._orders.popleft()(desk)
            now = time.monotonic()
            if desk.waited_for and (woken or now >= looked + LOOK_S):
                looked = now
                self._send(desk.look(now))
            self._answer(desk, now)
        self._socket.close(linger=0)
        self._orders_here.close(linger=0)

    def _answer(self, desk: Desk, now: float) -> None:
        """Answer the questions that are there, but let nobody else wait for long."""
        for _ in range(PIECES_OUTSTANDING):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            name = peer.hex()
            try:
                digest, ask = unpack_ask(name, b"".join(frames))
            except ProtocolError as error:
                log.warning("mesh.message_dropped", peer=name, reason=error.reason)
                continue
            self._send(desk.ask(name, digest, ask, now))

    def _send(self, replies: list[Reply]) -> None:
        for name, answer, piece in replies:
            head = [bytes.fromhex(name), pack_answer(answer)]
            try:
                if len(piece) < ZERO_COPY_BYTES:
                    self._socket.send_multipart([*head, bytes(piece)], zmq.NOBLOCK)
                else:
                    self._socket.send_multipart(head, zmq.NOBLOCK | zmq.SNDMORE)
                    self._socket.send(piece, zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                # It left, or does not read: it asks again, or somebody else.
                continue


@functools.cache
def _keep_freed_memory() -> None:
    """Let the C library use a freed piece for the next one.

    It would give each back and fault in fresh pages, which doubles what receiving costs. The two
    values are those that glibc comes to by itself once a block of 32 MiB was freed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD_BYTES)


class ZmqStreamer:
    """Keeps the contract of `Streamer`."""

    def __init__(self, bytes_per_s_max: int = 0) -> None:
        self._bytes_per_s_max = bytes_per_s_max
        self._context = zmq.Context(io_threads=1)
        self._threads = ThreadPoolExecutor(FETCHES_MAX, "stream fetch")

    async def __aenter__(self) -> Self:
        _keep_freed_memory()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._context.destroy(linger=0)

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
        transfer = Transfer(
            blob=blob,
            into=into,
            have=have,
            sources=sources,
            wanted=range(len(blob.chunks)) if chunks is None else chunks,
            base=base,
            began=time.monotonic(),
            timeout_s=timeout_s,
            bytes_per_s_max=self._bytes_per_s_max,
            on_chunk=on_chunk,
        )
        given_up = threading.Event()
        pull = _Pull(self._context, transfer, given_up)
        future = asyncio.get_running_loop().run_in_executor(self._threads, pull.run)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            given_up.set()  # The memory is the caller's again once the thread has let go of it.
            await asyncio.wait([future], timeout=STOP_S)
            raise
        return transfer.fetched


class _Pull:
    """One transfer, in its thread."""

    def __init__(
        self, context: "zmq.Context[Socket]", transfer: Transfer, given_up: threading.Event
    ) -> None:
        self._context, self._transfer, self._given_up = context, transfer, given_up
        self._socket: Socket | None = None
        self._refused = 0

    def run(self) -> None:
        """Until it is done, broken or given up."""
        transfer = self._transfer
        while not transfer.done and not self._given_up.is_set():
            source = transfer.source
            try:
                self._open(source)
                while transfer.source == source and not transfer.done:
                    if self._given_up.is_set():
                        return
                    self._turn()
            finally:
                self._close()

    def _open(self, source: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, HIGH_WATER_FRAMES)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket, self._refused = socket, 0
        self._monitor = socket.get_monitor_socket(_GONE | _REFUSED)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            socket.connect(source)
        except zmq.ZMQError as error:
            self._transfer.lost(f"not an address: {error}", time.monotonic())

    def _close(self) -> None:
        assert self._socket is not None
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._socket = None

    def _turn(self) -> None:
        transfer, socket = self._transfer, self._socket
        assert socket is not None
        now = time.monotonic()
        for ask in transfer.asks(now):
            socket.send(pack_ask(transfer.blob.digest, ask))
        wait_s = min(max(transfer.wake_at() - now, 0.0), LOOK_S)
        ready = dict(self._poller.poll(int(wait_s * 1000) + 1))
        if socket in ready:
            self._take(socket)
        elif self._monitor in ready:
            self._look_after_connection()
        if not transfer.done:
            transfer.expire(time.monotonic())

    def _take(self, socket: Socket) -> None:
        """Put one answer in its place."""
        transfer = self._transfer
        source = transfer.source
        frame = socket.recv()
        try:
            answer = unpack_answer(source, frame)
        except ProtocolError as error:
            log.warning("mesh.message_dropped", peer=source, reason=error.reason)
            self._drop(socket)
            return
        placed = self._place(socket, answer)
        transfer.landed(answer, time.monotonic(), placed=placed)

    def _place(self, socket: Socket, answer: Answer) -> bool:
        if not socket.getsockopt(zmq.RCVMORE):
            return False
        place = self._transfer.lands(answer)
        if place is None:
            self._drop(socket)
            return False
        length = socket.recv_into(place)
        whole = length == len(place) and not socket.getsockopt(zmq.RCVMORE)
        self._drop(socket)
        return whole

    def _drop(self, socket: Socket) -> None:
        while socket.getsockopt(zmq.RCVMORE):
            socket.recv()

    def _look_after_connection(self) -> None:
        event = int(recv_monitor_message(self._monitor)["event"])
        if event & _GONE:
            self._transfer.lost("connection lost", time.monotonic())
        elif event & _REFUSED:
            self._refused += 1
            if self._refused >= REFUSED_MAX:
                self._transfer.lost("nobody listens there", time.monotonic())
