"""vLLM behind the engine protocol: its engine core and workers are child processes."""

# vLLM is imported late: its environment must be set first, and it takes ten seconds.
# vLLM is untyped where it matters here; strict mode would only repeat that.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from common.config import BucketConfig, Config
from common.errors import EngineError, VersionGone
from common.messages.coordinator import Manifest
from common.weights import NO_VERSION
from services.rollout import vllm_settings
from services.rollout.accounting import Accounting
from services.rollout.engine import EngineLoad, GenerateRequest, Generation, KvState
from services.rollout.segment import open_checked
from services.rollout.vllm_plugin import BACKEND
from services.rollout.vllm_requests import Sampled, rank_problem, sampling_params

log = structlog.get_logger()

CORE_TIMEOUT_S = 60.0
"""A pause takes one decode step and a swap a second or two; past this the engine core hangs."""
CLOSE_TIMEOUT_S = 1.0
"""Then the child processes are killed: they have nothing to save."""
CLOSE_RANKS_TIMEOUT_S = 6.0
"""The same for several ranks, which need three seconds to free what they share."""


class VllmEngine:
    """One vLLM engine, started from `model.path` and useless until a version is applied."""

    def __init__(self, config: Config, bucket: BucketConfig, cpus: Sequence[int]) -> None:
        self.version = NO_VERSION
        self.digest = ""
        self.context_tokens_max = config.model.context_tokens
        self._config, self._bucket, self._cpus = config, bucket, cpus
        self._accounting = Accounting(bucket.kv_tokens, _loop_time)
        self._starter: _Starter | None = None
        self._llm: Any = None
        self._broken = ""
        self._paused = self._asleep = self._kv_asleep = False
        self._swapping = asyncio.Lock()
        self._scores = itertools.count()
        self._export_refused = False

    async def start(self) -> None:
        """Start the child processes; seconds to minutes, in a thread of its own."""
        os.environ.update(
            vllm_settings.current_environment(self._cpus, self._bucket.tensor_parallel)
        )
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # It would override our exact size.
        timeout_s = self._config.rollout.start_timeout_s
        self._starter = _Starter(self._config, self._bucket)
        try:
            async with asyncio.timeout(timeout_s):
                self._llm = await self._starter.started()
        except TimeoutError as error:
            raise EngineError(f"vLLM was not ready within {timeout_s:g} s") from error

    async def aclose(self) -> None:
        """End the child processes. Idempotent."""
        llm, self._llm = self._llm, None
        self._broken = self._broken or "closed"
        if llm is not None:
            _detach(llm)
            alone = self._bucket.tensor_parallel == 1
            await asyncio.to_thread(
                llm.shutdown, CLOSE_TIMEOUT_S if alone else CLOSE_RANKS_TIMEOUT_S
            )
            llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves it to the collector.
        if self._starter is not None:
            self._starter.closed.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue one context; vLLM's own abort follows when this is cancelled."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._require_version()
        room = self.context_tokens_max - len(request.context)
        if room < 1:
            raise EngineError(f"no room after a context of {len(request.context)} tokens")
        sampled = Sampled(_loop_time())
        self._accounting.begin(request.request_id, len(request.context))
        try:
            stream = self._llm.generate(
                self._prompt(request.context),
                sampling_params(request, min(request.max_tokens, room)),
                request.request_id,
            )
            async for output in stream:
                sampled.add(output.outputs[0], _loop_time())
                self._accounting.sampled(request.request_id, len(output.outputs[0].token_ids))
        except EngineDeadError as error:
            self._broken = "the engine core died"
            raise EngineError(self._broken) from error
        except (EngineGenerateError, VLLMClientError) as error:
            raise EngineError(f"vLLM failed the request: {error.__cause__ or error}") from error
        finally:
            self._accounting.end(request.request_id)
        return sampled.generation()

    async def abort(self, request_id: str) -> None:
        """End a generation early."""
        self._require_alive()
        await self._llm.abort(request_id)

    async def pause(self) -> None:
        """Freeze the scheduler, after the step in flight."""
        self._require_alive()
        self._paused = True
        async with self._swapping:
            await self._freeze(clear_cache=False)

    async def resume(self) -> None:
        """Unfreeze the scheduler, unless a swap goes on; that resumes when it ends."""
        self._require_alive()
        self._paused = False
        async with self._swapping:
            await self._unfreeze()

    async def sleep(self) -> None:
        """Discard weights and KV cache. On a CPU vLLM cannot: its caches are emptied only."""
        self._require_alive()
        async with self._swapping:
            self.version, self.digest = NO_VERSION, ""
            await self._freeze(clear_cache=True)
            if not self._asleep and not vllm_settings.is_cpu_build():
                async with self._core_call("sleep"):
                    await self._llm.sleep(level=2)
                self._kv_asleep = True
            self._asleep = True

    async def wake(self) -> None:
        """Room for the weights. The next `apply_weights` takes that for the KV cache after them."""
        self._require_alive()
        async with self._swapping:
            if self._asleep and self._kv_asleep:
                await self._take_memory("weights")
            self._asleep = False

    async def apply_weights(self, manifest: Manifest) -> None:
        """Check in this process, then pause, load in the workers, and resume.

        Clearing the caches also preempts what runs: it is prefilled again with the new weights,
        so that each later token's distribution is that of one version alone.
        """
        self._require_alive()
        async with self._swapping:
            if self._asleep:
                raise EngineError("the engine is asleep")
            checked = await asyncio.to_thread(open_checked, manifest)
            await self._freeze(clear_cache=True)
            try:
                await self._load(manifest)
            except VersionGone:
                await self._unfreeze()
                raise
            del checked
            if self._kv_asleep:
                await self._take_memory("kv_cache")
                self._kv_asleep = False
            self.version, self.digest = manifest.version, manifest.digest
            await self._unfreeze()

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Prompt log-probabilities; vLLM skips its prefix cache for them.

        vLLM must sample one token more, so `tokens` is shorter than the longest context.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._require_version()
        params = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"score-{next(self._scores)}"
        async for output in self._llm.generate(self._prompt(tokens), params, name):
            positions = output.prompt_logprobs[1:]
            return [p[t].logprob for p, t in zip(positions, tokens[1:], strict=True)]
        raise EngineError("vLLM returned no output for a score")

    async def export_kv(self, context: Sequence[int]) -> KvState | None:
        """Not possible: vLLM moves KV caches only between engines that share a connector."""
        del context
        if not self._export_refused:
            self._export_refused = True
            log.info("kv.refused", reason="vllm_has_no_export")
        return None

    async def import_kv(self, state: KvState) -> bool:
        """Not possible, see `export_kv`."""
        del state
        return False

    @property
    def vocabulary(self) -> int:
        """Of the model's embedding."""
        self._require_alive()
        return self._llm.vllm_config.model_config.hf_text_config.vocab_size

    def load(self) -> EngineLoad:
        """Own accounting: vLLM's scheduler statistics arrive late and cost a logger."""
        return self._accounting.load()

    def _prompt(self, tokens: Sequence[int]) -> Any:
        """The salt keeps prefixes of different versions apart, whatever vLLM does at a swap."""
        from vllm.inputs.engine import tokens_input

        return tokens_input(list(tokens), cache_salt=str(self.version))

    def _require_alive(self) -> None:
        if self._llm is None:
            raise EngineError("the engine is not running")
        if not self._broken and self._llm.errored:
            self._broken = "the engine core died"
        if self._broken:
            raise EngineError(self._broken)

    def _require_version(self) -> None:
        self._require_alive()
        if self.version == NO_VERSION:
            raise EngineError("no policy version is applied yet")

    async def _freeze(self, *, clear_cache: bool) -> None:
        async with self._core_call("pause"):
            await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)

    async def _unfreeze(self) -> None:
        if not self._paused:
            async with self._core_call("resume"):
                await self._llm.resume_generation()

    async def _take_memory(self, what: str) -> None:
        async with self._core_call("wake"):
            await self._llm.wake_up(tags=[what])

    async def _load(self, manifest: Manifest) -> None:
        """Replace the weights in all ranks. Half done is broken, unless nothing was touched.

        Raises:
            VersionGone: a rank could not map the segment, so none has begun.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        async with self._core_call("weight update"):
            try:
                rpc = self._llm.collective_rpc
                mapped: list[bool] = await rpc("map_version", args=(manifest.model_dump(),))
                if all(mapped):
                    await self._replace_weights(manifest)
            except (EngineDeadError, EngineError):
                raise
            except Exception as error:  # A worker's exception arrives as a bare one.
                self._broken = f"version {manifest.version} is loaded in part: {error}"
                raise EngineError(self._broken) from error
        if not all(mapped):
            raise VersionGone(manifest.version)

    async def _replace_weights(self, manifest: Manifest) -> None:
        """Load what is mapped, and hear of every rank what it has now."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update = WeightTransferUpdateRequest(update_info={"version": manifest.version})
        await self._llm.start_weight_update()
        await self._llm.update_weights(update)
        await self._llm.finish_weight_update(str(manifest.version))
        ranks = await self._llm.collective_rpc("applied_version")
        if problem := rank_problem(manifest.version, manifest.digest, ranks):
            self._broken = problem
            raise EngineError(problem)

    @asynccontextmanager
    async def _core_call(self, what: str) -> AsyncGenerator[None]:
        """A call that changes the engine core: cut short, its state is unknown."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with asyncio.timeout(CORE_TIMEOUT_S):
                yield
        except TimeoutError as error:
            self._broken = f"{what} did not end within {CORE_TIMEOUT_S:g} s"
            raise EngineError(self._broken) from error
        except EngineDeadError as error:
            self._broken = "the engine core died"
            raise EngineError(self._broken) from error
        except asyncio.CancelledError:
            self._broken = f"{what} was interrupted"
            raise


class _Starter:
    """The thread that starts the child processes, and stays.

    They are killed when the thread that started them ends (see `vllm_plugin.die_with`), so it
    lives as long as the engine.
    """

    def __init__(self, config: Config, bucket: BucketConfig) -> None:
        self.closed = threading.Event()
        self._config, self._bucket = config, bucket
        self._llm: Any = None
        self._error: Exception | None = None

    async def started(self) -> Any:
        """Start the thread, and wait for the engine."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        threading.Thread(
            target=self._run, args=(lambda: loop.call_soon_threadsafe(ready.set),), daemon=True
        ).start()
        await ready.wait()
        llm, self._llm = self._llm, None
        if llm is None:
            raise EngineError(f"vLLM did not start: {self._error}") from self._error
        return llm

    def _run(self, ready: Callable[[], object]) -> None:
        try:
            self._llm = _build(self._config, self._bucket)
        except Exception as error:  # noqa: BLE001  vLLM raises anything; it all means the same.
            self._error = error
        ready()
        self.closed.wait()


def _build(config: Config, bucket: BucketConfig) -> Any:
    """Import vLLM, start the engine core and its workers, and wait until they are ready."""
    from transformers import AutoConfig
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = vllm_settings.is_cpu_build()
    arguments = vllm_settings.engine_arguments(config, bucket, on_cpu=on_cpu)
    if on_cpu:  # With CUDA the cache takes what memory the weights leave.
        model = AutoConfig.from_pretrained(config.model.path)
        arguments["kv_cache_memory_bytes"] = vllm_settings.kv_bytes(
            model, config.model.dtype, bucket.kv_tokens, ranks=bucket.tensor_parallel
        )
    transfer = WeightTransferConfig(backend=BACKEND)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(weight_transfer_config=transfer, **arguments))


def _detach(llm: Any) -> None:
    """End what reads the engine core's outputs, which would log its orderly end as a failure."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if llm.output_handler is not None:
        llm.output_handler.cancel()
    llm.output_processor.propagate_error(EngineDeadError())


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
