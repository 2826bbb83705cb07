"""What a predictor has learned, as bytes: the sums, and the rows in the ring."""

from typing import Any, cast

import msgpack
import numpy as np

from services.scheduler.predictor.features import CELLS, COLUMNS, NUMBERS
from services.scheduler.predictor.regression import Sums
from services.scheduler.predictor.rows import SEEN, Batch, Ring

FORMAT = "libra-residual-1"
"""Changes whenever columns change their meaning."""


def encode(sums: Sums, ring: Ring, clock: float) -> bytes:
    """All of it; the ring must be written."""
    assert ring.written == ring.total
    order = ring.newest(ring.rows_max)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "clock": clock,
        "sums_clock": sums.clock,
        "count": sums.count,
        "products": sums.products.tobytes(),
        "moments": sums.moments.tobytes(),
        "kept": [(kept.task, kept.rows, kept.clock) for kept in ring.kept],
        "numbers": ring.numbers[order].tobytes(),
        "cells": ring.cells[order].tobytes(),
        "targets": ring.targets[order].tobytes(),
        "clocks": ring.clocks[order].tobytes(),
        "seen": ring.seen[order].tobytes(),
    }
    return msgpack.packb(fields)


class State:
    """What `encode` gave."""

    def __init__(self, encoded: bytes) -> None:
        """Read it.

        Raises:
            ValueError: it is something else, or of another version.
        """
        try:
            fields = msgpack.unpackb(encoded)
        except ValueError as error:
            raise ValueError("not a predictor's state") from error
        fields = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
        if fields.get("format") != FORMAT:
            raise ValueError(f"not a predictor's state of format {FORMAT}")
        self.clock: float = fields["clock"]
        self.sums_clock: float = fields["sums_clock"]
        self.count: float = fields["count"]
        self.products = np.frombuffer(fields["products"]).reshape(COLUMNS, COLUMNS).copy()
        self.moments = np.frombuffer(fields["moments"]).copy()
        self.kept: list[tuple[str, int, float]] = [tuple(kept) for kept in fields["kept"]]
        numbers = np.frombuffer(fields["numbers"], np.float32).reshape(-1, NUMBERS)
        self.batch = Batch(
            numbers,
            np.frombuffer(fields["cells"], np.uint16).reshape(-1, CELLS),
            np.frombuffer(fields["targets"]),
            np.frombuffer(fields["clocks"]),
            np.frombuffer(fields["seen"]).reshape(-1, SEEN),
            np.zeros(len(numbers), np.int64),
        )

    def sums(self, half_life: float) -> Sums:
        """Its sums."""
        sums = Sums(half_life)
        sums.clock, sums.count = self.sums_clock, self.count
        sums.products, sums.moments = self.products, self.moments
        return sums
