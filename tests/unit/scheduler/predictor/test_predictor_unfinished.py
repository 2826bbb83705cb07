"""What unfinished trajectories say."""

import pytest

from common.trajectory import ToolStatus
from services.scheduler.predictor.features import Point, Progress, ToolCells
from services.scheduler.predictor.unfinished import (
    location_of,
    log_turns_left,
    share_unfinished,
)
from services.scheduler.routing.outcomes import Payload, ToolOutcome


def point(turns: int, tokens: int) -> Point:
    progress = Progress(ToolCells())
    outcome = ToolOutcome("search", ToolStatus.OK, Payload.SMALL, 20, 0.1)
    for turn in range(1, turns):
        progress.advance(outcome, turn * tokens, turn * (tokens + 20))
    return progress.advance(outcome, turns * tokens, turns * (tokens + 20))


def test_without_ends_more_turns_so_far_mean_more_to_come() -> None:
    left = [log_turns_left(64, 64 * turns, 0.0, 0.0) for turns in (1, 2, 5, 10)]
    assert left == sorted(left)
    assert left[-1] > left[0] + 1


def test_many_ends_bring_the_turns_left_down() -> None:
    left = [log_turns_left(64, 640, ended, 4 * ended) for ended in (0.0, 64.0, 640.0)]
    assert left == sorted(left, reverse=True)


def test_the_unfinished_count_less_the_more_has_finished() -> None:
    assert share_unfinished(100, 0.0) == 1.0
    assert share_unfinished(100, 900.0) == pytest.approx(0.1)


def test_once_all_is_known_the_regression_alone_says_how_long() -> None:
    assert location_of(point(3, 80), 5.0, 2.0, 0.0) == 5.0


def test_before_anything_is_known_longer_turns_mean_more_tokens_to_come() -> None:
    short, long = (location_of(point(3, tokens), 5.0, 2.0, 1.0) for tokens in (40, 400))
    assert long > short + 1
