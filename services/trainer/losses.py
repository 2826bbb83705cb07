"""The decoupled PPO loss, and what is measured beside it.

Three policies: *behaviour* sampled the token, *proximal* is the policy at the start of the step,
the current one is being optimised. All log-probabilities are of sampled tokens, at the sampling
temperature, shape (tokens,).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Bound of log ratios in the metrics, so that one broken token does not make them infinite."""


@dataclass(frozen=True, slots=True)
class Clipping:
    """Bounds of the two ratios."""

    low: float
    """The ratio current / proximal is clipped below 1 - low …"""
    high: float
    """… and above 1 + high."""
    importance_cap: float
    """The ratio proximal / behaviour is truncated above this."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the three policies say of the same tokens."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor


def policy_loss(
    logprobs: TokenLogprobs, advantages: Tensor, weights: Tensor, clipping: Clipping
) -> Tensor:
    """Weighted sum over tokens of -min(proximal/behaviour, cap) * min(r A, clip(r) A).

    r = current / proximal. The truncated importance weight carries no gradient. `weights` holds
    the averaging (see `batch.token_weights`), so sums of several calls add up to the loss.

    Source: decoupled objective, arXiv 2110.00641 eq. 3 and arXiv 2505.24298 (AReaL) eq. 5;
    truncation, arXiv 1802.01561 (IMPALA); asymmetric clip, arXiv 2503.14476 (DAPO) eq. 10.
    """
    ratio = (logprobs.current - logprobs.proximal).exp()
    clipped = ratio.clamp(1.0 - clipping.low, 1.0 + clipping.high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    importance = (logprobs.proximal - logprobs.behaviour).exp()
    truncated = importance.clamp(max=clipping.importance_cap).detach()
    return -(weights * truncated * surrogate).sum()


SUMS = ("tokens", "mismatch_kl", "clipped", "capped", "surprisal")
"""What `token_sums` adds up, in its order."""


@torch.no_grad()
def token_sums(
    logprobs: TokenLogprobs, advantages: Tensor, clipping: Clipping
) -> tuple[Tensor, Tensor]:
    """Sums over tokens in the order of `SUMS`, and the largest mismatch of one token.

    The mismatch between engine and trainer is the k3 estimate of KL(behaviour || proximal) at
    each token: exp(d) - 1 - d with d = proximal - behaviour; never negative, 0 when they agree.
    Source: http://joschu.net/blog/kl-approx.html. The surprisal -log p of sampled tokens
    estimates the entropy without a pass over the vocabulary.
    """
    d = (logprobs.proximal - logprobs.behaviour).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    kl = d.expm1() - d
    ratio = (logprobs.current - logprobs.proximal).exp()
    clipped = torch.where(advantages >= 0, ratio > 1.0 + clipping.high, ratio < 1.0 - clipping.low)
    capped = d.exp() > clipping.importance_cap
    sums = torch.stack(
        [
            torch.ones_like(d).sum(),
            kl.sum(),
            clipped.sum().to(d.dtype),
            capped.sum().to(d.dtype),
            -logprobs.proximal.sum(),
        ]
    )
    worst = kl.max() if len(kl) else kl.new_zeros(())
    return sums, worst
