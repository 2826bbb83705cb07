import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.batch import TrainingSequence
from services.trainer.model import Policy, micro_batch
from services.trainer.step import Learner, StepAbandoned, StepResult, split
from tests.support.trainer import sequences, siblings, tiny_policy, trainer_config

CPU = torch.device("cpu")


def learner(directory: Path, **training: Any) -> Learner:
    return Learner(tiny_policy(directory), trainer_config(**training))


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def gradient(made: Learner) -> torch.Tensor:
    """The clipped gradient of the only step so far, times 1 - beta1."""
    return torch.cat([entry["exp_avg"].flatten() for entry in made.optimizer.state.values()])


def on_policy(
    made: Learner, batch: Sequence[TrainingSequence], temperature: float
) -> list[TrainingSequence]:
    """The batch as if this policy had sampled it."""
    with torch.no_grad():
        return [
            replace(s, behaviour=made.policy(micro_batch([s], CPU), temperature).numpy())
            for s in batch
        ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_on_policy_the_ratio_is_one_at_every_temperature(
    tmp_path: Path, temperature: float
) -> None:
    made = learner(tmp_path, temperature=temperature)
    batch = on_policy(made, sequences(8), temperature)
    metrics = made.train(batch, 1).metrics
    assert metrics["mismatch_kl/max"] < 1e-6
    assert metrics["importance/cap_share"] == 0.0
    total = sum(len(s.actions) for s in batch)
    mean = sum(s.advantage * len(s.actions) for s in batch) / total
    assert metrics["loss/policy"] == pytest.approx(-mean, abs=1e-3)


@pytest.mark.parametrize("average", ["token", "sequence"])
@pytest.mark.parametrize("limit", [1, 20, 60])
def test_the_result_does_not_depend_on_packing(tmp_path: Path, average: str, limit: int) -> None:
    results: list[tuple[StepResult, torch.Tensor]] = []
    for tokens in (10_000, limit):
        made = learner(tmp_path, micro_batch_tokens=tokens, loss_average=average)
        results.append((made.train(sequences(7), 1), gradient(made)))
    (whole, expected), (parts, actual) = results
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)
    assert torch.allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_sharing_the_prompt_of_a_group_changes_nothing(tmp_path: Path, tied: bool) -> None:
    batch = siblings(8, prompt=90, seed=1) + siblings(4, prompt=5, seed=2)
    results: list[tuple[StepResult, torch.Tensor]] = []
    for share in (False, True):
        policy = tiny_policy(tmp_path, tied=tied)
        assert policy.shares_prefix
        policy.shares_prefix = share
        made = Learner(policy, trainer_config())
        results.append((made.train(batch, 1), gradient(made)))
    (apart, expected), (shared, actual) = results
    assert shared.metrics == pytest.approx(apart.metrics, rel=1e-4, abs=1e-6)
    assert torch.allclose(actual, expected, atol=1e-6)


def test_the_gradient_is_that_of_the_whole_batch_by_autograd(tmp_path: Path) -> None:
    made = learner(tmp_path, micro_batch_tokens=30, grad_norm_max=1e9)
    batch = on_policy(made, sequences(6), 1.0)
    reference = tiny_policy(tmp_path)
    logprobs = [reference(micro_batch([s], CPU), 1.0) for s in batch]
    total = sum(len(s.actions) for s in batch)
    gains = [lp.sum() * s.advantage for lp, s in zip(logprobs, batch, strict=True)]
    (-torch.stack(gains).sum() / total).backward()
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in reference.parameters() if p.grad is not None]
    )
    assert made.train(batch, 1).metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_step_computed_in_bfloat16_is_nearly_that_in_float32(tmp_path: Path) -> None:
    gradients: list[torch.Tensor] = []
    for dtype in ("float32", "bfloat16"):
        made = learner(tmp_path / dtype, compute_dtype=dtype)
        made.train(sequences(6), 1)
        assert {p.dtype for p in made.policy.parameters()} == {torch.float32}
        gradients.append(gradient(made))
    exact, rough = gradients
    assert not torch.equal(exact, rough)
    assert (exact - rough).norm() < 0.1 * exact.norm()


def test_a_better_action_becomes_likelier(tmp_path: Path) -> None:
    made = learner(tmp_path)
    batch = on_policy(made, [replace(s, advantage=1.0) for s in sequences(4)], 1.0)
    made.train(batch, 1)
    after = on_policy(made, batch, 1.0)
    assert sum(s.behaviour.sum() for s in after) > sum(s.behaviour.sum() for s in batch)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_non_finite_step_changes_nothing(tmp_path: Path, broken: float) -> None:
    made, batch = learner(tmp_path), sequences(4)
    before = weights(made.policy)
    poisoned = replace(batch[0], behaviour=np.full_like(batch[0].behaviour, broken))
    result = (
        made.train([poisoned, *batch[1:]], 1)
        if broken != math.inf
        else made.train([replace(batch[0], advantage=math.inf), *batch[1:]], 1)
    )
    assert result.skipped == "nonfinite"
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert torch.equal(weights(made.policy), before)
    assert not made.optimizer.state
    assert made.train(batch, 1).skipped == ""


def test_a_batch_without_advantage_is_skipped(tmp_path: Path) -> None:
    made = learner(tmp_path)
    result = made.train([replace(s, advantage=0.0) for s in sequences(4)], 1)
    assert result == StepResult("zero_variance", {})
    assert made.train([], 1).skipped == "zero_variance"


def test_an_abandoned_step_changes_nothing(tmp_path: Path) -> None:
    made = learner(tmp_path, micro_batch_tokens=1)
    before, calls = weights(made.policy), iter([False, False, True])

    def stop_at_the_third() -> None:
        if next(calls):
            raise StepAbandoned

    with pytest.raises(StepAbandoned):
        made.train(sequences(4), 1, between=stop_at_the_third)
    assert torch.equal(weights(made.policy), before)


def test_weights_change_only_after_the_hook(tmp_path: Path) -> None:
    made = learner(tmp_path)
    before, seen = weights(made.policy), []
    made.train(sequences(4), 1, before_update=lambda: seen.append(weights(made.policy)))
    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert not torch.equal(weights(made.policy), before)


def test_the_learning_rate_warms_up(tmp_path: Path) -> None:
    made = learner(tmp_path, warmup_steps=4)
    rates = [made.train(sequences(2), step).metrics["lr"] for step in (1, 2, 4, 9)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 1e-3])


def test_minibatches_are_clipped_against_the_policy_of_the_step_start(tmp_path: Path) -> None:
    made = learner(tmp_path, minibatches=4, learning_rate=0.05)
    metrics = made.train(on_policy(made, sequences(8), 1.0), 1).metrics
    assert metrics["mismatch_kl/max"] < 1e-6  # Of the proximal policy, not of the moved one.
    assert metrics["ratio/clip_share"] > 0
    assert metrics["updates/skipped"] == 0
    assert metrics["tokens/trained"] == sum(len(s.actions) for s in sequences(8))


def test_a_batch_splits_evenly_and_never_into_nothing() -> None:
    batch = sequences(7)
    assert [len(part) for part in split(batch, 3)] == [2, 2, 3]
    assert [len(part) for part in split(batch[:2], 3)] == [1, 1]
