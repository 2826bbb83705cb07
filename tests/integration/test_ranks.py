"""Two data-parallel ranks as real processes."""

import contextlib
import os
import signal
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.canary import CANARY_TOKENS
from common.errors import RunFailed
from services.trainer import checkpoint
from services.trainer.checkpoint import Contents
from services.trainer.publish import Publisher
from services.trainer.ranks import Ranks
from tests.support.models import make_tiny_model
from tests.support.trainer import sequences, siblings, trainer_config

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", tied=True)


def test_two_ranks_equal_one_until_one_is_killed(tmp_path: Path, model: Path) -> None:
    """One test, since processes that import torch take seconds to start.

    Three micro-batches on two ranks; weights and moments restored, sharded, and gathered.
    """
    one = Ranks(trainer_config(model, micro_batch_tokens=40), model, resume=False)
    one.train(sequences(7), 1)
    saved = save(tmp_path, model, one)
    two = Ranks(trainer_config(model, micro_batch_tokens=40, ranks=2), saved, resume=True)
    try:
        assert_close(two.weights(), one.weights())
        assert_close(two.optimizer_state(), one.optimizer_state())
        for step in (2, 3):
            batch = sequences(7, seed=step) + siblings(9, prompt=60, seed=step)
            first, second = one.train(batch, step), two.train(batch, step)
            assert second.metrics == pytest.approx(first.metrics, rel=1e-4, abs=1e-6)
        assert_close(two.optimizer_state(), one.optimizer_state())
        assert_published(tmp_path, two)
        poisoned = [replace(sequences(1)[0], advantage=float("nan"))]
        assert two.train(poisoned, 4).skipped == "nonfinite"

        child = two._children[0]
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        with publishing(tmp_path / "later", two) as publisher:
            segment = publisher.choose(())
            assert segment is not None
            with pytest.raises(RunFailed, match="trainer rank 1"):
                two.publish(publisher, segment).result(30)
        with pytest.raises(RunFailed, match="trainer rank 1"):
            two.train(sequences(4), 4)
    finally:
        two.close()


def assert_published(tmp_path: Path, ranks: Ranks) -> None:
    """Each rank writes its rows; the file is what gathering would have given."""
    with publishing(tmp_path / "segments", ranks) as publisher:
        for step in (4, 5):
            segment = publisher.choose(())
            assert segment is not None
            canary = ranks.publish(publisher, segment).result(30)
            assert len(canary) == CANARY_TOKENS - 1
            expected = ranks.weights()
            loaded = load_file(segment.path)
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())
            ranks.train(sequences(4, seed=step), step, before_update=publisher.join)


@contextlib.contextmanager
def publishing(directory: Path, ranks: Ranks) -> Generator[Publisher]:
    directory.mkdir()
    with ThreadPoolExecutor(1) as executor:
        publisher = Publisher(directory, "run", torch.float32, executor)
        publisher.prepare(ranks.outlet.shapes)
        try:
            yield publisher
        finally:
            publisher.close()


def save(run_dir: Path, model: Path, ranks: Ranks) -> Path:
    return checkpoint.save(
        run_dir,
        Contents(step=1, lineage=0, config=""),
        source=model,
        model=ranks.weights(),
        optimizer=ranks.optimizer_state(),
    )


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, atol=1e-5), name
