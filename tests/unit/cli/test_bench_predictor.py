"""The benchmark of the residual predictor: its protocols, its measure and its rivals."""

import json
from math import inf, log1p
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from common.errors import ConfigError
from common.trajectory import ToolStatus
from services.cli.bench_commands import predictor
from services.cli.bench_predictor import (
    SPEED_EVENTS_MIN,
    concurrent,
    draw_bars,
    judge,
    play,
    r2,
    read_all,
    sequential,
    speed_rounds,
    steps,
)
from services.cli.bench_predictor_baselines import GUESS, SIGNALS, Table, Tree
from services.simulator.traces import TraceTrajectory, TraceTurn


def recorded(name: str, outputs: list[int], group: str = "g") -> TraceTrajectory:
    turns = [TraceTurn(tokens, "search", ToolStatus.OK, 10, None) for tokens in outputs[:-1]]
    last = TraceTurn(outputs[-1], "", None, 0, None)
    return TraceTrajectory(name, group, 20, (*turns, last))


def test_in_sequence_each_ends_before_the_next_begins() -> None:
    events = list(sequential([recorded("a", [5, 5]), recorded("b", [5])]))
    assert events == [(0, -1), (0, 0), (0, 1), (1, -1), (1, 0)]


def test_concurrently_turns_take_their_tokens_and_the_short_finish_first() -> None:
    events = list(concurrent([recorded("a", [9, 9]), recorded("b", [4, 4])], live_max=2))
    assert events == [(0, -1), (1, -1), (1, 0), (1, 1), (0, 0), (0, 1)]


def test_a_group_starts_whole_once_there_is_room() -> None:
    group = [recorded("b", [3], "h"), recorded("c", [3], "h")]
    events = list(concurrent([recorded("a", [9]), *group], live_max=2))
    assert events == [(0, -1), (0, 0), (1, -1), (2, -1), (1, 0), (2, 0)]


def test_a_step_tells_what_is_still_to_come() -> None:
    trajectories = [recorded("a", [5, 7, 8])]
    told = [(turn, left) for _, turn, left in steps(trajectories, sequential(trajectories))]
    assert told == [(-1, 20), (0, 15), (1, 8), (-2, 0)]


def write(path: Path, turns: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    turn = {"prompt_tokens_added": 9, "output_tokens": 5, "tool": "search", "tool_outcome": "ok"}
    path.write_text(json.dumps({"trajectory_id": "t0", "turns": [turn] * turns}))
    return path


def test_recordings_are_named_by_their_files_and_by_their_paths_if_those_are_named_alike(
    tmp_path: Path,
) -> None:
    alike = [write(tmp_path / folder / "trace.jsonl", 2) for folder in ("a", "b")]
    other = write(tmp_path / "other.jsonl", 3)
    assert list(read_all([*alike, other])) == [*map(str, alike), "other"]
    with pytest.raises(ConfigError, match="--trace: a recording is given twice"):
        read_all([other, other])


def test_a_recording_of_single_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"single\.jsonl: .* nothing to foresee; give"):
        read_all([write(tmp_path / "single.jsonl", 1)])


def test_a_picture_that_cannot_be_written_is_refused_before_a_recording_is_read(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"--plot: .* no folder"):
        predictor(trace=[tmp_path / "none.jsonl"], plot=tmp_path / "missing" / "a.png")


def test_what_is_worse_than_the_mean_is_drawn_below_zero_and_named_where_it_is_cut_off() -> None:
    axes: Any = Figure().subplots()
    draw_bars(axes, [{"r2": 0.5, "r2_turn_mean": -0.25, "r2_outcome": -31.5, "within_p50": 0.4}])
    assert [bar.get_height() for bar in axes.patches] == [0.5, -0.25, -1.0]
    assert [text.get_text() for text in axes.texts] == [" -31.5"]


@pytest.mark.parametrize("events", [3, 30, 20_000, 10**6])
def test_timing_is_bounded_by_events_however_few_of_them_are_routing_points(events: int) -> None:
    assert SPEED_EVENTS_MIN <= speed_rounds(events) * events < SPEED_EVENTS_MIN + events


def test_the_tree_is_asked_for_the_whole_history_of_each_trajectory() -> None:
    tree, trajectories = Tree(), [recorded(f"t{k}", [5, 6, 7, 8]) for k in range(2)]
    for route, turn, left in steps(trajectories, sequential(trajectories)):
        if turn == -2:
            tree.learn(route)
        elif turn >= 0 and route.trajectory_id == "t1":
            assert tree.expect(route) == log1p(left)


def test_r2_is_one_when_all_is_foreseen_and_zero_for_the_mean() -> None:
    assert r2([1.0, 3.0], [1.0, 3.0]) == 1.0
    assert r2([2.0, 2.0], [1.0, 3.0]) == 0.0
    assert r2([2.0], [2.0]) == 0.0


def test_nothing_is_known_before_the_first_one_finished() -> None:
    played = play([recorded("a", [5, 7])], sequential([recorded("a", [5, 7])]))
    assert played.actual == [log1p(7)]
    assert {each for rows in played.baselines.values() for row in rows for each in row} == {GUESS}
    assert judge(played)["whole"]["r2"] == 0.0


@pytest.mark.parametrize("estimator", [Table(SIGNALS["turn"], inf, 1.0), Tree()])
def test_rivals_learn_from_those_that_finished(estimator: Table | Tree) -> None:
    trajectories = [recorded(f"t{number}", [5, 50]) for number in range(30)]
    expected: list[float] = []
    for route, turn, _ in steps(trajectories, sequential(trajectories)):
        if turn == -2:
            estimator.learn(route)
        elif turn == 0:
            expected.append(estimator.expect(route))
    assert expected[-1] == pytest.approx(log1p(50), abs=0.1)
