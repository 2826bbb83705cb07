from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.trainer import checkpoint
from services.trainer.checkpoint import Contents, latest, prune
from services.trainer.ranks import Ranks
from tests.support.models import make_tiny_model
from tests.support.trainer import sequences, trainer_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", tied=True)


def save(run_dir: Path, model: Path, step: int, ranks: Ranks | None = None) -> Path:
    ranks = ranks or Ranks(trainer_config(model), model, resume=False)
    return checkpoint.save(
        run_dir,
        Contents(step=step, lineage=1, config="digest"),
        source=model,
        model=ranks.weights(),
        optimizer=ranks.optimizer_state(),
    )


def test_a_checkpoint_is_a_model_directory(tmp_path: Path, model: Path) -> None:
    path = save(tmp_path, model, 3)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    original = AutoModelForCausalLM.from_pretrained(model)
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert AutoTokenizer.from_pretrained(path).encode("ab") == AutoTokenizer.from_pretrained(
        model
    ).encode("ab")


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None


def test_the_newest_is_found_by_step(tmp_path: Path, model: Path) -> None:
    for step in (9, 10, 2):
        save(tmp_path, model, step)
    found = latest(tmp_path)
    assert found is not None
    assert found.contents.step == 10


@pytest.mark.parametrize("torn", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_a_torn_checkpoint_is_never_loaded(tmp_path: Path, model: Path, torn: str) -> None:
    save(tmp_path, model, 1)
    file = save(tmp_path, model, 2) / torn
    file.write_bytes(file.read_bytes()[:-7])
    found = latest(tmp_path)
    assert found is not None
    assert found.contents.step == 1


def test_a_draft_is_not_a_checkpoint(tmp_path: Path, model: Path) -> None:
    path = save(tmp_path, model, 1)
    path.rename(path.with_name(".step-000001.draft"))
    assert latest(tmp_path) is None


def test_a_step_is_saved_again_over_a_torn_one(tmp_path: Path, model: Path) -> None:
    (save(tmp_path, model, 1) / "model.safetensors").unlink()
    save(tmp_path, model, 1)
    assert latest(tmp_path) is not None


def test_only_the_newest_are_kept(tmp_path: Path, model: Path) -> None:
    for step in range(4):
        save(tmp_path, model, step)
    (tmp_path / "checkpoints" / "step-000003" / "model.safetensors").unlink()
    aside = tmp_path / "checkpoints" / "best"
    aside.mkdir()
    prune(tmp_path, 2)
    assert aside.exists(), "what somebody put aside is theirs"
    aside.rmdir()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000002",
    ]


def test_5_steps_a_resume_and_5_steps_are_10_steps(tmp_path: Path, model: Path) -> None:
    config = trainer_config(model, warmup_steps=8)
    whole = Ranks(config, model, resume=False)
    for step in range(1, 11):
        whole.train(sequences(4, seed=step), step)
    first = Ranks(config, model, resume=False)
    for step in range(1, 6):
        first.train(sequences(4, seed=step), step)
    second = Ranks(config, save(tmp_path, model, 5, first), resume=True)
    for step in range(6, 11):
        second.train(sequences(4, seed=step), step)
    for name, value in whole.weights().items():
        assert torch.equal(second.weights()[name], value), name
