"""Replicas as real processes, stopped and killed by signals, beside one rank and beside two."""

import pytest

from services.cli.bench_replicas import bench_replicas

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("ranks", "steps", "seed"), [(1, 20, 3), (2, 10, 4)])
def test_steps_with_replicas_that_come_and_go_equal_those_without(
    ranks: int, steps: int, seed: int
) -> None:
    """Also that replicas helped, and that gradients of single steps are equal."""
    report = bench_replicas(steps=steps, replicas=2, ranks=ranks, seed=seed)
    assert report.exit_code == 0, report.to_json()
