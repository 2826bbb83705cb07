"""The search preset samples what its drift declares, and the calibration finds such numbers."""

from dataclasses import replace

import pytest

from services.simulator.workload_calibration import fit_lengths, mean_output
from services.simulator.workload_presets import SEARCH_R1


@pytest.mark.slow
@pytest.mark.parametrize("dial", SEARCH_R1.dials, ids=lambda dial: f"{dial.strength:g}")
def test_searches_are_as_long_as_declared_at_both_ends_of_the_drift(dial) -> None:
    drift = SEARCH_R1.drift
    low = mean_output(SEARCH_R1, dial, step=0)
    high = mean_output(SEARCH_R1, dial, step=int(drift.steps))
    assert low == pytest.approx(drift.mean_from, rel=0.01)
    assert high == pytest.approx(drift.mean_to, rel=0.01)


@pytest.mark.slow
def test_a_dial_that_is_off_is_brought_back() -> None:
    wanted = SEARCH_R1.dials[-1]
    found = fit_lengths(SEARCH_R1, replace(wanted, log_mean=6.5, log_growth=0.1))
    assert found.log_mean == pytest.approx(wanted.log_mean, abs=0.005)
    assert found.log_growth == pytest.approx(wanted.log_growth, abs=0.005)
