"""An engine that says what the test tells it to, and remembers the contexts it was given."""

import asyncio
from collections.abc import Callable, Sequence

from common.errors import EngineError
from common.messages.coordinator import Manifest
from common.weights import NO_VERSION
from services.rollout.engine import (
    EngineLoad,
    FinishReason,
    GenerateRequest,
    Generation,
    KvState,
)

Write = Callable[[GenerateRequest], Sequence[int] | Exception]
"""The tokens that the policy samples next; too many are cut with `LENGTH`."""


class ScriptedEngine:
    """Keeps the engine protocol; tokens come from a function."""

    def __init__(
        self, write: Write, *, version: int = NO_VERSION, context_tokens: int = 4096
    ) -> None:
        self.write = write
        self.version = version
        self.digest = f"digest-{version}"
        self.vocabulary = 128
        self.context_tokens_max = context_tokens
        self.requests: list[GenerateRequest] = []
        self.generations: list[Generation] = []
        self.aborted: list[str] = []
        self.broken = False
        self.start_s = self.apply_s = 0.0
        self.token_s = 0.0005
        self.apply_error: Exception | None = None
        self.closed = False
        self._running = 0
        self._busy_s = 0.0

    async def start(self) -> None:
        await asyncio.sleep(self.start_s)

    async def aclose(self) -> None:
        self.closed = True

    async def generate(self, request: GenerateRequest) -> Generation:
        assert self.version != NO_VERSION
        assert request.request_id not in {r.request_id for r in self.requests}
        self.requests.append(request)
        written = self.write(request)
        if isinstance(written, Exception):
            raise written
        tokens = list(written)[: request.max_tokens]
        self._running += 1
        try:
            await asyncio.sleep(self.token_s * len(tokens))
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        finally:
            self._running -= 1
        self._busy_s += self.token_s * len(tokens)
        cut = len(tokens) < len(written)
        generation = Generation(
            tokens=tokens,
            logprobs=[-float(token % 7) for token in tokens],
            versions=[self.version] * len(tokens),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            queue_s=0.0,
            decode_s=self.token_s * len(tokens),
        )
        self.generations.append(generation)
        return generation

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        self.version = NO_VERSION

    async def wake(self) -> None: ...

    async def apply_weights(self, manifest: Manifest) -> None:
        await asyncio.sleep(self.apply_s)
        if self.apply_error:
            raise self.apply_error
        self.version, self.digest = manifest.version, manifest.digest

    async def score(self, tokens: Sequence[int]) -> list[float]:
        if self.broken:
            raise EngineError("the engine is dead")
        return [0.0] * (len(tokens) - 1)

    async def export_kv(self, context: Sequence[int]) -> KvState | None:
        return None

    async def import_kv(self, state: KvState) -> bool:
        return False

    def load(self) -> EngineLoad:
        return EngineLoad(
            kv_tokens_used=0,
            kv_tokens_free=1000,
            running=self._running,
            waiting=0,
            decode_tokens=sum(len(made.tokens) for made in self.generations),
            busy_s=self._busy_s,
        )
