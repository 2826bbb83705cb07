"""`python -m services.trainer`."""

from common.service import Runtime, leave, main
from common.transport.stream import ZmqStreamer
from services.trainer.service import TrainerService


def streaming(runtime: Runtime) -> TrainerService:
    """The service as a process: replicas on other hosts stream their gradients to it."""
    limit = runtime.config.coordinator.stream_bytes_per_s_max
    return TrainerService(runtime, open_streamer=lambda _: ZmqStreamer(limit))


leave(main("trainer", streaming))
