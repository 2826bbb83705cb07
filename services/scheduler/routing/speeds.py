"""How fast each bucket decodes and prefills, learned from the turns that it reports.

A decoding step of an engine takes about `fixed + per_request × batch + per_kv_token × KV tokens`
seconds: weights are read once, each request costs engine time, and attention reads its cache. The
three are found by least squares over decayed sums, leaning on a guess from the parallelism: what
the data cannot tell apart keeps the proportions of the guess. No clock, no I/O.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.routing.fleet import BucketShape
from services.scheduler.routing.policy import TurnMeasure

DECAY = 0.998
"""Of the sums with each turn: they are about the last 500."""
PRIOR_TURNS = 4.0
"""The guess weighs as much as so many turns."""
SOLVED_EVERY = 16
"""Turns between two solutions; the coefficients move slowly."""
OUTLIER = 4.0
"""A turn counts as at most so many times slower, or faster, than expected."""
TRUSTED_TURNS = 16
"""Before so many turns nothing counts as an outlier."""
SETTLED_TURNS = 256
"""From so many turns of a bucket on, one in four is enough…"""
SCATTER = 0x9E3779B1
SAMPLE_MASK = 0x3000_0000
"""…picked by a multiplicative hash, lest workers that take turns be never seen."""
SCALE_WEIGHT = 0.05
"""Of the newest turn in the ratio of the measured to the guessed, over all buckets."""
PEER_WEIGHT = 0.05
"""Of the newest turn in the factor by which a worker is slower than its bucket."""
SWEEPS = 12
"""Of the solver; three unknowns that are nearly right already need few."""
SHARE_MIN = 0.02
"""No coefficient falls below this share of its guess."""
PREFILL_TOKENS_MIN = 64
"""Shorter prefills say nothing: waiting drowns them."""
PREFILL_WEIGHT_DOWN = 0.2
PREFILL_WEIGHT_UP = 0.02
"""The time to the first token includes waits, so low measurements tell more than high ones."""


class StepTime(NamedTuple):
    """Seconds that a bucket's engine takes."""

    fixed_s: float
    """For a decoding step, whatever is in it."""
    per_request_s: float
    """More for each request in the batch."""
    per_kv_token_s: float
    """More for each token of context of these requests."""
    prefill_token_s: float
    """To compute one token of context."""

    def step_s(self, running: float, kv_tokens: float) -> float:
        """Seconds of one step, so per token of each request."""
        return self.fixed_s + self.per_request_s * running + self.per_kv_token_s * kv_tokens


def guess(tensor_parallel: int) -> StepTime:
    """A model of 14 billion parameters on accelerators of 2 TB/s and 312 TFLOPS.

    Absolute values hardly matter (they are scaled by the first turns); the proportions between
    the parts and between buckets do. Source: the usual roofline, exponents as measured for
    tensor parallelism inside one node.
    """
    weights = tensor_parallel**0.9
    return StepTime(
        fixed_s=0.004 + 0.019 / weights,
        per_request_s=0.00015,
        per_kv_token_s=1.15e-7 / tensor_parallel,
        prefill_token_s=1.6e-4 / tensor_parallel**0.93,
    )


class BucketSpeed:
    """The estimate for one bucket."""

    def __init__(self, tensor_parallel: int) -> None:
        self._guess = guess(tensor_parallel)
        self._now = self._guess
        self.turns = 0
        self._products = [0.0] * 6
        """Decayed sums of the products of the parts' shares: 00 01 02 11 12 22."""
        self._targets = [0.0] * 3
        """Decayed sums of each share times the measured ratio."""
        self._factors = [1.0, 1.0, 1.0]
        self._prefill_factor = 1.0

    @property
    def now(self) -> StepTime:
        """The present estimate."""
        return self._now

    def measured(self, measure: TurnMeasure) -> float:
        """Take in how long a step took; returns the ratio to the guess."""
        base = self._guess
        parts = (
            base.fixed_s,
            base.per_request_s * measure.running,
            base.per_kv_token_s * measure.kv_tokens_used,
        )
        guessed = parts[0] + parts[1] + parts[2]
        ratio = measure.decode_s / (measure.action_tokens - 1) / guessed
        x, y, z = parts[0] / guessed, parts[1] / guessed, parts[2] / guessed
        if self.turns >= TRUSTED_TURNS:
            factors = self._factors
            expected = factors[0] * x + factors[1] * y + factors[2] * z
            ratio = min(max(ratio, expected / OUTLIER), expected * OUTLIER)
        xx, xy, xz, yy, yz, zz = self._products
        self._products = [
            xx * DECAY + x * x,
            xy * DECAY + x * y,
            xz * DECAY + x * z,
            yy * DECAY + y * y,
            yz * DECAY + y * z,
            zz * DECAY + z * z,
        ]
        u, v, w = self._targets
        self._targets = [u * DECAY + x * ratio, v * DECAY + y * ratio, w * DECAY + z * ratio]
        self.turns += 1
        return ratio

    def prefilled(self, seconds_per_token: float) -> None:
        """Take in how long a prefill took, the wait before it included."""
        ratio = seconds_per_token / self._guess.prefill_token_s
        down = ratio < self._prefill_factor
        weight = PREFILL_WEIGHT_DOWN if down else PREFILL_WEIGHT_UP
        capped = min(ratio, OUTLIER * self._prefill_factor)
        self._prefill_factor += weight * (capped - self._prefill_factor)

    def solve(self, scale: float) -> None:
        """Find the coefficients anew, those without data at `scale` times their guess.

        Gauss-Seidel on the normal equations with a ridge, kept positive.
        """
        xx, xy, xz, yy, yz, zz = self._products
        u, v, w = self._targets
        # The ridge is by share of the guess, and the shares add up to one: a third each.
        ridge = PRIOR_TURNS / 9
        low = SHARE_MIN * scale
        f, g, h = self._factors
        for _ in range(SWEEPS):
            f = max(low, (u + ridge * scale - xy * g - xz * h) / (xx + ridge))
            g = max(low, (v + ridge * scale - xy * f - yz * h) / (yy + ridge))
            h = max(low, (w + ridge * scale - xz * f - yz * g) / (zz + ridge))
        self._factors = [f, g, h]
        base = self._guess
        self._now = StepTime(
            base.fixed_s * f,
            base.per_request_s * g,
            base.per_kv_token_s * h,
            base.prefill_token_s * self._prefill_factor,
        )

    def dump(self) -> list[float]:
        """All that was learned."""
        return [self.turns, self._prefill_factor, *self._products, *self._targets]

    def load(self, dumped: list[float], scale: float) -> None:
        """Take over what `dump` gave."""
        self.turns, self._prefill_factor = int(dumped[0]), dumped[1]
        self._products, self._targets = dumped[2:8], dumped[8:11]
        self.solve(scale)


class Speeds:
    """The estimates for all buckets, and how much slower single workers are."""

    def __init__(self) -> None:
        self._buckets: dict[str, BucketSpeed] = {}
        self._scale = 1.0
        """Measured by guessed, over all buckets: what a bucket without turns is taken to be."""
        self._turns = 0
        self._seen = 0
        self.slower: dict[str, float] = {}
        """By peer: its step time by that of its bucket."""
        self.revision = 0
        """Grows whenever an estimate changes."""
        self._dumped: dict[str, list[float]] = {}
        """Loaded estimates of buckets that were not added yet."""

    def add(self, shapes: Iterable[BucketShape]) -> None:
        """Know these buckets from now on; those known already stay as they are."""
        for shape in shapes:
            if shape.name in self._buckets:
                continue
            speed = self._buckets[shape.name] = BucketSpeed(shape.tensor_parallel)
            dumped = self._dumped.pop(shape.name, None)
            if dumped is not None:
                speed.load(dumped, self._scale)
            else:
                speed.solve(self._scale)
            self.revision += 1

    def of(self, bucket: str) -> StepTime:
        """The present estimate for a bucket; for an unknown one that of a single device."""
        speed = self._buckets.get(bucket)
        return speed.now if speed is not None else guess(1)

    def turn_measured(self, measure: TurnMeasure) -> None:
        """Learn from one turn. Turns that do not say enough are passed over."""
        speed = self._buckets.get(measure.bucket)
        if speed is None:
            return
        self._seen += 1
        if speed.turns >= SETTLED_TURNS and self._seen * SCATTER & SAMPLE_MASK:
            return
        if measure.prefill_tokens >= PREFILL_TOKENS_MIN and measure.queue_s > 0:
            speed.prefilled(measure.queue_s / measure.prefill_tokens)
        if measure.action_tokens < 2 or measure.running < 1 or measure.decode_s <= 0:
            return
        ratio = speed.measured(measure)
        self._turns += 1
        weight = max(SCALE_WEIGHT, 1 / self._turns)
        self._scale += weight * (ratio - self._scale)
        expected_s = speed.now.step_s(measure.running, measure.kv_tokens_used)
        slower = self.slower.get(measure.peer, 1.0)
        took = measure.decode_s / (measure.action_tokens - 1) / expected_s
        took = min(max(took, slower / OUTLIER), slower * OUTLIER)
        self.slower[measure.peer] = slower + PEER_WEIGHT * (took - slower)
        if speed.turns % SOLVED_EVERY == 0 or speed.turns <= 4:
            self._solve(speed)

    def _solve(self, speed: BucketSpeed) -> None:
        speed.solve(self._scale)
        for other in self._buckets.values():
            if other.turns == 0:
                other.solve(self._scale)
        self.revision += 1

    def forget(self, peers: Iterable[str]) -> None:
        """These workers are gone."""
        for peer in peers:
            self.slower.pop(peer, None)

    def dump(self) -> dict[str, list[float]]:
        """All that was learned of buckets; workers are new after a restart."""
        learned = {name: speed.dump() for name, speed in self._buckets.items() if speed.turns}
        return {**self._dumped, **learned, "": [self._scale, self._turns]}

    def load(self, dumped: dict[str, list[float]]) -> None:
        """Take over what `dump` gave."""
        rest = dict(dumped)
        self._scale, turns = rest.pop("")
        self._turns = int(turns)
        self._dumped = rest
        for name in [name for name in self._buckets if name in rest]:
            self._buckets[name].load(rest.pop(name), self._scale)
        self.revision += 1
