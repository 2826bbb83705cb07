"""What becomes of turns that are being sampled when new weights arrive (`on_weight_update`).

Works for every engine: generations pass through here, and only the engine protocol is used. With
`keep` nothing is in the way. With `abort` and `wait` no generation is under way while a version is
swapped in: so no turn mixes versions.
"""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from common.errors import EngineError
from common.messages.coordinator import Manifest
from services.rollout.engine import Engine, FinishReason, GenerateRequest, Generation

log = structlog.get_logger()

Policy = Literal["keep", "abort", "wait"]

ABORT_AGAIN_S = 0.5
"""An engine may not know a request yet when it is told to end it."""
ABORT_TIMEOUT_S = 20.0
"""Ending a generation takes one decode step."""
SAMPLED_ANEW_MAX = 16
"""A turn that so many versions have overtaken is longer than the time between versions: it would
never end."""


@dataclass(eq=False, slots=True)
class Running:
    """A generation in the engine."""

    request_id: str
    void: bool = False
    """It was ended for a version: what was sampled is thrown away."""


class Updates:
    """Samples, and swaps versions in.

    Args:
        engine: the only one.
        policy: `rollout.on_weight_update`.
        wait_s: with `wait`, turns that take longer to end are sampled anew.
    """

    def __init__(self, engine: Engine, policy: Policy, wait_s: float) -> None:
        self._engine, self._policy, self._wait_s = engine, policy, wait_s
        self._running: set[Running] = set()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue one context, as the engine does; from the first token again when void.

        Raises:
            EngineError: from the engine, or because versions came faster than the turn ends.
        """
        if self._policy == "keep":
            return await self._engine.generate(request)
        began = _now()
        for attempt in range(SAMPLED_ANEW_MAX):
            await self._open.wait()  # At most as long as a swap.
            waited_s = _now() - began
            name = f"{attempt}~{request.request_id}" if attempt else request.request_id
            generation = await self._attempt(replace(request, request_id=name))
            if generation is not None:
                return replace(generation, queue_s=generation.queue_s + waited_s)
        raise EngineError(f"{SAMPLED_ANEW_MAX} versions arrived while one turn was sampled")

    async def _attempt(self, request: GenerateRequest) -> Generation | None:
        running = Running(request.request_id)
        self._running.add(running)
        self._idle.clear()
        try:
            generation = await self._engine.generate(request)
        finally:
            self._running.discard(running)
            if not self._running:
                self._idle.set()
        # One that had ended by then is whole, and of the old version alone.
        void = running.void and generation.finish_reason is FinishReason.ABORTED
        return None if void else generation

    async def swap(self, manifest: Manifest) -> None:
        """Apply a version.

        Raises:
            WeightError: it cannot be applied; the old version stays.
            EngineError: the engine works no more.
        """
        if self._policy == "keep":
            await self._engine.apply_weights(manifest)
            return
        self._open.clear()
        try:
            if self._policy == "wait":
                await self._become_idle(self._wait_s)
            await self._end_running()
            await self._engine.apply_weights(manifest)
        finally:
            self._open.set()

    async def _end_running(self) -> None:
        """End what runs; its `generate` waits for the swap and begins again."""
        until = _now() + ABORT_TIMEOUT_S
        for attempt in itertools.count():
            if self._idle.is_set():
                return
            if attempt == 0:
                log.debug("turns.aborted", running=len(self._running))
            if _now() >= until:
                raise EngineError(f"a generation did not end within {ABORT_TIMEOUT_S:g} s")
            for running in list(self._running):
                running.void = True
                await self._engine.abort(running.request_id)
            await self._become_idle(ABORT_AGAIN_S)

    async def _become_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()
