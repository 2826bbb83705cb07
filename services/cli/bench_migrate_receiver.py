"""A worker on another host, as far as the run can tell, that takes in weights without a pause.

`python -m services.cli.bench_migrate_receiver RUN_DIR PARENT` reads `go` and `stop` lines. While it
goes it is a member whose memory file system is nobody else's, so the coordinator has it stream each
version; and when it has one it fetches it again, from the first byte, as the next new worker would.
"""

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from common.config import Config
from common.config_load import load_config
from common.errors import WeightError
from common.logs import configure_logs
from common.membership import Membership
from common.mesh import Mesh
from common.messages.coordinator import Manifest
from common.messages.rollout import ApplyVersion, FetchVersion, VersionApplied, VersionFetched
from common.service import die_with_parent
from common.stream import Streamer
from common.transport.stream import ZmqStreamer
from services.cli.bench_migrate_stage import RECEIVED, join

FETCH_S = 20.0
RETRY_S = 0.01
"""After a version was taken away while it streamed."""


@dataclass
class Received:
    """What came in, over all the time in which it was to."""

    transfers: int = 0
    bytes: int = 0
    broken: int = 0
    seconds: float = 0.0


@dataclass
class Receiver:
    """Serves the coordinator, and fetches."""

    streamer: Streamer
    membership: Membership
    received: Received
    newest: FetchVersion | None = None
    ordered: asyncio.Event = field(default_factory=asyncio.Event)

    def serve_on(self, mesh: Mesh) -> None:
        """Be a worker."""
        mesh.serve(FetchVersion, self._fetch_version)
        mesh.serve(ApplyVersion, self._apply_version)

    async def run(self) -> None:
        """Fetch the newest version, again and again."""
        await self.ordered.wait()
        memory = bytearray(self._manifest().length)
        while True:
            assert self.newest is not None
            try:
                await self._fetch(self.newest, memoryview(memory))
            except WeightError:
                self.received.broken += 1
                await asyncio.sleep(RETRY_S)

    def _manifest(self) -> Manifest:
        assert self.newest is not None
        return self.newest.manifest

    async def _fetch(self, order: FetchVersion, memory: memoryview) -> None:
        manifest = order.manifest
        have = bytearray(len(manifest.chunks))
        await self.streamer.fetch(manifest.blob, memory, have, order.sources, timeout_s=FETCH_S)
        self.received.transfers += 1
        self.received.bytes += manifest.length

    async def _fetch_version(self, _sender: str, request: FetchVersion) -> VersionFetched:
        began = time.perf_counter()
        manifest = request.manifest
        await self._fetch(request, memoryview(bytearray(manifest.length)))
        self.newest = request
        self.ordered.set()
        return VersionFetched(
            version=manifest.version,
            streamed_bytes=manifest.length,
            fetch_s=time.perf_counter() - began,
        )

    def _apply_version(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        manifest = request.manifest
        self.membership.applied_version = manifest.version
        return VersionApplied(
            version=manifest.version, digest=manifest.digest, apply_s=0.0, canary=manifest.canary
        )


async def receive(config: Config, run_dir: Path, received: Received) -> None:
    """Be a worker until cancelled."""
    labels = {"bucket": "none", "memory": "another host's"}
    async with join(config, run_dir, "rollout", "receiver", labels) as (mesh, membership):
        receiver = Receiver(ZmqStreamer(), membership, received)
        receiver.serve_on(mesh)
        await receiver.run()


async def main(run_dir: Path, parent: int) -> None:
    """Follow the orders on standard input."""
    die_with_parent(parent)
    configure_logs("bench", "receiver")
    config = load_config(run_dir / "config.toml", [])
    received = Received()
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        task: asyncio.Task[None] | None = None
        began = 0.0
        while order := (await lines.readline()).decode().strip():
            if order == "go" and task is None:
                began = time.perf_counter()
                task = tasks.create_task(receive(config, run_dir, received), name="receiver")
            elif order == "stop" and task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                task = None
                received.seconds += time.perf_counter() - began
        if task is not None:
            task.cancel()
    (run_dir / RECEIVED).write_text(json.dumps(vars(received)))


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
