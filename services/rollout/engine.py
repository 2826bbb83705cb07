"""The engine protocol: token ids in; token ids, log-probabilities and versions out.

Three engines keep it, under the same contract tests: `vllm_engine`, `torch_engine` and
`fake_engine`. The rollout loop knows nothing else of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from common.messages.coordinator import Manifest


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """An end-of-sequence token or a stop string was sampled; it is part of the tokens."""
    LENGTH = "length"
    """`max_tokens` was reached."""
    ABORTED = "aborted"
    """`abort` was called; the tokens so far are returned."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation: continue `context` until a stop or `max_tokens`."""

    request_id: str
    context: Sequence[int]
    """All token ids so far; at least one."""
    max_tokens: int
    temperature: float
    """> 0, or 0 for greedy decoding."""
    seed: int
    stop: tuple[str, ...] = ()
    """Strings that end the generation; the sampled tokens that complete one are kept."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What the policy sampled. The three lists have equal length."""

    tokens: list[int]
    logprobs: list[float]
    """Of each sampled token under the distribution it was sampled from (temperature applied;
    at temperature 0 under the unscaled distribution)."""
    versions: list[int]
    """Policy version whose weights computed the token's distribution."""
    finish_reason: FinishReason
    queue_s: float
    """Seconds before its first token was computed."""
    decode_s: float
    """Seconds from then to the last token."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine holds now."""

    kv_tokens_used: int
    kv_tokens_free: int
    running: int
    waiting: int
    decode_tokens: int
    """Tokens sampled since start."""
    busy_s: float
    """Seconds since start in which at least one request was there."""
    running_s: float = 0.0
    """Seconds since start, each times the requests in the batch then."""
    kv_tokens_used_s: float = 0.0
    """Seconds since start, each times `kv_tokens_used` then."""


@dataclass(frozen=True, slots=True)
class KvState:
    """KV cache of one context, as opaque bytes of one engine type and version."""

    context: Sequence[int]
    """The tokens whose cache it is."""
    version: int
    payload: bytes


class Engine(Protocol):
    """One model on its devices. All methods are called from one event loop.

    Raises:
        EngineError: from any method when the engine died or failed the request.
    """

    version: int
    """Applied policy version; `NO_VERSION` until the first `apply_weights`, and until then
    `generate` refuses."""
    digest: str
    """Of the applied version, by what lies in the engine's memory after the swap."""
    context_tokens_max: int
    """Longest context plus generation."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids; known once started."""
        ...

    async def start(self) -> None:
        """Load the model and be ready for `apply_weights`."""
        ...

    async def aclose(self) -> None:
        """Free everything, child processes included. Idempotent."""
        ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue one context. Cancelling the await aborts the request.

        What was computed is kept for a while, least recently used first out: a trajectory's next
        turn, and `export_kv`, find it.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a generation early; its `generate` returns what it has. Unknown ids are fine."""
        ...

    async def pause(self) -> None:
        """Stop between two decode steps; running requests keep their place."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def sleep(self) -> None:
        """Free the devices: caches, and weights where the engine can. Idempotent.

        No request is running. `version` is `NO_VERSION` from then on.
        """
        ...

    async def wake(self) -> None:
        """Take the devices again, for `apply_weights` and then `generate`. Idempotent.

        Room for caches is taken only after the weights: while weights change hands there is never
        more on the devices than one tenant's own peak.
        """
        ...

    async def apply_weights(self, manifest: Manifest) -> None:
        """Swap a version in between two decode steps; running requests go on with it.

        Checks every chunk against the manifest first. Caches of prefixes computed with an
        older version are never used for new requests.

        Raises:
            ShardCorrupt: the bytes differ from the manifest; the old version stays.
            VersionGone: the segment no longer exists; the old version stays.
        """
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of tokens[1:] given what precedes each, at temperature 1.

        The same numbers that the trainer computes from the same weights; for canaries, tests
        and `libra bench onpolicy`.
        """
        ...

    async def export_kv(self, context: Sequence[int]) -> KvState | None:
        """The KV cache of a context, or of all but its last token; None means recompute."""
        ...

    async def import_kv(self, state: KvState) -> bool:
        """Take over a KV cache made with the same version; False means recompute."""
        ...

    def load(self) -> EngineLoad:
        """What the engine holds now. Cheap; no I/O."""
        ...
