"""An engine for tests of KV transfers: any context has the cache that the test says."""

import asyncio
from collections.abc import Sequence

from common.errors import EngineError
from services.rollout.engine import KvState
from services.rollout.fake_engine import FakeEngine

VERSION = 7


class HoldingEngine(FakeEngine):
    """Gives `payload` for any context, and remembers what it was given."""

    def __init__(self, payload: bytes = b"") -> None:
        super().__init__()
        self.version = VERSION
        self.payload = payload
        self.given: list[KvState] = []
        self.exports = 0
        self.export_s = 0.0
        self.takes = True
        self.broken = False

    async def export_kv(self, context: Sequence[int]) -> KvState | None:
        self.exports += 1
        await asyncio.sleep(self.export_s)
        if self.broken:
            raise EngineError("dead")
        return KvState(list(context)[:-1], self.version, self.payload) if self.payload else None

    async def import_kv(self, state: KvState) -> bool:
        if self.broken:
            raise EngineError("dead")
        self.given.append(state)
        return self.takes
