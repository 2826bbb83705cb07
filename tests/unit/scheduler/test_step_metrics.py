"""The metrics of a step, and the early warnings that they give rise to."""

from dataclasses import replace

import pytest

from common.messages.scheduler import StepFinished
from common.weights import version_id
from services.scheduler.metrics import (
    batch_metrics,
    early_warnings,
    idle_metrics,
    staleness,
    step_metrics,
)
from services.scheduler.records import TrajectoryRow

ROW = TrajectoryRow(
    "t.e0.a0.0",
    "t.e0.a0",
    0,
    "finished",
    turns=2,
    prompt_tokens=10,
    action_tokens=20,
    observation_tokens=5,
    oldest_version=version_id(0, 3),
    newest_version=version_id(0, 4),
    tools='{"ok": 1, "malformed": 1}',
    stop_reason="answered",
    reward=1.0,
)
OTHER = replace(
    ROW,
    turns=4,
    action_tokens=40,
    oldest_version=version_id(0, 4),
    tools='{"ok": 2}',
    stop_reason="tokens_max",
    reward=0.0,
)
STEP = StepFinished(lineage=0, step=5, attempt=0, skipped="", group_ids=[], metrics={})


def test_the_means_and_extremes_of_a_batch_are_those_worked_out_by_hand() -> None:
    metrics = batch_metrics([ROW, OTHER], step=5)
    expected = {
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "turns/mean": 3.0,
        "tokens/action_mean": 30.0,
        "tokens/context_mean": 45.0,
        "tokens/trained": 60,
        "trajectories/trained": 2,
        "tool/ok": 3,
        "tool/malformed": 1,
        "stop/answered": 0.5,
        "stop/tokens_max": 0.5,
        "stop/turns_max": 0.0,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_a_batch_of_nothing_has_no_means_and_divides_by_nothing() -> None:
    metrics = batch_metrics([], step=1)
    assert metrics["tokens/trained"] == 0
    assert "reward/mean" not in metrics


@pytest.mark.parametrize(
    ("oldest", "step", "expected"),
    [
        (version_id(0, 0), 1, 0),
        (version_id(0, 3), 5, 1),
        (version_id(2, 3), 5, 1),
        (version_id(0, 7), 5, 0),  # Made by a step that a resume has forgotten.
    ],
)
def test_staleness_counts_steps_since_the_oldest_token(
    oldest: int, step: int, expected: int
) -> None:
    assert staleness(replace(ROW, oldest_version=oldest), step=step) == expected


def test_counts_since_the_last_step_are_in_the_row() -> None:
    counts = {
        "groups/closed": 8,
        "groups/zero_variance": 6,
        "groups/dropped/failed": 1,
        "rollout/failed/tool": 2,
    }
    metrics = step_metrics(STEP, [ROW], counts, filtered_rewards=[], passed_s=4.0)
    assert metrics["groups/zero_variance_share"] == 0.75
    assert metrics["groups/dropped/failed"] == 1
    assert metrics["rollout/failed/tool"] == 2
    assert metrics["throughput/tokens_per_s"] == 5.0
    at_once = step_metrics(STEP, [ROW], {}, filtered_rewards=[], passed_s=0.0)
    assert at_once["throughput/tokens_per_s"] == 0.0


def test_the_reward_counts_groups_that_were_filtered_for_being_all_right() -> None:
    filtered = [1.0, 1.0]
    metrics = step_metrics(STEP, [ROW, OTHER], {}, filtered_rewards=filtered, passed_s=1.0)
    assert metrics["reward/mean"] == 0.75
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/trained_mean"] == 0.5


def test_idle_shares_are_per_role_and_between_zero_and_one() -> None:
    spans = [("rollout", 2.0, 10.0), ("rollout", 8.0, 10.0), ("trainer", 11.0, 10.0)]
    assert idle_metrics([*spans, ("tools", 0.0, 0.0)]) == {"idle/rollout": 0.5, "idle/trainer": 0.0}


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"stop/tokens_max": 0.9}, "sampling.turn_tokens_max"),
        ({"groups/zero_variance_share": 0.9}, "training.group_size"),
    ],
)
def test_a_setting_that_keeps_the_policy_from_learning_is_named_in_the_first_steps(
    row: dict[str, float], key: str
) -> None:
    (warning,) = early_warnings(row, step=1)
    assert key in warning.key
    assert warning.share == 0.9
    assert early_warnings(row, step=50) == []
    assert early_warnings({}, step=1) == []
