"""One optimizer step on one rank: micro-batches, gradient, clip, update, or none of it.

The loss is a sum over tokens whose weights hold the averaging over the whole step, so gradients
of micro-batches and of ranks add up, whatever the split.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.config import Config
from services.trainer.batch import TrainingSequence, token_weights
from services.trainer.losses import SUMS, Clipping, TokenLogprobs, policy_loss, token_sums
from services.trainer.model import DTYPES, MicroBatch, Policy, micro_batch
from services.trainer.packing import Pack, deal, plan


class StepAbandoned(Exception):
    """The process stops; no weight was changed by the step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one step."""

    skipped: str
    """`nonfinite` or `zero_variance` when no weight was changed; else empty."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One micro-batch with what its loss needs, a number per action token each."""

    batch: MicroBatch
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor


@dataclass(slots=True)
class _Totals:
    """What the metrics are made of, summed over the tokens of this rank."""

    loss: Tensor
    sums: Tensor
    worst: Tensor


def nothing() -> None:
    """The default of the hooks."""


class Learner:
    """Policy and optimizer of this rank.

    With several ranks every rank calls `train` with the same sequences; each runs its share.
    """

    def __init__(self, policy: Policy, config: Config, *, rank: int = 0, ranks: int = 1) -> None:
        self.policy = policy
        self.rank, self.ranks = rank, ranks
        self.temperature = config.sampling.temperature
        self.training = training = config.training
        self.clipping = Clipping(training.clip_low, training.clip_high, training.importance_cap)
        self.device = next(policy.parameters()).device
        self.compute_dtype = DTYPES[training.compute_dtype]
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=training.learning_rate,
            betas=training.betas,
            weight_decay=training.weight_decay,
            foreach=True,
        )

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        step: int,
        *,
        before_update: Callable[[], None] = nothing,
        between: Callable[[], None] = nothing,
    ) -> StepResult:
        """Do step number `step` (1-based) with the sequences of its batch.

        Args:
            sequences: the batch; its order decides the split into minibatches.
            step: decides the learning rate during warm-up.
            before_update: called before weights change.
            between: called between micro-batches until weights change; may raise.
        """
        if all(sequence.advantage == 0.0 for sequence in sequences):
            return StepResult("zero_variance", {})
        rate = self._set_learning_rate(step)
        parts = split(sequences, self.training.minibatches)
        proximal = self._proximal(sequences, between) if len(parts) > 1 else [None]
        results: list[StepResult] = []
        for part, known in zip(parts, proximal, strict=True):
            taken = any(not result.skipped for result in results)
            results.append(self._update(part, known, before_update, nothing if taken else between))
        return _merged(results, {"lr": rate, "sequences/trained": float(len(sequences))})

    def _set_learning_rate(self, step: int) -> float:
        warmup = self.training.warmup_steps
        rate = self.training.learning_rate * (min(1.0, step / warmup) if warmup else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _pieces(self, sequences: Sequence[TrainingSequence]) -> list[_Piece]:
        """This rank's micro-batches."""
        weights = token_weights(sequences, self.training.loss_average)
        limit = self.training.micro_batch_tokens
        # FSDP frees a layer's weights before the gradient of shared keys and values needs them.
        share = self.ranks == 1 and self.policy.shares_prefix
        packs = deal(plan(sequences, limit, share=share), self.ranks)[self.rank]
        return [self._piece(pack, sequences, weights) for pack in packs]

    def _piece(
        self, pack: Pack, batch: Sequence[TrainingSequence], batch_weights: Sequence[float]
    ) -> _Piece:
        sequences = [batch[i] for i in pack.members]
        weights = [batch_weights[i] for i in pack.members]
        counts = torch.tensor([len(s.actions) for s in sequences], dtype=torch.int64)

        def per_token(values: list[float]) -> Tensor:
            return torch.tensor(values).repeat_interleave(counts).to(self.device)

        behaviour = [torch.tensor(s.behaviour) for s in sequences]
        return _Piece(
            micro_batch(sequences, self.device, shared=pack.shared),
            (torch.cat(behaviour) if behaviour else torch.empty(0)).to(self.device),
            per_token([s.advantage for s in sequences]),
            per_token(weights),
        )

    @torch.no_grad()
    def _proximal(
        self, sequences: Sequence[TrainingSequence], between: Callable[[], None]
    ) -> list[list[Tensor] | None]:
        """Log-probabilities before the first of several updates, by minibatch and piece."""
        known: list[list[Tensor] | None] = []
        for part in split(sequences, self.training.minibatches):
            logprobs: list[Tensor] = []
            for piece in self._pieces(part):
                between()
                logprobs.append(self._logprobs(piece))
            known.append(logprobs)
        return known

    def _update(
        self,
        sequences: Sequence[TrainingSequence],
        proximal: list[Tensor] | None,
        before_update: Callable[[], None],
        between: Callable[[], None],
    ) -> StepResult:
        totals = self._accumulate(sequences, proximal, between)
        norm = self._clip_gradient()
        metrics = _metrics(self._reduced(totals), norm)
        if not (math.isfinite(norm) and math.isfinite(metrics["loss/policy"])):
            self.optimizer.zero_grad()
            return StepResult("nonfinite", {k: v for k, v in metrics.items() if math.isfinite(v)})
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult("", metrics)

    def _accumulate(
        self,
        sequences: Sequence[TrainingSequence],
        proximal: list[Tensor] | None,
        between: Callable[[], None],
    ) -> _Totals:
        """Add up the gradient of all micro-batches of this rank."""
        zero = torch.zeros((), device=self.device)
        totals = _Totals(zero, torch.zeros(len(SUMS), device=self.device), zero)
        for number, piece in enumerate(self._pieces(sequences)):
            between()
            current = self._logprobs(piece)
            # With one update per step the proximal policy is the current one.
            fixed = current.detach() if proximal is None else proximal[number]
            logprobs = TokenLogprobs(current, fixed, piece.behaviour)
            loss = policy_loss(logprobs, piece.advantages, piece.weights, self.clipping)
            # FSDP averages gradients over ranks; the weights already hold the true totals.
            (loss * self.ranks).backward()
            sums, worst = token_sums(logprobs, piece.advantages, self.clipping)
            totals.loss = totals.loss + loss.detach()
            totals.sums += sums
            totals.worst = torch.maximum(totals.worst, worst)
        return totals

    def _logprobs(self, piece: _Piece) -> Tensor:
        lower = self.compute_dtype is not torch.float32
        with torch.autocast(self.device.type, self.compute_dtype, enabled=lower):
            return self.policy(piece.batch, self.temperature)

    def _clip_gradient(self) -> float:
        """Scale the gradient to `grad_norm_max`; return its norm before, over all ranks."""
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.training.grad_norm_max)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def _reduced(self, totals: _Totals) -> _Totals:
        """The totals of all ranks."""
        if self.ranks > 1:
            summed = torch.cat([totals.loss[None], totals.sums])
            dist.all_reduce(summed)
            dist.all_reduce(totals.worst, dist.ReduceOp.MAX)
            totals.loss, totals.sums = summed[0], summed[1:]
        return totals


def split(sequences: Sequence[TrainingSequence], parts: int) -> list[Sequence[TrainingSequence]]:
    """Consecutive parts whose sizes differ by one at most; never an empty one."""
    parts = min(parts, len(sequences))
    bounds = [len(sequences) * part // parts for part in range(parts + 1)]
    return [sequences[low:high] for low, high in pairwise(bounds)]


def _metrics(totals: _Totals, norm: float) -> dict[str, float]:
    sums = dict(zip(SUMS, totals.sums.tolist(), strict=True))
    tokens = sums["tokens"]
    return {
        "loss/policy": totals.loss.item(),
        "grad_norm": norm,
        "mismatch_kl/mean": sums["mismatch_kl"] / tokens,
        "mismatch_kl/max": totals.worst.item(),
        "ratio/clip_share": sums["clipped"] / tokens,
        "importance/cap_share": sums["capped"] / tokens,
        "entropy/sampled": sums["surprisal"] / tokens,
        "tokens/trained": tokens,
    }


SUMMED = ("tokens/trained",)
LARGEST = ("mismatch_kl/max", "grad_norm")


def _merged(results: Sequence[StepResult], extra: dict[str, float]) -> StepResult:
    """One result for all updates of a step; it counts as skipped when every update was."""
    if all(result.skipped for result in results):
        return StepResult(results[0].skipped, results[0].metrics | extra)
    taken = [result.metrics for result in results if not result.skipped]
    merged: dict[str, float] = {}
    for name in taken[0]:
        values = [metrics[name] for metrics in taken]
        if name in SUMMED:
            merged[name] = sum(values)
        elif name in LARGEST:
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    skipped = float(len(results) - len(taken))
    return StepResult("", merged | extra | {"updates/skipped": skipped})
