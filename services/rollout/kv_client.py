"""Fetches the KV cache of a trajectory that arrives from another worker.

Nothing here can fail a trajectory: whatever goes wrong is a `Miss`, within the deadline, and the
engine computes the context again.
"""

import asyncio
from collections.abc import Sequence

import structlog
import xxhash

from common.errors import (
    EngineError,
    PeerUnreachable,
    ProtocolError,
    RequestRefused,
)
from common.membership import Membership
from common.messages.coordinator import Member
from common.messages.rollout import FetchKv, KvChunk
from common.trajectory import pack_tokens, unpack_tokens
from services.rollout.engine import Engine, KvState
from services.rollout.moves import Miss

log = structlog.get_logger()

KV_DEADLINE_S = 5.0
"""For the whole transfer, waiting for a turn included; after that, computing is faster."""
KV_BYTES_MAX = 1 << 30
"""Of one context. More is slower than computing it again, or a lie."""
FETCHES_MAX = 4
"""At once, so that a drain of a large worker does not fill the memory of another."""
TAIL_BYTES = 4
"""After the engine's bytes: how many tokens of the context they are of, as int32."""


class _Missed(Exception):
    """The cache does not come. Raised and caught here."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss.value)
        self.miss = miss


class KvClient:
    """What the trajectories of one worker fetch from others."""

    def __init__(self, membership: Membership, engine: Engine, me: str) -> None:
        self._membership, self._engine, self._me = membership, engine, me
        self._fetches = asyncio.Semaphore(FETCHES_MAX)

    async def take_over(
        self, source: str, trajectory_id: str, context: Sequence[int]
    ) -> Miss | None:
        """Bring a context's cache into the engine; see `Caches`."""
        try:
            async with asyncio.timeout(KV_DEADLINE_S), self._fetches:
                size = await self._take_over(source, trajectory_id, context)
        except _Missed as missed:
            miss = missed.miss
        except TimeoutError:  # `RequestTimeout`, too.
            miss = Miss.TOO_SLOW
        except PeerUnreachable:
            miss = Miss.SOURCE_GONE
        except ProtocolError:
            miss = Miss.CORRUPT
        except RequestRefused:
            miss = Miss.REFUSED
        except EngineError:
            miss = Miss.ENGINE
        else:
            log.debug("kv.fetched", trajectory_id=trajectory_id, tokens=len(context), bytes=size)
            return None
        log.debug("kv.missed", trajectory_id=trajectory_id, peer=source, reason=miss.value)
        return miss

    async def _take_over(self, source: str, trajectory_id: str, context: Sequence[int]) -> int:
        version = self._engine.version
        content, digest = await self._fetch(
            self._member(source),
            FetchKv(
                trajectory_id=trajectory_id,
                context=pack_tokens(context),
                version=version,
                offset=0,
            ),
        )
        tokens, payload = await asyncio.to_thread(_unpacked, content, digest)
        if not 0 < tokens <= len(context):
            raise _Missed(Miss.CORRUPT)
        state = KvState(context[:tokens], version, payload)
        if not await self._engine.import_kv(state):
            raise _Missed(Miss.VERSION if self._engine.version != version else Miss.ENGINE)
        return len(content)

    def _member(self, source: str) -> Member:
        if not source:
            raise _Missed(Miss.NO_SOURCE)
        if source == self._me:
            raise _Missed(Miss.LOCAL)
        member = self._membership.members.get(source)
        if member is None:
            raise _Missed(Miss.SOURCE_GONE)
        return member

    async def _fetch(self, member: Member, request: FetchKv) -> tuple[bytearray, str]:
        """All chunks, in order, and the digest that they should have together."""
        content = bytearray()
        first: KvChunk | None = None
        while first is None or len(content) < first.length:
            chunk = await self._membership.request(
                member,
                request.model_copy(update={"offset": len(content)}),
                timeout_s=KV_DEADLINE_S,
            )
            first = first or chunk
            _check(chunk, first, received=len(content))
            content += chunk.payload
        return content, first.digest


def _check(chunk: KvChunk, first: KvChunk, *, received: int) -> None:
    """A chunk goes on where the last one ended, and is of the same whole.

    Raises:
        _Missed: it does not, or there is nothing to have.
    """
    if not chunk.length:
        known = chunk.reason in {*Miss}
        raise _Missed(Miss(chunk.reason) if known else Miss.CORRUPT)
    if chunk.length > KV_BYTES_MAX:
        raise _Missed(Miss.TOO_LARGE)
    same = (chunk.length, chunk.digest) == (first.length, first.digest)
    fits = 0 < len(chunk.payload) <= chunk.length - received
    if not (same and fits) or chunk.length <= TAIL_BYTES:
        raise _Missed(Miss.CORRUPT)


def _unpacked(content: bytearray, digest: str) -> tuple[int, bytes]:
    """Tokens, and the engine's bytes; 0 tokens when the digest is another. Hashes it all."""
    if xxhash.xxh3_64_hexdigest(content) != digest:
        return 0, b""
    with memoryview(content) as view:
        (tokens,) = unpack_tokens(bytes(view[-TAIL_BYTES:]))
        return tokens, bytes(view[:-TAIL_BYTES])
