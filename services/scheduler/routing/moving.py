"""What it costs to move a trajectory's context: by its KV cache, or by computing it again.

Both are learned per pair of buckets from the moves that were made; the recompute also from what
the target's bucket needs for a prefill. No clock, no I/O.
"""

from typing import Any, NamedTuple

from services.scheduler.routing.policy import MoveMeasure

KV_FIXED_S = 0.2
"""Guess of what a KV transfer takes however short it is: two requests, and the chunks' start."""
KV_TOKEN_S = 1.8e-5
"""Guess per token: 40,000 tokens in 0.73 s between nodes, as published."""
DECAY = 0.95
"""Of what is known with each move: about the last 20 of the pair."""
PRIOR_TOKENS = 4000.0
"""The guess weighs as much as moves of so many tokens."""
WORKS_WEIGHT = 0.2
"""Of the newest move in the share of those that were meant to go by KV and did."""
WORKS_MIN = 0.3
"""A transfer that works less often is not tried any more…"""
WORKS_FORGIVEN = 0.002
"""…until that share has grown back by so much with each move: the engine may have learned it."""


BY_CHOICE = ("", "cheaper", "no_source", "local")
"""Reasons of recomputes that say nothing of whether a transfer would have worked."""
FETCH_LOST = ("source_gone", "refused", "too_slow", "too_large", "corrupt", "engine")
"""Reasons of recomputes whose time is in part that of a transfer that came to nothing."""


class MovePath(NamedTuple):
    """The cheaper way, and what it is expected to take."""

    path: str
    """`kv` or `recompute`."""
    seconds: float


class _Ratio:
    """Seconds per token from decayed sums."""

    __slots__ = ("seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds = self.seconds * DECAY + seconds
        self.tokens = self.tokens * DECAY + tokens


class _Pair:
    """What is known of one pair of buckets."""

    __slots__ = ("kv", "recompute", "works")

    def __init__(self) -> None:
        self.kv = _Ratio()
        self.recompute = _Ratio()
        self.works = 1.0
        """Share of the moves meant to go by KV that did."""


class MoveCosts:
    """The estimates for all pairs of buckets."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def cheaper(self, source: str, target: str, tokens: int, prefill_token_s: float) -> MovePath:
        """The better way to bring so many tokens from one bucket to another.

        Args:
            source: bucket that holds the context.
            target: bucket that is to get it.
            tokens: of context.
            prefill_token_s: what the target needs to compute one.
        """
        pair = self._pairs.get((source, target))
        if pair is None:
            kv_s = KV_FIXED_S + tokens * KV_TOKEN_S
            again_s = tokens * prefill_token_s
        else:
            kv_s = self._kv_s(pair, tokens)
            known, prior = pair.recompute, PRIOR_TOKENS * prefill_token_s
            again_s = tokens * (known.seconds + prior) / (known.tokens + PRIOR_TOKENS)
            if pair.works < WORKS_MIN:
                return MovePath("recompute", again_s)
            kv_s = pair.works * kv_s + (1 - pair.works) * again_s
        return MovePath("kv", kv_s) if kv_s < again_s else MovePath("recompute", again_s)

    def _kv_s(self, pair: _Pair, tokens: int) -> float:
        """The guess until moves were seen; then what they took, in proportion to tokens."""
        known = pair.kv
        if known.tokens <= 0:
            return KV_FIXED_S + tokens * KV_TOKEN_S
        return tokens * known.seconds / known.tokens

    def move_measured(self, measure: MoveMeasure) -> None:
        """Learn from one move."""
        if measure.tokens <= 0 or measure.seconds < 0:
            return
        pair = self._pairs.setdefault((measure.source_bucket, measure.target_bucket), _Pair())
        if measure.path == "kv":
            pair.works += WORKS_WEIGHT * (1 - pair.works)
            pair.kv.add(measure.seconds, measure.tokens)
            return
        if measure.reason not in FETCH_LOST:
            pair.recompute.add(measure.seconds, measure.tokens)
        if pair.works < WORKS_MIN:
            pair.works += WORKS_FORGIVEN
        elif measure.reason not in BY_CHOICE:
            pair.works -= WORKS_WEIGHT * pair.works

    def dump(self) -> list[list[Any]]:
        """All that was learned."""
        return [
            [*key, p.kv.seconds, p.kv.tokens, p.recompute.seconds, p.recompute.tokens, p.works]
            for key, p in self._pairs.items()
        ]

    def load(self, dumped: list[list[Any]]) -> None:
        """Take over what `dump` gave."""
        for source, target, kv_s, kv_tokens, again_s, again_tokens, works in dumped:
            pair = self._pairs[source, target] = _Pair()
            pair.kv.seconds, pair.kv.tokens = kv_s, kv_tokens
            pair.recompute.seconds, pair.recompute.tokens = again_s, again_tokens
            pair.works = works
