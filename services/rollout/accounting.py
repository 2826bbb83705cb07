"""What an engine holds now, counted by the engine itself."""

import threading
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
    this. Requests begin and end in the event loop; an engine may sample in a thread of its own.
    """

    def __init__(self, kv_tokens: int, now: Callable[[], float]) -> None:
        self._kv_tokens, self._now = kv_tokens, now
        self._lock = threading.Lock()
        self._live: dict[str, LiveRequest] = {}
        self._running = 0
        self._used = 0
        self._decode_tokens = 0
        self._busy_s = self._running_s = self._used_s = 0.0
        self._counted_until_s = 0.0

    def begin(self, request_id: str, context_tokens: int) -> None:
        """The engine takes a request."""
        with self._lock:
            assert request_id not in self._live, f"request {request_id} is already live"
            self._count_time()
            self._live[request_id] = LiveRequest(context_tokens)
            self._used += context_tokens

    def started(self, request_id: str) -> None:
        """The request has a place in the batch. Fine when it is over already."""
        with self._lock:
            self._count_time()
            self._start(request_id)

    def sampled(self, request_id: str, tokens: int) -> None:
        """The request got tokens; from the first one on it is running at the latest."""
        with self._lock:
            self._count_time()
            self._decode_tokens += tokens
            if request := self._start(request_id):
                request.kv_tokens += tokens
                self._used += tokens

    def end(self, request_id: str) -> None:
        """The request is over, however it ended."""
        with self._lock:
            self._count_time()
            request = self._live.pop(request_id)
            self._used -= request.kv_tokens
            self._running -= request.running

    def load(self) -> EngineLoad:
        """The numbers now."""
        with self._lock:
            self._count_time()
            return EngineLoad(
                kv_tokens_used=self._used,
                kv_tokens_free=max(0, self._kv_tokens - self._used),
                running=self._running,
                waiting=len(self._live) - self._running,
                decode_tokens=self._decode_tokens,
                busy_s=self._busy_s,
                running_s=self._running_s,
                kv_tokens_used_s=self._used_s,
            )

    def _start(self, request_id: str) -> LiveRequest | None:
        request = self._live.get(request_id)
        if request and not request.running:
            request.running = True
            self._running += 1
        return request

    def _count_time(self) -> None:
        """Add what was so since the last change."""
        now_s = self._now()
        if self._live:
            passed_s = now_s - self._counted_until_s
            self._busy_s += passed_s
            self._running_s += passed_s * self._running
            self._used_s += passed_s * self._used
        self._counted_until_s = now_s
