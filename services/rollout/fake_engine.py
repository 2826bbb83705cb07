"""A deterministic engine without a model, for simulations and tests. Runs on the loop's clock."""

import asyncio
import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from common.config import BucketConfig, Config
from common.errors import EngineError
from common.messages.coordinator import Manifest
from common.weights import NO_VERSION
from services.rollout.accounting import Accounting
from services.rollout.engine import (
    EngineLoad,
    FinishReason,
    GenerateRequest,
    Generation,
    KvState,
)
from services.rollout.segment import open_checked

Script = Callable[[Sequence[int], int, int], Sequence[int]]
"""(context, seed, version) to the tokens that the policy would sample, up to and including its
end of sequence. Asked once per request, before its first token."""
Decode = Callable[[Sequence[int]], str]

FILELESS = "sim:"
"""Segments named `sim:…` have no file; there is nothing to check."""
PREFIXES_PER_SLOT = 4
"""Contexts that are kept: each request leaves two, with and without what it sampled."""
VOCABULARY = range(32, 127)


def scribble(context: Sequence[int], seed: int, version: int) -> list[int]:
    """The default script: printable characters that depend on every argument."""
    rng = random.Random(f"{version} {seed} {list(context)}")
    return [rng.choice(VOCABULARY) for _ in range(256)]


def characters(tokens: Sequence[int]) -> str:
    """The default tokenizer: a token is a Unicode code point."""
    return "".join(map(chr, tokens))


class FakeEngine:
    """Samples one token per `token_s` for each of at most `slots` requests.

    A context costs `prefill_token_s` for each token that is not cached, and `transfer_token_s`
    for each token of a cache that is taken over.
    `lies_about_applying` reports the new version and goes on with the old weights, as a broken
    reload would: its `digest` and its scores stay what they were.
    """

    def __init__(  # noqa: PLR0913  A fake has many dials.
        self,
        *,
        script: Script = scribble,
        decode: Decode = characters,
        token_s: float = 0.01,
        prefill_token_s: float = 0.0,
        transfer_token_s: float = 0.0,
        slots: int = 32,
        kv_tokens: int = 32768,
        context_tokens_max: int = 4096,
    ) -> None:
        self.version = NO_VERSION
        self.digest = ""
        self.context_tokens_max = context_tokens_max
        self.vocabulary = VOCABULARY.stop
        self.lies_about_applying = False
        self.prefix_hits: Counter[int] = Counter()
        """Requests whose prefix was cached, by the version that had computed it."""
        self.prefill_tokens = 0
        """Context tokens that were not cached."""
        self._script, self._decode, self._token_s = script, decode, token_s
        self._prefill_token_s, self._transfer_token_s = prefill_token_s, transfer_token_s
        self._slots = asyncio.Semaphore(slots)
        self._accounting = Accounting(kv_tokens, _loop_time)
        self._paused = self._asleep = False
        self._prefixes: OrderedDict[tuple[int, ...], None] = OrderedDict()
        """Contexts computed with the applied version, least recently used first."""
        self._prefixes_max = PREFIXES_PER_SLOT * slots
        self._ends: dict[str, asyncio.Event] = {}
        self._broken = "not started"

    @classmethod
    def of(cls, config: Config, bucket: BucketConfig) -> "FakeEngine":
        """With the limits of a configuration."""
        return cls(
            slots=bucket.slots,
            kv_tokens=bucket.kv_tokens,
            context_tokens_max=config.model.context_tokens,
        )

    async def start(self) -> None:
        """Ready at once."""
        self._broken = ""

    async def aclose(self) -> None:
        """Fail what still runs."""
        self.kill("closed")

    def kill(self, reason: str = "killed") -> None:
        """Die: every generation and every later call fails."""
        self._broken = reason
        for end in self._ends.values():
            end.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Follow the script."""
        self._require_version()
        room = self.context_tokens_max - len(request.context)
        if room < 1:
            raise EngineError(f"no room after a context of {len(request.context)} tokens")
        self._ends[request.request_id] = asyncio.Event()
        self._accounting.begin(request.request_id, len(request.context))
        try:
            return await self._generate(request, min(request.max_tokens, room))
        finally:
            self._accounting.end(request.request_id)
            del self._ends[request.request_id]

    async def abort(self, request_id: str) -> None:
        """The generation ends now, or once it has a slot."""
        self._require_alive()
        if end := self._ends.get(request_id):
            end.set()

    async def pause(self) -> None:
        """No token is sampled from now on."""
        self._require_alive()
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        self._require_alive()
        self._paused = False

    async def sleep(self) -> None:
        """Forget the weights and every prefix."""
        self._require_alive()
        assert not self._ends, "requests are running"
        self._prefixes.clear()
        self.version, self.digest, self._asleep = NO_VERSION, "", True

    async def wake(self) -> None:
        """Ready for a version."""
        self._require_alive()
        self._asleep = False

    async def apply_weights(self, manifest: Manifest) -> None:
        """Check the segment where it is a file, and decode with the version from now on."""
        self._require_alive()
        if self._asleep:
            raise EngineError("the engine is asleep")
        if not manifest.segment.startswith(FILELESS):
            open_checked(manifest)
        self._prefixes.clear()
        self.version = manifest.version
        if not self.lies_about_applying:
            self.digest = manifest.digest

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """What `generate` would have reported for these tokens."""
        self._require_version()
        return [self._logprob(tokens[i - 1], tokens[i]) for i in range(1, len(tokens))]

    async def export_kv(self, context: Sequence[int]) -> KvState | None:
        """A context is its own cache."""
        self._require_version()
        if tuple(context) not in self._prefixes:
            return None
        return KvState(context=list(context), version=self.version, payload=self.digest.encode())

    async def import_kv(self, state: KvState) -> bool:
        """Taken when it was made with the same weights."""
        self._require_version()
        if state.version != self.version or state.payload != self.digest.encode():
            return False
        await asyncio.sleep(self._transfer_token_s * len(state.context))
        if state.version != self.version:
            return False
        self._keep(state.context)
        return True

    def load(self) -> EngineLoad:
        """Own accounting."""
        return self._accounting.load()

    async def _generate(self, request: GenerateRequest, max_tokens: int) -> Generation:
        submitted_s = first_s = _loop_time()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        script: Sequence[int] = ()
        reason = None
        async with self._slots:
            self._accounting.started(request.request_id)
            await self._prefill(request.context)
            while reason is None and await self._next_token(request.request_id):
                if not tokens:
                    script = self._begin(request)
                    first_s = _loop_time()
                previous = tokens[-1] if tokens else request.context[-1]
                tokens.append(script[len(tokens)])
                logprobs.append(self._logprob(previous, tokens[-1]))
                versions.append(self.version)
                self._accounting.sampled(request.request_id, 1)
                reason = self._finish_reason(request, tokens, len(script), max_tokens)
        self._keep(request.context)
        self._keep((*request.context, *tokens))
        return Generation(
            tokens,
            logprobs,
            versions,
            finish_reason=reason or FinishReason.ABORTED,
            queue_s=first_s - submitted_s,
            decode_s=_loop_time() - first_s,
        )

    async def _next_token(self, request_id: str) -> bool:
        """Wait for as long as a token takes, or a pause lasts; False when aborted."""
        while True:
            try:
                async with asyncio.timeout(self._token_s):
                    await self._ends[request_id].wait()
            except TimeoutError:
                if not self._paused:
                    return True
            else:
                self._require_alive()
                return False

    async def _prefill(self, context: Sequence[int]) -> None:
        """Look the prefix up, and take the time that the rest of the context costs."""
        tokens = tuple(context)
        lengths = {len(prefix) for prefix in self._prefixes if len(prefix) <= len(tokens)}
        cached = [length for length in lengths if tokens[:length] in self._prefixes]
        if cached:
            self.prefix_hits[self.version] += 1
        missing = len(tokens) - max(cached, default=0)
        self.prefill_tokens += missing
        await asyncio.sleep(self._prefill_token_s * missing)

    def _keep(self, context: Sequence[int]) -> None:
        tokens = tuple(context)
        self._prefixes[tokens] = None
        self._prefixes.move_to_end(tokens)
        while len(self._prefixes) > self._prefixes_max:
            self._prefixes.popitem(last=False)

    def _begin(self, request: GenerateRequest) -> Sequence[int]:
        """Ask the script, as an engine samples its first token: with the version of then."""
        script = self._script(request.context, request.seed, self.version)
        assert script, "a script samples at least one token"
        return script

    def _finish_reason(
        self, request: GenerateRequest, tokens: list[int], script_tokens: int, max_tokens: int
    ) -> FinishReason | None:
        text = self._decode(tokens) if request.stop else ""
        if len(tokens) == script_tokens or any(stop in text for stop in request.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) == max_tokens else None

    def _logprob(self, previous: int, token: int) -> float:
        """Depends on the weights that are really applied, as a canary must notice."""
        named = f"{self.digest} {previous} {token}".encode()
        drawn = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little")
        return -0.001 - drawn / 2**30

    def _require_alive(self) -> None:
        if self._broken:
            raise EngineError(self._broken)

    def _require_version(self) -> None:
        self._require_alive()
        if self.version == NO_VERSION:
            raise EngineError("no policy version is applied yet")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
