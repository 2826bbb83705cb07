import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from common.errors import ConfigError
from services.trainer.batch import TrainingSequence
from services.trainer.model import Policy, load_policy, micro_batch, weights_to_publish
from tests.support.trainer import sequence, sequences, tiny_policy

CPU = torch.device("cpu")


def one_by_one(policy: Policy, batch: list[TrainingSequence], temperature: float) -> torch.Tensor:
    """Log-probabilities from the plain forward pass of each sequence alone."""
    rows: list[torch.Tensor] = []
    for item in batch:
        tokens = torch.tensor(item.tokens, dtype=torch.int64)
        logits = policy.model(input_ids=tokens[None]).logits[0] / temperature
        actions = torch.tensor(item.actions, dtype=torch.int64)
        rows.append(logits.log_softmax(-1)[actions - 1, tokens[actions]])
    return torch.cat(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_a_micro_batch_equals_its_sequences_one_by_one(
    tmp_path: Path, tied: bool, temperature: float
) -> None:
    policy, batch = tiny_policy(tmp_path, tied=tied), sequences(9)
    with torch.no_grad():
        together = policy(micro_batch(batch, CPU), temperature)
        alone = one_by_one(policy, batch, temperature)
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-5)


def test_a_sequence_does_not_see_its_neighbours(tmp_path: Path) -> None:
    policy, first = tiny_policy(tmp_path), sequence(1)
    with torch.no_grad():
        beside = [
            policy(micro_batch([first, sequence(seed, turns=((9, 2), (3, 0)))], CPU), 1.0)
            for seed in (2, 3)
        ]
    count = len(first.actions)
    assert beside[0][:count].tolist() == beside[1][:count].tolist()


def test_only_log_probabilities_of_sampled_tokens_have_a_gradient(tmp_path: Path) -> None:
    """What the environment appended at the end is not even part of the sequence."""
    policy, item = tiny_policy(tmp_path, tied=False), sequence(1, turns=((2, 3), (2, 0)))
    batch = micro_batch([item], CPU)
    assert policy(batch, 1.0).shape == (4,)
    assert (batch.columns + 1).tolist() == item.actions.tolist()
    assert batch.targets.tolist() == item.tokens[item.actions].tolist()


def test_no_sequences_make_a_micro_batch_without_gradient(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    policy(micro_batch([], CPU), 1.0).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_an_architecture_without_a_separate_head_falls_back_to_the_whole_model() -> None:
    class Scaled(GPT2LMHeadModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            output.logits = output.logits * 3.0
            return output

    policy = Policy(Scaled(GPT2Config(vocab_size=200, n_embd=16, n_layer=1, n_head=2)).eval())
    batch = sequences(3)
    with torch.no_grad():
        together = policy(micro_batch(batch, CPU), 1.0)
        alone = one_by_one(policy, batch, 1.0)
    assert not policy._selects
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-5)


def test_tied_weights_are_published_once_under_their_saved_names(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, tied=True)
    names = set(weights_to_publish(policy.model, policy.model.state_dict()))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        load_policy(tmp_path / "nowhere")


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_policy(tmp_path)


def test_a_model_that_is_not_a_causal_lm_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="BertForMaskedLM is not a causal LM"):
        load_policy(tmp_path)


def test_a_model_without_its_weights_is_refused(tmp_path: Path) -> None:
    tiny_policy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="weights are missing"):
        load_policy(tmp_path)


def test_a_model_is_loaded_in_float32_without_dropout(tmp_path: Path) -> None:
    tiny_policy(tmp_path)
    policy = load_policy(tmp_path)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert not policy.model.training
