"""What the metrics say of predictions."""

from math import log

import pytest

from services.scheduler.accuracy import Accuracy


def test_a_perfect_prediction_explains_everything() -> None:
    accuracy = Accuracy()
    accuracy.note([(0, 100.0), (60, 40.0)], 100)
    assert accuracy.take() == {
        "residual/decisions": 2,
        "residual/log_error": 0.0,
        "residual/r2": 1.0,
    }


def test_being_wrong_by_a_factor_counts_the_same_at_any_length() -> None:
    for tokens in (99, 9_999):
        accuracy = Accuracy()
        accuracy.note([(0, 2.0 * (tokens + 1) - 1)], tokens)
        assert accuracy.take()["residual/log_error"] == pytest.approx(log(2))


def test_equal_lengths_leave_nothing_to_explain() -> None:
    accuracy = Accuracy()
    accuracy.note([(0, 10.0), (0, 20.0)], 10)
    assert "residual/r2" not in accuracy.take()


def test_each_step_begins_anew_and_says_nothing_of_nothing() -> None:
    accuracy = Accuracy()
    accuracy.note([(0, 10.0)], 10)
    assert accuracy.take()
    assert accuracy.take() == {}
