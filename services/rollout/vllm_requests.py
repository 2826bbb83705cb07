"""What goes into vLLM and what comes out of it. Imports no vLLM until it builds parameters."""

# vLLM is untyped where it matters here; strict mode would only repeat that.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import EngineError
from services.rollout.engine import FinishReason, GenerateRequest, Generation

STREAM_INTERVAL = 8
"""Tokens between two outputs of a request: each costs the event loop a task switch."""
FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


@dataclass
class Sampled:
    """Collects the outputs of one request."""

    submitted_s: float
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    first_s: float | None = None
    last_s: float = 0.0

    def add(self, completion: Any, now: float) -> None:
        """One delta. The last one names the version of every token.

        The engine core stamps its outputs with the version that it decodes with, so tokens that
        were still on their way when the core was paused keep the old one.
        """
        if completion.token_ids:
            self.first_s = now if self.first_s is None else self.first_s
            self.last_s = now
        self.tokens += completion.token_ids
        self.logprobs += [
            position[token].logprob
            for token, position in zip(completion.token_ids, completion.logprobs or [], strict=True)
        ]
        if completion.finish_reason is not None:
            self.finish_reason = FINISH_REASONS.get(completion.finish_reason)
            for span in completion.weight_versions or []:
                self.versions += [int(span.version)] * (span.end - span.start)

    def generation(self) -> Generation:
        """The whole, once the last delta was added."""
        if self.finish_reason is None:
            raise EngineError("vLLM ended the request with an error")
        assert len(self.tokens) == len(self.logprobs) == len(self.versions), "a delta was lost"
        first_s = self.submitted_s if self.first_s is None else self.first_s
        return Generation(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish_reason,
            queue_s=first_s - self.submitted_s,
            decode_s=max(0.0, self.last_s - first_s),
        )


def sampling_params(request: GenerateRequest, max_tokens: int) -> Any:
    """One generation, in vLLM's words."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        logprobs=0,
        stop=list(request.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.DELTA,
        stream_interval=STREAM_INTERVAL,
    )


def rank_problem(version: int, digest: str, ranks: Sequence[Sequence[Any]]) -> str:
    """What is wrong after an update, given each rank's version and digest; empty if nothing is.

    Ranks that differ would decode one token with slices of two versions.
    """
    behind = [n for n, applied in enumerate(ranks) if tuple(applied) != (version, digest)]
    if not behind:
        return ""
    found = ", ".join(f"rank {n} holds {ranks[n][0]} ({str(ranks[n][1])[:12]})" for n in behind)
    return f"version {version} ({digest[:12]}) did not reach every rank: {found}"
