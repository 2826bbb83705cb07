"""What a predictor has learned, as bytes: the sums, and the rows in the ring."""

from typing import Any, cast

import msgpack
import numpy as np

from services.scheduler.predictor.features import CELLS, COLUMNS, NUMBERS
from services.scheduler.predictor.regression import Sums
from services.scheduler.predictor.rows import SEEN, Batch, Kept, Ring

FORMAT = "libra-residual-2"
"""Changes whenever columns change their meaning."""


def encode(sums: Sums, ring: Ring, clock: float) -> bytes:
    """All of it; the ring must be written."""
    batch = ring.batch()
    fields: dict[str, Any] = {
        "format": FORMAT,
        "clock": clock,
        "sums_clock": sums.clock,
        "count": sums.count,
        "products": sums.products.tobytes(),
        "moments": sums.moments.tobytes(),
        "kept": [(kept.task, kept.rows, kept.clock) for kept in ring.kept],
        "numbers": batch.numbers.tobytes(),
        "cells": batch.cells.tobytes(),
        "targets": batch.targets.tobytes(),
        "clocks": batch.clocks.tobytes(),
        "seen": batch.seen.tobytes(),
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
            unpacked: Any = msgpack.unpackb(encoded)
        except ValueError as error:
            raise ValueError("not a predictor's state") from error
        fields = cast("dict[str, Any]", unpacked) if isinstance(unpacked, dict) else {}
        if fields.get("format") != FORMAT:
            raise ValueError(f"not a predictor's state of format {FORMAT}")
        self.clock: float = fields["clock"]
        self.sums_clock: float = fields["sums_clock"]
        self.count: float = fields["count"]
        self.products = np.frombuffer(fields["products"]).reshape(COLUMNS, COLUMNS).copy()
        self.moments = np.frombuffer(fields["moments"]).copy()
        rows = cast("list[tuple[str, int, float]]", fields["kept"])
        self.kept = [Kept(task, 0, count, clock) for task, count, clock in rows]
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
