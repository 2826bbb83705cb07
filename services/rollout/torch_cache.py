"""The KV cache of the torch engine: one row per sequence, each as long as it is."""

from collections.abc import Sequence

import torch
from torch import Tensor

GROWTH_TOKENS = 64
"""Rows grow in steps of this, so that not every token reallocates."""


class SlotCache:
    """Keys and values of all layers, addressed by row and position.

    Takes the place of a transformers cache: attention layers call `update`, and get back the
    rows that `select` named before the forward pass. Positions past a row's tokens hold rubbish
    that the attention mask hides; it is finite, since a masked NaN would still spread.
    """

    def __init__(self, rows: int) -> None:
        self._rows, self._length = rows, GROWTH_TOKENS
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._first, self._end = 0, 0
        self._index: tuple[Tensor, slice, Tensor] | None = None

    def select(self, first: int, positions: Tensor) -> None:
        """The next forward pass is about rows `first…` at `positions` (rows by tokens)."""
        rows = torch.arange(first, first + len(positions), device=positions.device)
        self._first, self._end = first, first + len(positions)
        self._index = (rows[:, None], slice(None), positions)
        self._reach = int(positions.max()) + 1
        self._reserve(self._reach)

    @property
    def reach(self) -> int:
        """Positions that the selected rows attend over."""
        return self._reach

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        """Store what a layer computed (rows, heads, tokens, size); return all it attends to."""
        if layer == len(self._layers):
            shape = (self._rows, keys.shape[1], self._length, keys.shape[3])
            self._layers.append((keys.new_zeros(shape), values.new_zeros(shape)))
        view = slice(self._first, self._end), slice(None), slice(self._reach)
        stored = self._layers[layer]
        for tensor, new in zip(stored, (keys, values), strict=True):
            tensor[self._index] = new.transpose(1, 2)
        return stored[0][view], stored[1][view]

    def get_seq_length(self, *_: object) -> int:
        """Some models ask; positions are always given, so it does not matter."""
        return 0

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a != b:
            for tensor in self._tensors():
                tensor[[a, b]] = tensor[[b, a]]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one row to another."""
        for tensor in self._tensors():
            tensor[target, :, :length] = tensor[source, :, :length]

    def read(self, row: int, length: int) -> list[Tensor]:
        """Copies of the first positions of a row: keys and values of each layer in turn."""
        rows = [tensor[row, :, :length] for tensor in self._tensors()]
        return [row.to("cpu", copy=True).contiguous() for row in rows]

    def write(self, row: int, content: Sequence[Tensor], length: int) -> bool:
        """Inverse of `read`; False when the content is not of this model and length.

        The shapes are known from the first forward pass on.
        """
        tensors = self._tensors()
        if len(content) != len(tensors) or not all(
            new.dtype == old.dtype and new.shape == (old.shape[1], length, old.shape[3])
            for old, new in zip(tensors, content, strict=True)
        ):
            return False
        self._reserve(length)
        for old, new in zip(self._tensors(), content, strict=True):
            old[row, :, :length] = new
        return True

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer]

    def _reserve(self, length: int) -> None:
        if length <= self._length:
            return
        self._length = -(-length // GROWTH_TOKENS) * GROWTH_TOKENS
        self._layers = [(self._grown(keys), self._grown(values)) for keys, values in self._layers]

    def _grown(self, tensor: Tensor) -> Tensor:
        rows, heads, length, size = tensor.shape
        grown = tensor.new_zeros((rows, heads, self._length, size))
        grown[:, :, :length] = tensor
        return grown
