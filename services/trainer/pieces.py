"""The gradient of a micro-batch: the one place that computes it, for the core and for replicas.

The loss is a sum over tokens whose weights hold the averaging over the whole step, so gradients
of micro-batches, of ranks and of replicas add up, whatever the split.
"""

# torch and transformers are partially annotated; what they return is annotated here by hand.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.config import Config
from services.trainer.batch import TrainingSequence
from services.trainer.losses import SUMS, Clipping, TokenLogprobs, policy_loss, token_sums
from services.trainer.model import DTYPES, MicroBatch, Policy, micro_batch
from services.trainer.packing import Pack

REPORTED = ("loss", *SUMS, "worst")
"""What a replica reports beside a gradient, in this order."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One micro-batch with what its loss needs, a number per action token each."""

    batch: MicroBatch
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor


class Totals:
    """What the metrics are made of, summed over the tokens of some micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.sums = torch.zeros(len(SUMS), device=device)
        self.worst = torch.zeros((), device=device)

    def report(self) -> list[float]:
        """In the order of `REPORTED`."""
        return [self.loss.item(), *self.sums.tolist(), self.worst.item()]

    def add_report(self, report: Sequence[float]) -> None:
        """Add what a replica has reported."""
        loss, *sums, worst = report
        self.loss = self.loss + loss
        self.sums += torch.tensor(sums, device=self.sums.device)
        self.worst = self.worst.clamp(min=worst)


class Pieces:
    """Lays micro-batches out for a policy, and adds their gradients up in its parameters."""

    def __init__(self, policy: Policy, config: Config) -> None:
        training = config.training
        self.policy = policy
        self._temperature = config.sampling.temperature
        self._clipping = Clipping(training.clip_low, training.clip_high, training.importance_cap)
        self._compute_dtype = DTYPES[training.compute_dtype]

    @property
    def device(self) -> torch.device:
        """Where the policy is now."""
        return next(self.policy.parameters()).device

    def lay_out(
        self, pack: Pack, batch: Sequence[TrainingSequence], batch_weights: Sequence[float]
    ) -> Piece:
        """One micro-batch of a batch; an empty pack gives one that can still be run."""
        device = self.device
        sequences = [batch[i] for i in pack.members]
        weights = [batch_weights[i] for i in pack.members]
        counts = torch.tensor([len(s.actions) for s in sequences], dtype=torch.int64)

        def per_token(values: list[float]) -> Tensor:
            return torch.tensor(values).repeat_interleave(counts).to(device)

        behaviour = [torch.tensor(s.behaviour) for s in sequences]
        return Piece(
            micro_batch(sequences, device, shared=pack.shared),
            (torch.cat(behaviour) if behaviour else torch.empty(0)).to(device),
            per_token([s.advantage for s in sequences]),
            per_token(weights),
        )

    def logprobs(self, piece: Piece) -> Tensor:
        """Of each action token under the policy as it is."""
        lower = self._compute_dtype is not torch.float32
        with torch.autocast(self.device.type, self._compute_dtype, enabled=lower):
            return self.policy(piece.batch, self._temperature)

    def accumulate(
        self, piece: Piece, totals: Totals, *, proximal: Tensor | None = None, scale: float = 1.0
    ) -> None:
        """Add the gradient of one micro-batch, times `scale`, and what is measured beside it.

        Args:
            piece: the micro-batch.
            totals: grows by what is measured.
            proximal: log-probabilities at the start of the step; None: the policy has not moved.
            scale: undoes an averaging that comes later.
        """
        current = self.logprobs(piece)
        fixed = current.detach() if proximal is None else proximal
        logprobs = TokenLogprobs(current, fixed, piece.behaviour)
        loss = policy_loss(logprobs, piece.advantages, piece.weights, self._clipping)
        (loss * scale).backward()
        sums, worst = token_sums(logprobs, piece.advantages, self._clipping)
        totals.loss = totals.loss + loss.detach()
        totals.sums += sums
        totals.worst = torch.maximum(totals.worst, worst)
