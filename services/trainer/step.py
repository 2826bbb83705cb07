"""One optimizer step on one rank: micro-batches, gradient, clip, update, or none of it.

Micro-batches come in rounds, one for each rank; what replicas have computed is added between
rounds. All ranks go through the same rounds, so their collectives meet whatever replicas do.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.config import Config
from services.trainer.batch import TrainingSequence, token_weights
from services.trainer.gradients import GradientLayout, add_gradient
from services.trainer.losses import SUMS
from services.trainer.model import Policy
from services.trainer.packing import Pack, plan
from services.trainer.pieces import Piece, Pieces, Totals
from services.trainer.rounds import Alone, Sharing, Sum, Work, in_rounds

Proximal: TypeAlias = dict[tuple[int, ...], Tensor] | None
"""Of each round, this rank's log-probabilities at the start of the step; None: as they are."""


class StepAbandoned(Exception):
    """The process stops; no weight was changed by the step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one step."""

    skipped: str
    """`nonfinite` or `zero_variance` when no weight was changed; else empty."""
    metrics: dict[str, float]


def nothing() -> None:
    """The default of the hooks."""


class Learner:
    """Policy and optimizer of this rank.

    With several ranks every rank calls `train` with the same sequences; each runs its share.
    """

    def __init__(self, policy: Policy, config: Config, *, rank: int = 0, ranks: int = 1) -> None:
        self.policy = policy
        self.rank, self.ranks = rank, ranks
        self.training = training = config.training
        self.pieces = Pieces(policy, config)
        self.layout = GradientLayout.of(policy)
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
        sharing: Sharing | None = None,
    ) -> StepResult:
        """Do step number `step` (1-based) with the sequences of its batch.

        Args:
            sequences: the batch; its order decides the split into minibatches.
            step: decides the learning rate during warm-up.
            before_update: called before weights change.
            between: called between micro-batches until weights change; may raise.
            sharing: deals the micro-batches of a step of one update; None: nobody helps.
        """
        if all(sequence.advantage == 0.0 for sequence in sequences):
            return StepResult("zero_variance", {})
        rate = self._set_learning_rate(step)
        parts = split(sequences, self.training.minibatches)
        proximal = self._proximal(sequences, between) if len(parts) > 1 else [None]
        results: list[StepResult] = []
        if sharing is None or len(parts) > 1:
            sharing = Alone(self.ranks)
        for part, known in zip(parts, proximal, strict=True):
            taken = any(not result.skipped for result in results)
            totals = self._accumulate(part, known, nothing if taken else between, sharing)
            results.append(self._update(totals, before_update))
        return _merged(results, {"lr": rate, "sequences/trained": float(len(sequences))})

    def _set_learning_rate(self, step: int) -> float:
        warmup = self.training.warmup_steps
        rate = self.training.learning_rate * (min(1.0, step / warmup) if warmup else 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _work(self, sequences: Sequence[TrainingSequence]) -> Work:
        """The micro-batches of one update; every rank finds the same."""
        weights = token_weights(sequences, self.training.loss_average)
        limit = self.training.micro_batch_tokens
        # FSDP frees a layer's weights before the gradient of shared keys and values needs them.
        share = self.ranks == 1 and self.policy.shares_prefix
        return Work(sequences, weights, plan(sequences, limit, share=share))

    def _piece(self, work: Work, round_packs: Sequence[int]) -> Piece:
        """This rank's share of a round; where packs run short, an empty one."""
        mine = self.rank < len(round_packs)
        pack = work.packs[round_packs[self.rank]] if mine else Pack()
        return self.pieces.lay_out(pack, work.sequences, work.weights)

    @torch.no_grad()
    def _proximal(
        self, sequences: Sequence[TrainingSequence], between: Callable[[], None]
    ) -> list[Proximal]:
        """Log-probabilities before the first of several updates, by minibatch and round."""
        known: list[Proximal] = []
        for part in split(sequences, self.training.minibatches):
            logprobs: dict[tuple[int, ...], Tensor] = {}
            work = self._work(part)
            for packs in in_rounds(len(work.packs), self.ranks):
                between()
                logprobs[packs] = self.pieces.logprobs(self._piece(work, packs))
            known.append(logprobs)
        return known

    def _accumulate(
        self,
        sequences: Sequence[TrainingSequence],
        proximal: Proximal,
        between: Callable[[], None],
        sharing: Sharing,
    ) -> Totals:
        """Add up the gradient of all micro-batches, by this rank and by replicas."""
        work, totals = self._work(sequences), Totals(self.pieces.device)
        sharing.begin(work)
        try:
            while (due := sharing.next(between)) is not None:
                between()
                if isinstance(due, Sum):
                    self._add(due, totals)
                    continue
                # With one update per step the proximal policy is the current one.
                fixed = None if proximal is None else proximal[due.packs]
                piece = self._piece(work, due.packs)
                # FSDP averages gradients over ranks; the weights already hold the true totals.
                self.pieces.accumulate(piece, totals, proximal=fixed, scale=self.ranks)
        finally:
            sharing.end()
        return totals

    def _add(self, due: Sum, totals: Totals) -> None:
        """Add what a replica has computed: this rank's rows of it."""
        add_gradient(self.policy, self.layout, due, rank=self.rank, ranks=self.ranks)
        if due.sums:
            totals.add_report(due.sums)
        if self.ranks > 1:
            dist.barrier()  # Rank 0 lets go of the file afterwards.

    def _update(self, totals: Totals, before_update: Callable[[], None]) -> StepResult:
        norm = self._clip_gradient()
        metrics = _metrics(self._reduced(totals), norm)
        if not (math.isfinite(norm) and math.isfinite(metrics["loss/policy"])):
            self.optimizer.zero_grad()
            return StepResult("nonfinite", {k: v for k, v in metrics.items() if math.isfinite(v)})
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult("", metrics)

    def _clip_gradient(self) -> float:
        """Scale the gradient to `grad_norm_max`; return its norm before, over all ranks."""
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.training.grad_norm_max)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def _reduced(self, totals: Totals) -> Totals:
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


def _metrics(totals: Totals, norm: float) -> dict[str, float]:
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
