"""Continuous batching over a transformers model. Synchronous; owned by one thread."""

# transformers models are untyped callables.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import itertools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.errors import EngineError
from common.weights import NO_VERSION
from services.rollout.accounting import Accounting
from services.rollout.engine import FinishReason, GenerateRequest, Generation
from services.rollout.torch_cache import SlotCache
from services.rollout.torch_sampling import completes_stop, sample

KEPT_ROWS_SHARE = 0.25
"""Rows beyond the slots. While a trajectory waits for its tool its row is only kept; so many
others may come and go until the least recently used row, perhaps that one, is lost."""


@dataclass
class Job:
    """One request, and what was sampled for it."""

    request: GenerateRequest
    max_tokens: int
    done: Future[Generation] = field(default_factory=Future[Generation])
    submitted_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.request.seed)
        self.done.set_running_or_notify_cancel()

    def draw(self) -> float:
        """The next uniform number of this request's own stream."""
        return torch.rand((), generator=self.generator, dtype=torch.float64).item()

    def finish(self, reason: FinishReason) -> None:
        """Hand over what there is."""
        now = time.monotonic()
        first_s = now if self.first_s is None else self.first_s
        self.done.set_result(
            Generation(
                tokens=self.tokens,
                logprobs=self.logprobs,
                versions=self.versions,
                finish_reason=reason,
                queue_s=first_s - self.submitted_s,
                decode_s=now - first_s,
            )
        )


@dataclass
class Row:
    """What one row of the cache holds: keys and values of `tokens[:cached]`."""

    tokens: list[int] = field(default_factory=list[int])
    cached: int = 0
    used: int = 0
    """Number of its last use; the lowest is the least recently used row."""

    def shared(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` are cached here."""
        limit = min(self.cached, len(tokens))
        for index in range(limit):
            if self.tokens[index] != tokens[index]:
                return index
        return limit


class Decoder:
    """Jobs occupy rows 0 to n-1, so that a decode step is one slice of the cache.

    Rows past them keep the tokens of finished jobs as prefixes for later ones. Before each step
    a row has all but its last token cached; the step feeds that one and samples the next.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        accounting: Accounting,
        *,
        slots: int,
        kv_tokens: int,
    ) -> None:
        self.version = NO_VERSION
        self.prefill_tokens = 0
        """Context tokens computed since start, other than those of decode steps."""
        self._model: Any = model
        self._tokenizer, self._accounting = tokenizer, accounting
        self._kv_tokens = kv_tokens
        self._eos = eos_tokens(model, tokenizer)
        self._slots = slots
        rows = slots + math.ceil(slots * KEPT_ROWS_SHARE)
        self._cache = SlotCache(rows)
        self._rows = [Row() for _ in range(rows)]
        self._asleep: list[tuple[torch.nn.Parameter, torch.Size]] = []
        """The parameters without memory of their own, and their shapes; empty while awake."""
        self._uses = itertools.count(1)
        self._jobs: list[Job] = []
        self._waiting: deque[Job] = deque()

    @property
    def idle(self) -> bool:
        """Nothing to decode."""
        return not self._jobs and not self._waiting

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self._model.config.get_text_config().vocab_size

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether all ids are in the vocabulary; others would break the whole batch."""
        return min(tokens) >= 0 and max(tokens) < self.vocabulary

    def join(self, job: Job) -> None:
        """Queue a job; it begins before the next step that has room for it."""
        self._waiting.append(job)

    def abort(self, request_id: str) -> None:
        """End a job with what it has."""
        for index, job in enumerate(self._jobs):
            if job.request.request_id == request_id:
                self._remove(index)
                return job.finish(FinishReason.ABORTED)
        for job in self._waiting:
            if job.request.request_id == request_id:
                self._waiting.remove(job)
                return job.finish(FinishReason.ABORTED)
        return None

    def fail(self, error: EngineError) -> None:
        """Fail every job."""
        for job in [*self._jobs, *self._waiting]:
            job.done.set_exception(error)
        self._jobs.clear()
        self._waiting.clear()

    @torch.inference_mode()
    def step(self) -> None:
        """Let waiting jobs in, then sample one token for every job."""
        while self._waiting and self._fits(self._waiting[0]):
            self._begin(self._waiting.popleft())
        rows = self._rows[: len(self._jobs)]
        logits = self._forward(0, [row.tokens[-1:] for row in rows], [row.cached for row in rows])
        device = logits.device
        temperatures = torch.tensor([j.request.temperature for j in self._jobs], device=device)
        draws = torch.tensor([j.draw() for j in self._jobs], dtype=torch.float64, device=device)
        tokens, logprobs = sample(logits, temperatures, draws)
        self._record(tokens.tolist(), logprobs.tolist())

    @torch.inference_mode()
    def apply(self, sources: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
        """Copy a checked version into the model, and compute the running contexts anew.

        Returns:
            The model's own tensors, which stay as they are until the next call.

        Raises:
            EngineError: the tensors are not this model's; nothing was changed.
        """
        if self._asleep:
            raise EngineError("the engine is asleep")
        state: dict[str, Tensor] = self._model.state_dict()
        _check_names(state, sources)
        for name, source in sources.items():
            state[name].copy_(source)
        self.version = version
        for row in self._rows:
            row.cached = 0
        for index in range(len(self._jobs)):
            self._prefill(index)
        return {name: tensor.detach() for name, tensor in state.items()}

    def sleep(self) -> None:
        """Free the cache and the parameters' memory. Buffers stay: they are small and constant.

        The parameters themselves stay too, so that those that are tied still are afterwards.
        """
        assert self.idle, "requests are running"
        self.version = NO_VERSION
        rows = len(self._rows)
        self._cache, self._rows = SlotCache(rows), [Row() for _ in range(rows)]
        if not self._asleep:
            self._asleep = [(weight, weight.shape) for weight in self._model.parameters()]
            for weight, _ in self._asleep:
                weight.data = weight.data.new_empty(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Give the parameters memory again. The cache takes its own at the first pass."""
        for weight, shape in self._asleep:
            weight.data = weight.data.new_empty(shape)
        self._asleep = []

    @torch.inference_mode()
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of `tokens[1:]` in one forward pass without cache."""
        ids = torch.tensor([list(tokens)], device=self._model.device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        logprobs = logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    @torch.inference_mode()
    def read_kv(self, context: Sequence[int]) -> tuple[int, list[Tensor]] | None:
        """Cache of all but at most the last token of a context, if some row has it."""
        index, cached = self._best_row(context)
        if cached < max(1, len(context) - 1):
            return None
        return cached, self._cache.read(index, cached)

    @torch.inference_mode()
    def write_kv(self, context: Sequence[int], version: int, content: Sequence[Tensor]) -> bool:
        """Keep a context's keys and values in a free row, for the job that will want them."""
        if version != self.version or not context or not self.knows(context):
            return False
        if not self._jobs and not any(row.cached for row in self._rows):
            self._forward(0, [[0]], [0], head=False)  # The cache takes its shape from a pass.
        target = self._free_row()
        if not self._cache.write(target, content, len(context)):
            return False
        self._rows[target] = Row(list(context), len(context), next(self._uses))
        return True

    def _fits(self, job: Job) -> bool:
        if not self._jobs:
            return True
        held = sum(len(j.request.context) + j.max_tokens for j in [*self._jobs, job])
        return len(self._jobs) < self._slots and held <= self._kv_tokens

    def _begin(self, job: Job) -> None:
        """Give the job the next row, going on in a kept one where that is its own past."""
        index = len(self._jobs)
        context = list(job.request.context)
        best, cached = self._best_row(context)
        goes_on = best >= index and 0 < cached == self._rows[best].cached
        self._exchange(index, best if goes_on else self._free_row())
        self._jobs.append(job)
        row = self._rows[index]
        self._rows[index] = Row(context, row.shared(context), next(self._uses))
        self._accounting.started(job.request.request_id)
        self._prefill(index)

    def _prefill(self, index: int) -> None:
        """Cache all but the last token of a row, copying what another row has of them."""
        row = self._rows[index]
        wanted = len(row.tokens) - 1
        row.cached = min(row.cached, wanted)
        best, cached = self._best_row(row.tokens[:wanted])
        if cached > row.cached:
            self._cache.copy(best, index, cached)
            row.cached = cached
        if row.cached < wanted:
            self._forward(index, [row.tokens[row.cached : wanted]], [row.cached], head=False)
            self.prefill_tokens += wanted - row.cached
            row.cached = wanted

    def _forward(
        self, first: int, tokens: list[list[int]], starts: list[int], *, head: bool = True
    ) -> Tensor:
        """Feed equally many tokens to adjacent rows; the last one's logits, or nothing useful."""
        device = self._model.device
        ids = torch.tensor(tokens, device=device)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(
            ids.shape[1], device=device
        )
        self._cache.select(first, positions)
        keys = torch.arange(self._cache.reach, device=device)
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": (keys <= positions[:, :, None])[:, None],
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if not head:
            return self._model.base_model(**inputs).last_hidden_state
        return self._model(**inputs, logits_to_keep=1).logits[:, -1]

    def _record(self, tokens: list[int], logprobs: list[float]) -> None:
        now = time.monotonic()
        # From the end, since a finished job's row is taken by the last one.
        for index in reversed(range(len(self._jobs))):
            job, row = self._jobs[index], self._rows[index]
            job.first_s = now if job.first_s is None else job.first_s
            row.cached += 1
            row.tokens.append(tokens[index])
            job.tokens.append(tokens[index])
            job.logprobs.append(logprobs[index])
            job.versions.append(self.version)
            self._accounting.sampled(job.request.request_id, 1)
            if reason := self._finish_reason(job):
                self._remove(index)
                job.finish(reason)

    def _finish_reason(self, job: Job) -> FinishReason | None:
        stop = job.request.stop
        if job.tokens[-1] in self._eos or completes_stop(self._tokenizer, job.tokens, stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(job.tokens) >= job.max_tokens else None

    def _remove(self, index: int) -> None:
        last = len(self._jobs) - 1
        self._rows[index].used = next(self._uses)
        self._exchange(index, last)
        self._jobs[index] = self._jobs[last]
        self._jobs.pop()

    def _exchange(self, a: int, b: int) -> None:
        self._cache.swap(a, b)
        self._rows[a], self._rows[b] = self._rows[b], self._rows[a]

    def _best_row(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The row with the longest cached prefix of `tokens`, free ones first, and its length."""
        lengths = [(row.shared(tokens), index) for index, row in enumerate(self._rows)]
        cached, index = max(lengths)
        return index, cached

    def _free_row(self) -> int:
        """An empty row, or the least recently used: what it holds is lost."""
        free = range(len(self._jobs), len(self._rows))
        return min(free, key=lambda index: (self._rows[index].cached > 0, self._rows[index].used))


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends a generation, by the model's or by the tokenizer's word."""
    generation: Any = model.generation_config
    named = getattr(generation, "eos_token_id", None)
    listed: list[int] = named if isinstance(named, list) else [named] if named is not None else []
    own: Any = tokenizer.eos_token_id
    return {*listed, *([own] if own is not None else [])}


def _check_names(state: dict[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Every tensor of the model has a source of its shape; tied ones have one together."""
    for name, source in sources.items():
        if name not in state or state[name].shape != source.shape:
            raise EngineError(f"the version's tensor {name} {list(source.shape)} does not fit")
    covered = {state[name].data_ptr() for name in sources}
    for name, tensor in state.items():
        if tensor.data_ptr() not in covered:
            raise EngineError(f"the version has no tensor {name}")
