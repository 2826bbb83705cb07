"""The experiments that the simulator's constants were tuned on."""

from random import Random

import pytest

from services.simulator.experiments import EXPERIMENTS
from services.simulator.experiments.a0_tensor_parallel import BATCH, DEVICES
from services.simulator.experiments.result import BandCheck
from services.simulator.experiments.rollouts import sustained


def test_rollout_and_training_grow_as_published() -> None:
    shares: list[float] = []
    result = EXPERIMENTS["A1"]([0], shares.append)
    assert [check.name for check in result.checks if not check.ok] == []
    assert shares[-1] == 1.0


@pytest.mark.slow
def test_the_long_tail_is_as_long_as_published() -> None:
    result = EXPERIMENTS["A2"](range(5), lambda _: None)
    assert [check for check in result.checks if not check.ok] == []


def test_short_batches_are_faster_on_single_devices() -> None:
    one = sustained(1, BATCH // DEVICES, 160, 2_048, Random(1)).tokens_per_s * DEVICES
    eight = sustained(8, BATCH, 160, 2_048, Random(1)).tokens_per_s
    assert 2.2 < one / eight < 3.8


def test_a_band_includes_its_bounds() -> None:
    assert BandCheck("x", 1.0, "", 1.0, 2.0).ok
    assert not BandCheck("x", 2.1, "", 1.0, 2.0).ok
