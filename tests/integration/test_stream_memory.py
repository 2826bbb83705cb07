"""A receiver holds less than two chunks of its own, whatever the size of what it receives."""

import json
import mmap
import subprocess
import sys
from pathlib import Path

import xxhash

from common.messages.blob import Blob
from common.stream import CHUNK_BYTES, Chunk, Encoding
from common.transport.stream import ZmqStreamServer

LENGTH = 512 << 20
RECEIVE = """
import asyncio, json, mmap, sys
from pathlib import Path
from common.messages.blob import Blob
from common.transport.stream import ZmqStreamer

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

async def main():
    order = json.loads(sys.stdin.readline())
    blob = Blob.model_validate(order["blob"])
    with open(order["into"], "w+b") as file:
        file.truncate(blob.length)
        into = memoryview(mmap.mmap(file.fileno(), blob.length))
    async with ZmqStreamer() as streamer:
        grown = []
        have = bytearray(len(blob.chunks))
        await streamer.fetch(blob, into, have, [order["source"]], timeout_s=50, chunks=[0])
        before = anonymous()
        watch = lambda number: grown.append(anonymous() - before)
        await streamer.fetch(
            blob, into, have, [order["source"]], timeout_s=50, on_chunk=watch
        )
    print(max(grown))

asyncio.run(main())
"""


class Zeros:
    """Serves a blob of nothing."""

    view = memoryview(mmap.mmap(-1, CHUNK_BYTES))

    def chunk(self, number: int, base: str) -> Chunk | None:
        del number, base
        return Chunk(Encoding.FULL, self.view)


async def test_half_a_gigabyte_is_received_in_less_than_two_chunks(tmp_path: Path) -> None:
    digest = xxhash.xxh3_64_intdigest(Zeros.view)
    count = LENGTH // CHUNK_BYTES
    blob = Blob(
        path="", length=LENGTH, chunk_bytes=CHUNK_BYTES, chunks=[digest] * count, digest="zeros"
    )
    async with ZmqStreamServer() as server:
        server.offer("zeros", Zeros())
        into = tmp_path / "into"
        order = {"blob": blob.model_dump(), "source": server.address, "into": str(into)}
        with subprocess.Popen(  # noqa: ASYNC220  The server has a thread of its own.
            [sys.executable, "-c", RECEIVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            out, _ = process.communicate(json.dumps(order) + "\n", timeout=50)
    into.unlink()
    assert process.returncode == 0
    assert int(out) < 2 * CHUNK_BYTES
