"""Consecutive weight versions of a real optimizer: `python -m services.cli.bench_weights_steps`.

A small Llama trains on random tokens with AdamW on float32 masters. After some steps the masters of
two in a row are taken, as they are and rounded to bfloat16, and encoded chunk by chunk as a run
would. One JSON object on standard output.
"""

# torch and transformers are partially annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import time
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.delta import decode_into, encode
from common.stream import CHUNK_BYTES

RATES = (1e-6, 1e-5)
STEPS = 6
BATCH, TOKENS = 4, 128
"""Enough that every row of the embedding is met."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def weights(model: LlamaForCausalLM, dtype: torch.dtype) -> bytes:
    """All parameters, one after the other."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).to(dtype)
    return flat.view(torch.uint8).numpy().tobytes()


def train(model: LlamaForCausalLM, rate: float) -> dict[str, tuple[bytes, bytes]]:
    """The last two versions, by dtype."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    before: dict[str, bytes] = {}
    for _ in range(STEPS):
        before = {name: weights(model, dtype) for name, dtype in DTYPES.items()}
        tokens = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS))
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: (before[name], weights(model, dtype)) for name, dtype in DTYPES.items()}


def measure(old: bytes, new: bytes, itemsize: int) -> dict[str, Any]:
    """Encode and decode as a run would."""
    packed, exact = 0, True
    encode_s = decode_s = 0.0
    for start in range(0, len(new), CHUNK_BYTES):
        base, target = old[start : start + CHUNK_BYTES], new[start : start + CHUNK_BYTES]
        began = time.process_time()
        chunk = encode(base, target, itemsize)
        encoded = time.process_time()
        out = bytearray(len(base))
        decode_into(chunk, base, memoryview(out))
        decode_s += time.process_time() - encoded
        encode_s += encoded - began
        packed += len(chunk.payload)
        exact = exact and bytes(out) == target
    kind = f"<u{itemsize}"
    changed = np.frombuffer(old, kind) != np.frombuffer(new, kind)
    return {
        "bytes": len(new),
        "ratio": len(new) / packed,
        "changed_share": float(changed.mean()),
        "exact": exact,
        "encode_cpu_s_per_gb": encode_s / len(new) * 1e9,
        "decode_cpu_s_per_gb": decode_s / len(new) * 1e9,
    }


def main() -> None:
    """Measure every rate and dtype."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=5,
        num_attention_heads=5,
        num_key_value_heads=5,
    )
    results: dict[str, Any] = {}
    for rate in RATES:
        versions = train(LlamaForCausalLM(config), rate)
        for name, (old, new) in versions.items():
            results[f"{name} lr {rate:g}"] = measure(old, new, DTYPES[name].itemsize)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
