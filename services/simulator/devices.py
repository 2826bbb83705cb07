"""Accelerators and models as numbers: what the cost formulas need, and where each comes from.

Sizes are of the published architectures; parameters are counted from them, so a shape cannot
disagree with its parameter count.
"""

from dataclasses import dataclass

BYTES_PER_PARAMETER = 2
"""bfloat16, of weights and of the KV cache alike."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Source: vendors' data sheets, dense rates."""

    name: str
    flops: float
    """bfloat16 operations per second, without sparsity."""
    memory_bytes_s: float
    """Peak bandwidth of its memory."""
    memory_bytes: float
    intra_node_bytes_s: float
    """To its neighbours in the node, both directions together."""
    inter_node_bytes_s: float = 25e9
    """One 200 Gb/s port."""


A800 = Device("A800-80G", 312e12, 2.04e12, 80e9, 400e9)
A100 = Device("A100-80G", 312e12, 2.04e12, 80e9, 600e9)
H800 = Device("H800", 989e12, 3.35e12, 80e9, 400e9)
H100 = Device("H100", 989e12, 3.35e12, 80e9, 900e9)
H200 = Device("H200", 989e12, 4.8e12, 141e9, 900e9)
H20 = Device("H20", 148e12, 4.0e12, 96e9, 900e9)
ASCEND_910B3 = Device("910B3", 313e12, 1.6e12, 64e9, 392e9)
"""The least certain row: published figures differ by a quarter."""
RTX_4090 = Device("RTX4090", 165e12, 1.01e12, 24e9, 25e9)

DEVICES = {
    device.name: device for device in (A800, A100, H800, H100, H200, H20, ASCEND_910B3, RTX_4090)
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated MLPs.

    Source: the `config.json` that is published with each model.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    """Of one expert where there are experts."""
    vocabulary: int
    tied: bool = False
    """The output head is the embedding."""
    experts: int = 1
    experts_per_token: int = 1

    @property
    def attention_parameters(self) -> int:
        """Projections of all layers."""
        query = 2 * self.width * self.heads * self.head_width
        return self.layers * (query + 2 * self.width * self.kv_heads * self.head_width)

    @property
    def expert_parameters(self) -> int:
        """MLPs of all layers and experts."""
        return self.layers * self.experts * 3 * self.width * self.mlp_width

    @property
    def head_parameters(self) -> int:
        """The output head, which is read in every step."""
        return self.width * self.vocabulary

    @property
    def active_parameters(self) -> int:
        """Without embedding and head: those that one token goes through."""
        share = self.experts_per_token / self.experts
        return self.attention_parameters + int(self.expert_parameters * share)

    @property
    def parameters(self) -> int:
        """In all, embeddings included."""
        embeddings = self.head_parameters * (1 if self.tied else 2)
        return self.attention_parameters + self.expert_parameters + embeddings

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * BYTES_PER_PARAMETER


QWEN3_4B = ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, tied=True)
QWEN3_14B = ModelShape("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936)
QWEN3_32B = ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936)
QWEN3_30B_A3B = ModelShape(
    "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, experts=128, experts_per_token=8
)

MODELS = {model.name: model for model in (QWEN3_4B, QWEN3_14B, QWEN3_32B, QWEN3_30B_A3B)}
