"""A transformers model behind the engine protocol, decoding in a thread of its own."""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import BucketConfig, Config
from common.errors import EngineError
from common.messages.coordinator import Manifest
from common.weights import NO_VERSION
from services.rollout.accounting import Accounting
from services.rollout.engine import EngineLoad, GenerateRequest, Generation, KvState
from services.rollout.segment import copy_checked, held_digest
from services.rollout.torch_decoder import Decoder, Job

T = TypeVar("T")
Command = Callable[[], None]


class TorchEngine:
    """Commands go to the decode thread by a queue and are carried out between two steps."""

    def __init__(self, config: Config, bucket: BucketConfig, cpus: Sequence[int]) -> None:
        self.version = NO_VERSION
        self.digest = ""
        self.context_tokens_max = config.model.context_tokens
        self._config, self._bucket, self._cpus = config, bucket, cpus
        self._accounting = Accounting(bucket.kv_tokens, time.monotonic)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._decoder: Decoder | None = None
        self._paused = False
        self._closed = False
        self._broken: EngineError | None = None

    async def start(self) -> None:
        """Load the model in the decode thread."""
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()
        timeout_s = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self._decoder = await self._call(self._load_model)
        except TimeoutError as error:
            raise EngineError(f"the model was not loaded within {timeout_s:g} s") from error

    async def aclose(self) -> None:
        """Stop the thread after the step in flight. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._commands.put(self._close)
            await asyncio.to_thread(thread.join)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue one context."""
        decoder = self._ready()
        room = self.context_tokens_max - len(request.context)
        if room < 1:
            raise EngineError(f"no room after a context of {len(request.context)} tokens")
        if not decoder.knows(request.context):
            raise EngineError("the context has tokens that the model does not know")
        job = Job(request, min(request.max_tokens, room))
        self._accounting.begin(request.request_id, len(request.context))
        try:
            self._commands.put(lambda: decoder.join(job))
            return await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            self._commands.put(lambda: decoder.abort(request.request_id))
            raise
        finally:
            self._accounting.end(request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a generation early."""
        decoder = self._alive()
        await self._call(lambda: decoder.abort(request_id))

    async def pause(self) -> None:
        """Stop between two steps."""
        self._alive()
        await self._call(lambda: self._set_paused(paused=True))

    async def resume(self) -> None:
        """Go on."""
        self._alive()
        await self._call(lambda: self._set_paused(paused=False))

    async def sleep(self) -> None:
        """Free the cache, and the weights' own memory."""
        decoder = self._alive()
        self.version, self.digest = NO_VERSION, ""
        await self._call(decoder.sleep)

    async def wake(self) -> None:
        """Room for the weights; what is in it is not said before a version is applied."""
        decoder = self._alive()
        await self._call(decoder.wake)

    async def apply_weights(self, manifest: Manifest) -> None:
        """Copy and check in another thread, swap between two steps, and read what is held."""
        decoder = self._alive()
        copied = await asyncio.to_thread(copy_checked, manifest)
        held = await self._call(lambda: decoder.apply(copied.tensors, manifest.version))
        self.version, self.digest = manifest.version, ""
        self.digest = await asyncio.to_thread(held_digest, manifest, copied.header, held)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """One forward pass between two steps."""
        decoder = self._ready()
        return await self._call(lambda: decoder.score(tokens))

    async def export_kv(self, context: Sequence[int]) -> KvState | None:
        """Copy a row, running or kept."""
        decoder = self._ready()
        # Asked in the decode thread, which alone knows what is applied between two steps.
        version, found = await self._call(lambda: (decoder.version, decoder.read_kv(context)))
        if found is None:
            return None
        cached, tensors = found
        payload = await asyncio.to_thread(_serialized, tensors)
        return KvState(context=list(context[:cached]), version=version, payload=payload)

    async def import_kv(self, state: KvState) -> bool:
        """Keep it in a free row."""
        decoder = self._ready()
        tensors = await asyncio.to_thread(_deserialized, state.payload)
        return await self._call(lambda: decoder.write_kv(state.context, state.version, tensors))

    @property
    def vocabulary(self) -> int:
        """Of the model's embedding."""
        return self._alive().vocabulary

    @property
    def prefill_tokens(self) -> int:
        """Context tokens computed since start, other than those of decode steps."""
        return self._decoder.prefill_tokens if self._decoder else 0

    def load(self) -> EngineLoad:
        """Own accounting."""
        return self._accounting.load()

    def _alive(self) -> Decoder:
        if self._broken is not None:
            raise self._broken
        if self._decoder is None or self._thread is None:
            raise EngineError("the engine is not running")
        return self._decoder

    def _ready(self) -> Decoder:
        decoder = self._alive()
        if self.version == NO_VERSION:
            raise EngineError("no policy version is applied yet")
        return decoder

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the decode thread, between two steps."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  Whoever awaits the future gets it.
                future.set_exception(error)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        """The decode thread: commands first, then one step, until closed."""
        while not self._closed:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  A thread has nobody above it to tell.
                self._break(EngineError(f"decoding failed: {error!r}"))
        self._break(EngineError("the engine is closed"))

    def _turn(self) -> None:
        decoder = self._decoder
        still = self._paused or self._broken is not None or decoder is None or decoder.idle
        while still or not self._commands.empty():
            self._commands.get()()
            still = False
        if self._broken is not None:
            self._break(self._broken)  # Also what came since.
        elif decoder is not None and not (self._paused or self._closed or decoder.idle):
            decoder.step()

    def _break(self, error: EngineError) -> None:
        self._broken = error
        if self._decoder is not None:
            self._decoder.fail(error)

    def _set_paused(self, *, paused: bool) -> None:
        self._paused = paused

    def _close(self) -> None:
        self._closed = True

    def _load_model(self) -> Decoder:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and self._cpus:
            os.sched_setaffinity(0, self._cpus)  # Of this thread, and of those it starts.
            torch.set_num_threads(len(self._cpus))
        path = self._config.model.path
        loader: Any = AutoModelForCausalLM
        tokenizer_loader: Any = AutoTokenizer
        try:
            model = loader.from_pretrained(
                path,
                dtype=getattr(torch, self._config.model.dtype),
                attn_implementation="sdpa",
                local_files_only=True,
            )
            tokenizer = tokenizer_loader.from_pretrained(path, local_files_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(f"{path} cannot be loaded: {error}") from error
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise EngineError(f"the torch engine knows full attention only, not {sorted(kinds)}")
        return Decoder(
            model.to(device).eval(),
            tokenizer,
            self._accounting,
            slots=self._bucket.slots,
            kv_tokens=self._bucket.kv_tokens,
        )


def _serialized(tensors: list[Tensor]) -> bytes:
    return save({str(number): tensor for number, tensor in enumerate(tensors)})


def _deserialized(payload: bytes) -> list[Tensor]:
    """Inverse of `_serialized`; empty when it is something else."""
    try:
        named = load(payload)
        return [named[str(number)] for number in range(len(named))]
    except (SafetensorError, KeyError):
        return []
