"""`python -m services.trainer.replica_main`: a gradient replica as a process."""

import contextlib
from collections.abc import AsyncGenerator

from common.mirror import Mirror
from common.service import Runtime, leave, main
from common.streaming import open_server
from common.transport.stream import ZmqStreamer
from services.trainer.replica import ReplicaService, Streams


@contextlib.asynccontextmanager
async def open_streams(runtime: Runtime) -> AsyncGenerator[Streams]:
    """Opens no connection before something has to be streamed."""
    limit = runtime.config.coordinator.stream_bytes_per_s_max
    async with open_server(runtime) as server, ZmqStreamer(limit) as streamer:
        with contextlib.closing(Mirror(runtime.run_id, streamer, server)) as mirror:
            yield Streams(mirror, server)


def streaming(runtime: Runtime) -> ReplicaService:
    """The service as a process."""
    return ReplicaService(runtime, open_streams)


if __name__ == "__main__":
    leave(main("replica", streaming))
