"""What one rank copies out of a version: the rows of every published tensor that it holds.

FSDP2 splits a parameter by its first dimension, so the ranks' rows lie one after the other in the
published tensor and each rank can write its own: no rank ever holds a whole model for publishing,
and nothing is gathered. Where the architecture publishes other tensors than it computes with
(experts that are stored apart), a rank's rows are not enough and weights are gathered first.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.trainer.model import weights_to_publish


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive rows of one tensor."""

    rows: Tensor
    first: int = 0
    """Where in the whole tensor they begin."""

    def of(self, whole: Tensor) -> Tensor:
        """The same rows of another whole tensor."""
        if whole.shape == self.rows.shape:  # A scalar has no rows.
            return whole
        return whole[self.first : self.first + self.rows.shape[0]]


@dataclass(frozen=True, slots=True)
class Outlet:
    """The static part: what is published under which name."""

    shapes: dict[str, Tensor]
    """The published tensors, whole, as meta tensors."""
    names: dict[str, str] | None
    """The model's own name of each published one; None where they are not the same tensors."""

    @staticmethod
    def of(model: PreTrainedModel) -> "Outlet":
        """Ask the architecture, with stand-ins that have no memory."""
        live: dict[str, Tensor] = model.state_dict(keep_vars=True)
        stand_ins: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in live.items():  # Tied weights are one parameter, and stay one tensor.
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            state[name] = stand_ins.setdefault(id(tensor), made)
        own_names = {id(tensor): name for name, tensor in reversed(state.items())}
        shapes = weights_to_publish(model, state)
        if any(id(tensor) not in own_names for tensor in shapes.values()):
            return Outlet(shapes, None)
        return Outlet(shapes, {name: own_names[id(tensor)] for name, tensor in shapes.items()})

    def shards(self, model: PreTrainedModel, rank: int, ranks: int) -> dict[str, Shard]:
        """The live rows of this rank, by published name. Tensors that are not split are rank 0's.

        They are read by the copy and must not change before it is joined.
        """
        assert self.names is not None
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        shards: dict[str, Shard] = {}
        for published, name in self.names.items():
            tensor = state[name].detach()
            if isinstance(tensor, DTensor) or not rank:
                shards[published] = shard_of(tensor, rank, ranks)
        return shards

    def by_own_names(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Published tensors under the names that the model computes with."""
        assert self.names is not None
        return {self.names[name]: tensor for name, tensor in published.items()}


def whole(state: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Tensors that are held entirely."""
    return {name: Shard(tensor) for name, tensor in state.items()}


def shard_of(tensor: Tensor, rank: int, ranks: int) -> Shard:
    """As `torch.chunk` splits: equal parts, the last ones shorter or empty."""
    if not isinstance(tensor, DTensor):
        return Shard(tensor)
    rows = tensor.to_local()
    share = -(-tensor.shape[0] // ranks)
    first = min(rank * share, tensor.shape[0])
    assert rows.shape[0] == min(share, tensor.shape[0] - first), (rows.shape, tensor.shape)
    return Shard(rows, first)
