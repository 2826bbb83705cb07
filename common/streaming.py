"""The streams of a process: what a service's main opens beside its mesh."""

import contextlib
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

from common.mirror import Mirror
from common.service import Runtime
from common.transport.stream import ZmqStreamer, ZmqStreamServer


def open_server(runtime: Runtime) -> ZmqStreamServer:
    """On the interface at which the mesh listens."""
    return ZmqStreamServer(f"tcp://{urlsplit(runtime.mesh.address).hostname}:0")


@contextlib.asynccontextmanager
async def open_mirror(runtime: Runtime) -> AsyncGenerator[Mirror]:
    """Versions on this host; opens no connection before one has to be streamed."""
    limit = runtime.config.coordinator.stream_bytes_per_s_max
    async with open_server(runtime) as server, ZmqStreamer(limit) as streamer:
        with contextlib.closing(Mirror(runtime.run_id, streamer, server)) as mirror:
            yield mirror
