"""What work costs on a device: decode and prefill, KV cache and its moves, training, weights.

A roofline per engine iteration (weights to read against operations to do), attention by KV
tokens, all-reduces of tensor parallelism, and what the engine itself spends per iteration and
per sequence. Efficiencies are fitted to published kernel times (Vidur's A100 profiles: within
10 % from 1 to 4,096 tokens and TP 1 to 8, but for a few of the smallest shards) and throughput;
the few that no profile gives are in `Tuning`.
"""

import math
from dataclasses import dataclass

from services.simulator.devices import BYTES_PER_PARAMETER, Device, ModelShape

WEIGHT_READ_EFFICIENCY = 0.785
"""Of peak memory bandwidth. Source: Vidur's profiles at one token."""
DECODE_FLOPS_EFFICIENCY = 0.67
"""Of peak operations, large matrix products. Source: Vidur's profiles at 4,096 tokens."""
PREFILL_FLOPS_EFFICIENCY = 0.55
"""Of a whole prefill, attention's softmax and element-wise work included."""
KV_READ_EFFICIENCY = 0.70
"""Of peak memory bandwidth, paged attention of a decode step."""
FLOPS_TP_EXPONENT = 0.92
"""Operations scale with degree to this power: smaller matrices fill the device less."""
LAYER_S = 35e-6
"""Of each layer, whatever the degree: element-wise kernels and launches. Source: the part of
Vidur's times that does not shrink with the degree, 32 to 45 µs a layer on three models."""
ALL_REDUCE_S = 30e-6
"""Latency of one all-reduce in a node. Source: Vidur's all-reduce profiles, 25 to 35 µs."""
ALL_REDUCE_EFFICIENCY = 0.20
"""Of the node's link rate, at the 0.1 to 20 MB that steps exchange."""
MEMORY_SHARE = 0.9
"""Of the device, given to the engine."""
ACTIVATION_BYTES = 2.5e9
"""Per device, beside weights and KV cache."""
KV_INTRA_NODE_BYTES_S = 20.5e9
KV_INTER_NODE_BYTES_S = 9.2e9
"""Through host memory. Source: Libra's migration of 40,960 tokens (6.71 GB) in 330 and 733 ms."""
KV_TRANSFER_S = 0.003
"""Before the first byte of a move."""
GRADIENT_BYTES_PER_PARAMETER = 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """What no kernel profile gives. Tuned once on experiments A0 to A2, then left alone."""

    fixed_s: float = 0.004
    """c0: the engine's own time per iteration (scheduling, sampling, detokenising)."""
    sequence_s: float = 0.00015
    """c1: the same per sequence. Of the 0.10 to 0.15 ms that published serving latencies imply."""
    chunk_tokens: int = 2048
    """Tokens that an iteration computes at most."""
    train_flops_efficiency: float = 0.40
    train_fixed_s: float = 40.0
    """Of a train step, whatever its length: optimizer with offloaded state, launch, exchange."""


TUNING = Tuning()
"""Tuned: `sequence_s` within its published range, for the short bin of A0; `train_fixed_s`, for
A1. The rest is as published or as the engine's defaults are."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Coefficients of an engine's iteration time, in seconds."""

    weights_s: float
    """Reading what every token needs."""
    experts_s: float
    """Reading all experts; 0 for dense models."""
    expert_share: float
    """Share of the experts that one token goes through."""
    decode_token_s: float
    """Linear operations of one sampled token, output head included."""
    prefill_token_s: float
    """Linear operations of one context token."""
    attend_s: float
    """One context token attending to one earlier token, in a prefill."""
    kv_token_s: float
    """Reading one token's keys and values, in a decode."""
    fixed_s: float
    """Of each iteration: layers, all-reduce latency, the engine itself."""
    token_s: float
    """All-reduce of one token, sampled or not."""
    sequence_s: float
    """The engine itself, per sequence in the batch."""
    chunk_tokens: int
    """Tokens that an iteration computes at most."""

    def iteration_s(
        self,
        decoding: int,
        kv_tokens: int,
        prefill_tokens: int = 0,
        attended: float = 0.0,
        prefills: int = 0,
    ) -> float:
        """One iteration.

        Args:
            decoding: Sequences that sample one token each.
            kv_tokens: KV tokens of those sequences.
            prefill_tokens: Context tokens computed in the same iteration.
            attended: Sum over those of the tokens before each.
            prefills: Sequences that they belong to.
        """
        tokens = decoding + prefill_tokens
        return (
            self.linear_s(decoding, prefill_tokens)
            + self.kv_token_s * kv_tokens
            + self.attend_s * attended
            + self.fixed_s
            + self.token_s * tokens
            + self.sequence_s * (decoding + prefills)
        )

    def linear_s(self, decoding: int, prefill_tokens: int = 0) -> float:
        """Matrix products: the root of the squares of reading and computing, a rounded roofline.

        Source: Vidur's A100 profiles; a sharp corner is 13 % off at 64 tokens.
        """
        read = self.weights_s
        if self.experts_s:
            tokens = decoding + prefill_tokens
            read += self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)
        return math.hypot(
            read, self.decode_token_s * decoding + self.prefill_token_s * prefill_tokens
        )

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """A prefill alone on the engine, in chunks.

        Args:
            tokens: Context tokens to compute.
            cached: Tokens before them whose keys and values are there.
        """
        total, done = 0.0, 0
        while done < tokens:
            chunk = min(self.chunk_tokens, tokens - done)
            attended = chunk * (cached + done + chunk / 2)
            total += self.iteration_s(0, 0, chunk, attended, 1)
            done += chunk
        return total


def engine_speed(
    model: ModelShape, device: Device, tensor_parallel: int = 1, tuning: Tuning = TUNING
) -> EngineSpeed:
    """Coefficients for a model on so many devices of one node.

    Source: rooflines (weights / bandwidth, 2 operations per parameter and token), KV reads in the
    paged layout, two all-reduces per layer of one activation vector per token.
    """
    degree = tensor_parallel
    assert degree >= 1
    read = WEIGHT_READ_EFFICIENCY * device.memory_bytes_s * degree
    flops = device.flops * degree**FLOPS_TP_EXPONENT
    dense = model.attention_parameters + model.head_parameters
    if model.experts == 1:
        dense += model.expert_parameters
    moe = model.experts > 1
    kv_read = KV_READ_EFFICIENCY * device.memory_bytes_s * min(degree, model.kv_heads)
    sampled = model.active_parameters + model.head_parameters
    attention = 4.0 * model.layers * model.heads * model.head_width
    return EngineSpeed(
        weights_s=BYTES_PER_PARAMETER * dense / read,
        experts_s=BYTES_PER_PARAMETER * model.expert_parameters / read if moe else 0.0,
        expert_share=model.experts_per_token / model.experts if moe else 0.0,
        decode_token_s=2.0 * sampled / (DECODE_FLOPS_EFFICIENCY * flops),
        prefill_token_s=2.0 * model.active_parameters / (PREFILL_FLOPS_EFFICIENCY * flops),
        attend_s=attention / (PREFILL_FLOPS_EFFICIENCY * flops),
        kv_token_s=model.kv_bytes_per_token / kv_read,
        fixed_s=tuning.fixed_s + model.layers * LAYER_S + _all_reduces(model, degree, latency=True),
        token_s=_all_reduces(model, degree, latency=False, device=device),
        sequence_s=tuning.sequence_s,
        chunk_tokens=tuning.chunk_tokens,
    )


def _all_reduces(
    model: ModelShape, degree: int, *, latency: bool, device: Device | None = None
) -> float:
    """Two all-reduces a layer: their latency, or what one token's bytes add."""
    if degree == 1:
        return 0.0
    if latency or device is None:
        return 2 * model.layers * ALL_REDUCE_S
    sent = 2 * (degree - 1) / degree * model.width * BYTES_PER_PARAMETER
    return 2 * model.layers * sent / (ALL_REDUCE_EFFICIENCY * device.intra_node_bytes_s)


def kv_capacity_tokens(model: ModelShape, device: Device, tensor_parallel: int = 1) -> int:
    """Tokens of KV cache beside the weights; 0 when the weights do not fit.

    Source: 0.9 of memory less weights and activations; above as many devices as KV heads, heads
    are held more than once.
    """
    degree = tensor_parallel
    free = MEMORY_SHARE * device.memory_bytes * degree
    free -= BYTES_PER_PARAMETER * model.parameters + ACTIVATION_BYTES * degree
    copies = max(1.0, degree / model.kv_heads)
    return max(0, int(free / (model.kv_bytes_per_token * copies)))


def kv_transfer_s(model: ModelShape, tokens: int, *, same_node: bool) -> float:
    """Seconds to move so many tokens of KV cache from one worker to another."""
    rate = KV_INTRA_NODE_BYTES_S if same_node else KV_INTER_NODE_BYTES_S
    return KV_TRANSFER_S + tokens * model.kv_bytes_per_token / rate


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """How a train step is spread over devices."""

    devices: int
    pipeline_stages: int = 1
    micro_batches: int = 8
    """Per pipeline; what the bubble is measured against."""
    recompute_logprobs: bool = True
    """One forward pass more."""


def train_step_s(
    model: ModelShape,
    device: Device,
    layout: TrainLayout,
    *,
    tokens: int,
    context_tokens: float,
    tuning: Tuning = TUNING,
) -> float:
    """Seconds of one train step over `tokens` in sequences of mean length `context_tokens`.

    Source: 6 operations per active parameter and token, 6 · layers · width · length for causal
    attention, a bubble of (stages - 1) / micro-batches, a ring all-reduce of the gradients between
    nodes, and a fixed part. The fixed part scales with the parameters (it was tuned on 14B).
    """
    width = model.heads * model.head_width
    per_token = 6.0 * (model.active_parameters + model.head_parameters)
    per_token += 6.0 * model.layers * width * context_tokens
    if layout.recompute_logprobs:
        per_token *= 4.0 / 3.0
    rate = tuning.train_flops_efficiency * device.flops * layout.devices
    compute = (
        tokens * per_token / rate * (1.0 + (layout.pipeline_stages - 1) / layout.micro_batches)
    )
    gradients = 2.0 * GRADIENT_BYTES_PER_PARAMETER * model.parameters / layout.devices
    exchange = gradients * layout.pipeline_stages / device.inter_node_bytes_s
    return compute + exchange + tuning.train_fixed_s * model.parameters / REFERENCE_PARAMETERS


REFERENCE_PARAMETERS = 14.8e9
"""The model that `Tuning.train_fixed_s` was tuned with."""


def weight_sync_s(
    model: ModelShape, device: Device, tensor_parallel: int = 1, *, reload_s: float = 1.0
) -> float:
    """Seconds until a worker decodes with new weights that stream to it over the network.

    Source: all weights over one port per device, and the swap itself. A delta is smaller, a
    checkpoint through a shared disk far slower (some 800 s were published).
    """
    rate = device.inter_node_bytes_s * tensor_parallel
    return BYTES_PER_PARAMETER * model.parameters / rate + reload_s
