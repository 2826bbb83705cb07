"""The rollout process: one engine, and the worker that uses it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

from common.config import BucketConfig, Config
from common.copies import Copies, InPlace
from common.errors import ConfigError, RunFailed
from common.service import Runtime
from common.streaming import open_mirror
from services.rollout.engine import Engine
from services.rollout.engines import make_engine
from services.rollout.parsers import PARSERS
from services.rollout.render import Renderer
from services.rollout.tenancy import starts_cold
from services.rollout.tokenizer import ChatTokenizer, load_tokenizer
from services.rollout.worker import Worker

EngineFactory = Callable[[Config, BucketConfig, int, str], Engine]
"""Of configuration, bucket, index of the worker in it, and run id."""

OpenCopies = Callable[[Runtime], AbstractAsyncContextManager[Copies]]

CLOSE_TIMEOUT_S = 10.0
"""For an engine to end its own processes."""


@contextlib.asynccontextmanager
async def in_place(_runtime: Runtime) -> AsyncGenerator[Copies]:
    """Where all processes see one memory file system, as in simulations."""
    yield InPlace()


class RolloutService:
    """The process: starts the engine, then works until it is asked to stop."""

    def __init__(
        self,
        runtime: Runtime,
        engine_factory: EngineFactory = make_engine,
        tokenizer_loader: Callable[[str], ChatTokenizer] = load_tokenizer,
        open_copies: OpenCopies = in_place,
    ) -> None:
        self._runtime = runtime
        self._bucket, self._index = place_of(runtime.name, runtime.config)
        self._engine_factory = engine_factory
        self._tokenizer_loader = tokenizer_loader
        self._open_copies = open_copies

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set, then hand the trajectories back.

        Raises:
            ConfigError: the model or its tokenizer cannot be used.
            RunFailed: the engine did not start in time.
            EngineError: the engine works no more.
        """
        config = self._runtime.config
        parser = PARSERS[config.rollout.tool_format]
        renderer = Renderer(self._tokenizer_loader(config.model.path), parser, config.model.path)
        engine = await asyncio.to_thread(
            self._engine_factory, config, self._bucket, self._index, self._runtime.run_id
        )
        try:
            cold = self._bucket.hybrid and starts_cold()
            if cold or await self._start(engine, stopping):
                async with self._open_copies(self._runtime) as copies:
                    worker = Worker(
                        self._runtime, self._bucket, engine, renderer, copies, started=not cold
                    )
                    await worker.run(stopping)
        finally:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await engine.aclose()

    async def _start(self, engine: Engine, stopping: asyncio.Event) -> bool:
        """Whether the engine is ready; False when the process was asked to stop meanwhile."""
        limit_s = self._runtime.config.rollout.start_timeout_s
        async with asyncio.TaskGroup() as tasks:
            start = tasks.create_task(engine.start(), name="engine.start")
            stop = tasks.create_task(stopping.wait(), name="stopping")
            await asyncio.wait({start, stop}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not start.done() and not stop.done():
                raise RunFailed(
                    f"the engine of {self._runtime.name} was not ready within {limit_s:g} s; "
                    "see its log, or raise rollout.start_timeout_s"
                )
            start.cancel()
            stop.cancel()
        started = start.done() and not start.cancelled()
        if started and self._bucket.hybrid:
            await engine.sleep()  # Until the coordinator gives it the slot.
        return started


def place_of(name: str, config: Config) -> tuple[BucketConfig, int]:
    """Bucket and index of the worker that is called `<bucket>-<index>`.

    Raises:
        ConfigError: the name is of no worker that the configuration knows.
    """
    bucket_name, _, index = name.rpartition("-")
    for bucket in config.buckets:
        if bucket.name == bucket_name and index.isdecimal() and int(index) < bucket.workers:
            return bucket, int(index)
    known = ", ".join(f"{b.name}-0 to {b.name}-{b.workers - 1}" for b in config.buckets)
    raise ConfigError(f"no rollout worker is called {name!r}; the buckets have {known}")


def mirroring(runtime: Runtime) -> RolloutService:
    """The service as a process: it streams versions that are not on its host."""
    return RolloutService(runtime, open_copies=open_mirror)
