"""Workloads: fixed by their seed, with the lengths, siblings and outcomes asked for."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median

import pytest

from common.errors import ConfigError
from common.trajectory import ToolStatus
from services.simulator.latency import TEST_RUN, LatencyLaw
from services.simulator.traces import TraceTrajectory
from services.simulator.workload_presets import PRESETS, R2E
from services.simulator.workload_strength import intra_group_correlation, outcome_strength
from services.simulator.workloads import make_workload

NAMES = sorted(PRESETS)
GROUPS = 350


def groups_of(name: str, strength: float, *, step: int = 0) -> list[Sequence[TraceTrajectory]]:
    workload = make_workload(name, seed=7, strength=strength)
    return [workload.group(index, step) for index in range(GROUPS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strength", [0.02, 0.2, 0.6])
def test_outcomes_say_as_much_as_the_dial_says(name: str, strength: float) -> None:
    groups = groups_of(name, strength)
    assert outcome_strength(groups) == pytest.approx(strength, abs=0.05)
    assert intra_group_correlation(groups) == pytest.approx(0.4, abs=0.07)
    mean = fmean(member.output_tokens for group in groups for member in group)
    assert mean == pytest.approx(PRESETS[name].drift.mean_from, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mean_lengths_drift_as_published(name: str) -> None:
    drift = PRESETS[name].drift
    groups = groups_of(name, 0.6, step=int(drift.steps))[:150]
    mean = fmean(member.output_tokens for group in groups for member in group)
    assert mean == pytest.approx(drift.mean_to, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_depends_on_seed_index_and_step_alone(name: str) -> None:
    first, second = make_workload(name, seed=3), make_workload(name, seed=3)
    second.group(5, 2)
    assert first.group(1, 0) == second.group(1, 0)
    assert first.group(1, 0) != first.group(1, 400)
    assert first.group(1, 0) != make_workload(name, seed=4).group(1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_trajectories_keep_within_their_limits(name: str) -> None:
    preset = PRESETS[name]
    for member in make_workload(name, seed=1).group(0, 500):
        assert 1 <= len(member.turns) <= preset.turns_max
        assert member.context_tokens <= preset.context_tokens_max
        assert member.turns[-1].status is None
        assert all(turn.status is not None and turn.latency_s for turn in member.turns[:-1])
        assert all(turn.output_tokens >= 1 for turn in member.turns)


def test_a_call_that_times_out_takes_its_limit() -> None:
    workload = make_workload("r2e", seed=1)
    timed_out = [
        turn
        for index in range(30)
        for member in workload.group(index, 0)
        for turn in member.turns
        if turn.status is ToolStatus.TIMEOUT
    ]
    limits = {tool.name: tool.latency.timeout_s for tool in R2E.tools}
    assert timed_out
    assert all(turn.latency_s == limits[turn.tool] for turn in timed_out)


def test_an_unknown_workload_is_a_mistake_of_who_asks() -> None:
    with pytest.raises(KeyError):
        make_workload("serach-r1")


def test_between_two_calibrated_strengths_the_numbers_lie_between() -> None:
    low, middle, high = R2E.dial(0.2), R2E.dial(0.3), R2E.dial(0.4)
    assert low.effect < middle.effect < high.effect
    assert R2E.dial(0.9) == R2E.dials[-1]
    assert R2E.dial(-1.0).effect == 0.0


def test_scale_multiplies_what_is_sampled_and_observed() -> None:
    def mean(scale: float) -> float:
        workload = make_workload("search-r1", seed=2, scale=scale)
        return fmean(m.output_tokens for index in range(20) for m in workload.group(index, 0))

    assert mean(2.0) == pytest.approx(2 * mean(1.0), rel=0.1)


def recorded(path: Path, sizes: Sequence[int]) -> Path:
    """A file of groups with so many members each, told apart by their output."""
    lines = [
        json.dumps(
            {
                "trajectory_id": f"t{group}-{member}",
                "group": f"p{group}",
                "turns": [
                    {
                        "prompt_tokens_added": 50,
                        "output_tokens": 100 * group + member + 1,
                        "tool": "sql",
                        "tool_outcome": "error",
                        "tool_latency_s": None,
                        "observation_tokens": 40,
                    },
                    {
                        "prompt_tokens_added": 0,
                        "output_tokens": 10,
                        "tool": "",
                        "tool_outcome": "final",
                        "tool_latency_s": None,
                        "observation_tokens": 0,
                    },
                ],
            }
        )
        for group, size in enumerate(sizes)
        for member in range(size)
    ]
    path.write_text("\n".join(lines))
    return path


def test_recorded_groups_have_one_size_and_no_copies(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.jsonl", [3, 3, 7, 2])
    workload = make_workload("trace", trace=str(path))
    assert workload.group_size == 3
    played = [workload.group(index, 0) for index in range(4)]
    outputs = [member.turns[0].output_tokens for group in played for member in group]
    assert sorted(outputs) == [1, 2, 3, 101, 102, 103, 201, 202, 203, 204, 205, 206]
    assert all(len({member.group_id for member in group}) == 1 for group in played)
    again = [workload.group(index, 0) for index in range(4, 8)]
    assert {m.trajectory_id for g in played for m in g}.isdisjoint(
        m.trajectory_id for g in again for m in g
    )


def test_recorded_lengths_are_scaled_and_missing_times_drawn(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.jsonl", [1])
    (member,) = make_workload(f"trace:{path}", scale=4.0).group(0, 0)
    assert member.turns[0].output_tokens == 4
    assert member.turns[0].observation_tokens == 160
    assert member.turns[0].latency_s is not None
    assert make_workload(f"trace:{path}", scale=4.0).group(0, 9) == [member]


def test_a_trace_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_workload(f"trace:{tmp_path / 'none.jsonl'}")


def test_tool_times_follow_their_law() -> None:
    random = Random(1)
    body = LatencyLaw(-1.0, 0.5)
    assert median(body.draw_s(random) for _ in range(4_000)) == pytest.approx(
        math.exp(-1.0), rel=0.05
    )
    drawn = [TEST_RUN.draw_s(random) for _ in range(4_000)]
    assert max(drawn) == TEST_RUN.timeout_s
    assert 0.1 < fmean(seconds >= 10.0 for seconds in drawn) < 0.3
