"""The processes of `libra bench weights`: `… -m services.cli.bench_weights_peers ROLE DIR HOST`.

A source has one file on the memory file system and serves it over raw sockets and as a stream. A
receiver takes it in as it is told, one order a line on standard input, and answers with the seconds
that it took: by the wall, and of CPU time of all its threads.
"""

import asyncio
import contextlib
import json
import mmap
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common.digests import hash_pieces
from common.messages.blob import Blob
from common.messages.coordinator import Manifest
from common.mirror import Mirror
from common.transport.stream import ZmqStreamer, ZmqStreamServer
from services.coordinator.store import VersionStore
from services.rollout.segment import Segment

TIMEOUT_S = 120.0
RAW_READ_BYTES = 1 << 20


def serve_raw(path: str, host: str) -> str:
    """Send the whole file to whoever connects, the cheapest way there is."""
    listener = socket.create_server((host, 0), backlog=32)

    def send(connection: socket.socket) -> None:
        with connection, Path(path).open("rb") as file, contextlib.suppress(OSError):
            connection.sendfile(file)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=send, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    bound, port = listener.getsockname()[:2]
    return f"{bound}:{port}"


class Receiver:
    """Memory that is there already, and the ways to fill it."""

    def __init__(self, directory: Path, host: str) -> None:
        self._directory, self._host = directory, host
        self._memory = bytearray()
        self._stack = contextlib.AsyncExitStack()
        self._mirror: Mirror | None = None

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do one thing, and say what it took."""
        way: str = order["way"]
        blob = Blob.model_validate(order["blob"]) if "blob" in order else None
        if blob is not None and len(self._memory) != blob.length:
            self._memory = bytearray(blob.length)
            self._memory[:: mmap.PAGESIZE] = b"\1" * len(range(0, blob.length, mmap.PAGESIZE))
        began, cpu = time.perf_counter(), time.process_time()
        match way:
            case "memcpy":
                assert blob
                self._copy(blob)
            case "raw" | "raw checked":
                assert blob
                self._receive_raw(blob, order["address"], checked=way == "raw checked")
            case "stream":
                assert blob
                await self._stream(blob, order["address"])
            case "map":
                _map(Manifest.model_validate(order["manifest"]))
            case "mirror":
                return await self._bring(order)
            case _:  # "address"
                return {"address": (await self._open_mirror()).labels["stream"]}
        return _took(began, cpu)

    def _copy(self, blob: Blob) -> None:
        with (
            Path(blob.path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            memoryview(self._memory)[:] = view

    def _receive_raw(self, blob: Blob, address: str, *, checked: bool) -> None:
        host, _, port = address.rpartition(":")
        view, at = memoryview(self._memory), 0
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            while at < blob.length:
                count = connection.recv_into(view[at : at + RAW_READ_BYTES])
                assert count, "the source ended"
                at += count
        if checked:
            assert hash_pieces([view], blob.chunk_bytes) == blob.chunks

    async def _stream(self, blob: Blob, address: str) -> None:
        have = bytearray(len(blob.chunks))
        async with ZmqStreamer() as streamer:
            await streamer.fetch(
                blob, memoryview(self._memory), have, [address], timeout_s=TIMEOUT_S
            )

    async def _open_mirror(self) -> Mirror:
        if self._mirror is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            enter = self._stack.enter_async_context
            server = await enter(ZmqStreamServer(f"tcp://{self._host}:0"))
            streamer = await enter(ZmqStreamer())
            mirror = Mirror("bench", streamer, server, self._directory)
            self._mirror = self._stack.enter_context(contextlib.closing(mirror))
        return self._mirror

    async def _bring(self, order: dict[str, Any]) -> dict[str, Any]:
        mirror = await self._open_mirror()
        manifest = Manifest.model_validate(order["manifest"])
        before = mirror.streamed_bytes
        began, cpu = time.perf_counter(), time.process_time()
        await mirror.bring(manifest, order["sources"], timeout_s=TIMEOUT_S)
        took = _took(began, cpu)
        return {**took, "received_bytes": mirror.streamed_bytes - before}

    async def close(self) -> None:
        """Remove what lies in memory."""
        await self._stack.aclose()


def _map(manifest: Manifest) -> None:
    """As a worker of the same host: map the segment and check all of it."""
    Segment.open(manifest).check()


def _took(began: float, cpu: float) -> dict[str, Any]:
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
    }


async def source(directory: Path, host: str) -> None:
    """Serve until standard input ends."""
    lines = await _lines()
    async with ZmqStreamServer(f"tcp://{host}:0") as server:
        store = VersionStore(server, directory, "bench")
        while order := json.loads(await lines.readline() or "null"):
            _say(_serve(order, store, host))
        store.close()


def _serve(order: dict[str, Any], store: VersionStore, host: str) -> dict[str, Any]:
    match order["do"]:
        case "version":
            manifest = Manifest.model_validate(order["manifest"])
            store.offer(manifest, Manifest.model_validate(order["base"]) if order["base"] else None)
            return {"raw": serve_raw(manifest.segment, host), "stream": store.address}
        case _:  # "cpu"
            return {"cpu_s": time.process_time()}


async def receive(directory: Path, host: str) -> None:
    """Obey until standard input ends."""
    lines = await _lines()
    receiver = Receiver(directory, host)
    try:
        while order := json.loads(await lines.readline() or "null"):
            _say(await receiver.obey(order))
    finally:
        await receiver.close()


async def _lines() -> asyncio.StreamReader:
    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    return lines


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    from common.logs import configure_logs

    configure_logs("bench", "weights")
    role, where, address = sys.argv[1:4]
    asyncio.run({"source": source, "receive": receive}[role](Path(where), address))
