import math

import pytest
import torch

from services.trainer.losses import SUMS, Clipping, TokenLogprobs, policy_loss, token_sums

CLIPPING = Clipping(low=0.2, high=0.3, importance_cap=2.0)


def one(current: float, proximal: float, behaviour: float, advantage: float) -> float:
    """The loss of one token, from probabilities."""
    logprobs = TokenLogprobs(*(torch.tensor([math.log(p)]) for p in (current, proximal, behaviour)))
    return policy_loss(logprobs, torch.tensor([advantage]), torch.tensor([1.0]), CLIPPING).item()


@pytest.mark.parametrize(
    ("current", "proximal", "behaviour", "advantage", "loss"),
    [
        (0.5, 0.5, 0.5, 2.0, -2.0),
        (0.55, 0.5, 0.5, 2.0, -2.2),
        (0.9, 0.5, 0.5, 2.0, -2.6),  # clipped at 1.3
        (0.9, 0.5, 0.5, -2.0, 3.6),  # a worse action that became likelier is not clipped
        (0.1, 0.5, 0.5, -2.0, 1.6),  # clipped at 0.8
        (0.5, 0.5, 0.4, 2.0, -2.5),  # importance weight 1.25
        (0.5, 0.5, 0.1, 2.0, -4.0),  # importance weight 5, truncated to 2
    ],
)
def test_loss_of_one_token_by_hand(
    current: float, proximal: float, behaviour: float, advantage: float, loss: float
) -> None:
    assert one(current, proximal, behaviour, advantage) == pytest.approx(loss, rel=1e-5)


def test_on_policy_the_gradient_is_that_of_the_log_probability() -> None:
    current = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    fixed = current.detach()
    advantages, weights = torch.tensor([1.0, -2.0, 0.5]), torch.full((3,), 1 / 3)
    policy_loss(TokenLogprobs(current, fixed, fixed), advantages, weights, CLIPPING).backward()
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx((-advantages * weights).tolist())


def test_the_importance_weight_has_no_gradient() -> None:
    proximal = torch.tensor([-1.0], requires_grad=True)
    current = torch.tensor([-1.0], requires_grad=True)
    logprobs = TokenLogprobs(current, proximal.detach(), torch.tensor([-1.2]))
    policy_loss(logprobs, torch.ones(1), torch.ones(1), CLIPPING).backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(-math.exp(0.2))


def sums(proximal: torch.Tensor, behaviour: torch.Tensor) -> dict[str, float]:
    logprobs = TokenLogprobs(proximal, proximal, behaviour)
    values, worst = token_sums(logprobs, torch.ones_like(proximal), CLIPPING)
    return dict(zip(SUMS, values.tolist(), strict=True)) | {"worst": worst.item()}


def test_equal_policies_have_no_mismatch() -> None:
    logprobs = torch.linspace(-5, -0.1, 50)
    measured = sums(logprobs, logprobs)
    assert measured["mismatch_kl"] == measured["worst"] == measured["capped"] == 0.0


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
def test_noise_in_the_engine_moves_the_mismatch_and_engages_the_cap(noise: float) -> None:
    generator = torch.Generator().manual_seed(0)
    proximal = torch.full((2000,), -3.0)
    measured = sums(proximal, proximal + noise * torch.randn(2000, generator=generator))
    assert measured["mismatch_kl"] / 2000 == pytest.approx(
        math.exp(noise**2 / 2) - 1, rel=0.15
    )  # of exp(d) - 1 - d for normal d
    assert (measured["capped"] > 0) == (noise >= 0.3)
    assert measured["worst"] > 0


def test_one_broken_token_keeps_the_metrics_finite() -> None:
    measured = sums(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -500.0]))
    assert all(math.isfinite(value) for value in measured.values())


def test_no_tokens_add_nothing() -> None:
    measured = sums(torch.empty(0), torch.empty(0))
    assert set(measured.values()) == {0.0}
