"""Chooses the engine of a worker."""

import os
from collections.abc import Sequence

import structlog

from common.config import BucketConfig, Config
from common.errors import ConfigError
from services.rollout import vllm_settings
from services.rollout.engine import Engine

log = structlog.get_logger()


def make_engine(config: Config, bucket: BucketConfig, worker_index: int, run_id: str) -> Engine:
    """The engine that the bucket names, not started yet; `auto` is vLLM where it is usable.

    Finding that out takes ten seconds: call this in a thread. Without
    `cpus` in the bucket the engine takes the cores that this process may run on.
    """
    del run_id
    cpus = bucket.cpus[worker_index] if bucket.cpus else sorted(os.sched_getaffinity(0))
    kind = bucket.engine
    if kind == "auto":
        kind = "vllm" if vllm_usable(cpus, bucket.tensor_parallel) else "torch"
    if kind != "vllm" and bucket.tensor_parallel > 1:
        raise ConfigError(
            f'bucket "{bucket.name}": the {kind} engine cannot split a model over '
            f"{bucket.tensor_parallel} devices, and vLLM is not usable here; run scripts/setup, or "
            "use tensor_parallel = 1"
        )
    # Imported here: torch and vLLM are large, and the base install has neither.
    match kind:
        case "vllm":
            from services.rollout.vllm_engine import VllmEngine

            return VllmEngine(config, bucket, cpus)
        case "torch":
            from services.rollout.torch_engine import TorchEngine

            return TorchEngine(config, bucket, cpus)
        case "fake":
            from services.rollout.fake_engine import FakeEngine

            return FakeEngine.of(config, bucket)


def vllm_usable(cpus: Sequence[int], tensor_parallel: int) -> bool:
    """Whether vLLM can be imported. `import vllm` alone is lazy and would hide a broken one."""
    os.environ.update(vllm_settings.current_environment(cpus, tensor_parallel))
    try:
        from vllm import LLM
    except (ImportError, OSError, RuntimeError) as error:
        log.info("engine.chosen", engine="torch", reason=str(error))
        return False
    return callable(LLM)
