"""Gives the KV caches of trajectories that have left to the workers that have them now.

An export is kept for as long as its chunks are being read, in bounded memory and time. A worker
that stops waits a moment for those who may still ask.
"""

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass

import xxhash

from common.errors import EngineError, Refusal, RequestRefused
from common.messages.rollout import FetchKv, KvChunk
from common.trajectory import pack_tokens, unpack_tokens
from services.rollout.engine import Engine, KvState
from services.rollout.kv_client import KV_BYTES_MAX
from services.rollout.moves import Miss

KV_CHUNK_BYTES = 4 << 20
"""Of one reply: a few milliseconds of the event loop."""
EXPORTS_MAX = 8
"""At work at once; more are refused, and their contexts are computed again."""
KEPT_MAX = 16
KEPT_BYTES_MAX = KV_BYTES_MAX
KEPT_S = 15.0
"""Longer than any fetch takes: what is older, nobody reads any more."""
QUIET_S = 1.0
"""A worker that was given a trajectory asks at once; after so long without a word nobody will."""
GRACE_S = 4.0
"""For all transfers of a stopping worker together; it must still stop in time."""
SERVED_REMEMBERED = 256

Key = tuple[str, int, bytes]
"""Of trajectory, version and context."""


@dataclass(frozen=True, slots=True)
class _Export:
    content: bytes
    digest: str
    made_s: float


class KvServer:
    """Answers `FetchKv`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: OrderedDict[Key, _Export] = OrderedDict()
        """Oldest first."""
        self._at_work = 0
        self._asked = asyncio.Event()
        self._expected: set[str] = set()
        self._served: deque[str] = deque(maxlen=SERVED_REMEMBERED)

    @property
    def kept_bytes(self) -> int:
        """Memory that exports take."""
        return sum(len(export.content) for export in self._kept.values())

    async def fetch(self, _sender: str, request: FetchKv) -> KvChunk:
        """One chunk of a cache, or why there is none. Exports at the first chunk."""
        self._asked.set()
        self.forget_old()
        key = request.trajectory_id, request.version, request.context
        export = self._kept.get(key)
        if export is None and request.offset == 0:
            export = await self._make(request)
        if not isinstance(export, _Export):
            self._answered(request.trajectory_id)
            reason = (export or Miss.NOT_KEPT).value
            return KvChunk(payload=b"", length=0, digest="", reason=reason)
        length, end = len(export.content), request.offset + KV_CHUNK_BYTES
        if not 0 <= request.offset < length:
            raise RequestRefused(Refusal.INVALID, f"offset {request.offset} of {length}")
        if end < length:
            self._keep(key, export)
        else:
            self._kept.pop(key, None)
            self._answered(request.trajectory_id)
        payload = export.content[request.offset : end]
        return KvChunk(payload=payload, length=length, digest=export.digest, reason="")

    def begin_stopping(self) -> None:
        """From now on it counts who has been served."""
        self._served.clear()

    def expect(self, trajectory_id: str) -> None:
        """The trajectory goes on elsewhere: someone may ask for its cache."""
        if trajectory_id not in self._served:  # The other worker may have been faster.
            self._expected.add(trajectory_id)

    async def linger(self) -> None:
        """Wait until those who are expected have what they want, or do not seem to come."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + GRACE_S
        while self._expected and loop.time() < until_s:
            self._asked.clear()
            try:
                async with asyncio.timeout_at(min(until_s, loop.time() + QUIET_S)):
                    await self._asked.wait()
            except TimeoutError:
                if not self._at_work:
                    return

    async def _make(self, request: FetchKv) -> _Export | Miss:
        if self._at_work >= EXPORTS_MAX:
            raise RequestRefused(Refusal.OVERLOADED, f"{self._at_work} exports are at work")
        try:
            context = unpack_tokens(request.context)
        except ValueError as error:
            raise RequestRefused(Refusal.INVALID, f"tokens: {error}") from error
        if not context:
            raise RequestRefused(Refusal.INVALID, "no context")
        if request.version != self._engine.version:
            return Miss.VERSION
        self._at_work += 1
        try:
            state = await self._engine.export_kv(context)
            return await self._pack(state, request.version)
        except EngineError:
            return Miss.ENGINE
        finally:
            self._at_work -= 1
            self._asked.set()

    async def _pack(self, state: KvState | None, version: int) -> _Export | Miss:
        if state is None:
            return Miss.NOT_KEPT
        if state.version != version:
            return Miss.VERSION
        if len(state.payload) > KV_BYTES_MAX:
            return Miss.TOO_LARGE
        content, digest = await asyncio.to_thread(_packed, state)
        return _Export(content, digest, asyncio.get_running_loop().time())

    def _keep(self, key: Key, export: _Export) -> None:
        """For the chunks that follow; the oldest goes when there are too many."""
        self._kept[key] = export
        while len(self._kept) > KEPT_MAX or self.kept_bytes > KEPT_BYTES_MAX:
            self._kept.popitem(last=False)

    def forget_old(self) -> None:
        """Free what nobody has read to its end."""
        oldest_s = asyncio.get_running_loop().time() - KEPT_S
        for key in [key for key, export in self._kept.items() if export.made_s < oldest_s]:
            del self._kept[key]

    def _answered(self, trajectory_id: str) -> None:
        """Nothing more will be asked of this one."""
        self._served.append(trajectory_id)
        self._expected.discard(trajectory_id)


def _packed(state: KvState) -> tuple[bytes, str]:
    content = state.payload + pack_tokens([len(state.context)])
    return content, xxhash.xxh3_64_hexdigest(content)
