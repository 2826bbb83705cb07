"""What an engine holds now, counted by the engine itself."""

from collections.abc import Callable

from services.rollout.engine import EngineLoad


class LiveRequest:
    """One request between `begin` and `end`."""

    def __init__(self, context_tokens: int) -> None:
        self.kv_tokens = context_tokens
        self.running = False


class Accounting:
    """Counts tokens of live requests, and the time in which there were any.

    KV tokens are the contexts and sampled tokens of all live requests, waiting ones included:
    what they hold or will hold. Shared prefixes are counted for each, so the truth is at most
    this.
    """

    def __init__(self, kv_tokens: int, now: Callable[[], float]) -> None:
        self._kv_tokens, self._now = kv_tokens, now
        self._live: dict[str, LiveRequest] = {}
        self._decode_tokens = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    def begin(self, request_id: str, context_tokens: int) -> None:
        """The engine takes a request."""
        assert request_id not in self._live, f"request {request_id} is already live"
        if not self._live:
            self._busy_since = self._now()
        self._live[request_id] = LiveRequest(context_tokens)

    def sampled(self, request_id: str, tokens: int) -> None:
        """The request got tokens; from the first one on it is running."""
        self._decode_tokens += tokens
        if request := self._live.get(request_id):
            request.running = True
            request.kv_tokens += tokens

    def end(self, request_id: str) -> None:
        """The request is over, however it ended."""
        del self._live[request_id]
        if not self._live:
            self._busy_s += self._now() - self._busy_since

    def load(self) -> EngineLoad:
        """The numbers now."""
        live = list(self._live.values())
        used = sum(request.kv_tokens for request in live)
        running = sum(request.running for request in live)
        return EngineLoad(
            kv_tokens_used=used,
            kv_tokens_free=max(0, self._kv_tokens - used),
            running=running,
            waiting=len(live) - running,
            decode_tokens=self._decode_tokens,
            busy_s=self._busy_s + (self._now() - self._busy_since if live else 0.0),
        )
