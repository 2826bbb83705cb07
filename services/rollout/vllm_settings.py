"""How vLLM is set up: environment variables and engine arguments. Pure; imports no vLLM."""

from collections.abc import Sequence
from typing import Any

from common.config import BucketConfig, Config

CPU_BLOCK_TOKENS = 32
"""Smallest block that the CPU attention kernels like: prefixes are shared in units of it."""
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}


def environment(cpus: Sequence[int], tensor_parallel: int) -> dict[str, str]:
    """Variables that must be set before vLLM is imported; its child processes inherit them.

    Dynamo is off because the first request with log-probabilities would compile for 20 s.
    """
    return {
        "VLLM_CPU_OMP_THREADS_BIND": thread_binding(cpus, tensor_parallel),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_PLUGINS": "libra",
        "TOKENIZERS_PARALLELISM": "false",
    }


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


def kv_bytes(model: Any, dtype: str, kv_tokens: int, block_tokens: int) -> int:
    """Size of a KV cache of `kv_tokens`, in whole blocks, plus the null block that vLLM keeps.

    `model` is the transformers configuration. Bytes are per engine, over all ranks together.
    """
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    head_size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    per_token = 2 * model.num_hidden_layers * heads * head_size * BYTES_PER_ELEMENT[dtype]
    blocks = -(-kv_tokens // block_tokens) + 1
    return blocks * block_tokens * per_token


def engine_arguments(config: Config, bucket: BucketConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`, but for what needs the model's configuration."""
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.context_tokens,
        "max_num_seqs": bucket.slots,
        "tensor_parallel_size": bucket.tensor_parallel,
        "enforce_eager": on_cpu,
        "block_size": CPU_BLOCK_TOKENS if on_cpu else None,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "seed": config.run.seed,
    }
