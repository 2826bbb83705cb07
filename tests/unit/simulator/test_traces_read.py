import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.trajectory import ToolStatus
from services.simulator.traces import PROBLEMS_MAX, TraceTrajectory, read_traces, status_of


def turn(**changes: Any) -> dict[str, Any]:
    return {
        "prompt_tokens_added": 20,
        "output_tokens": 7,
        "tool": "search",
        "tool_outcome": "ok",
        "tool_latency_s": None,
        "observation_tokens": 30,
        **changes,
    }


def row(*turns: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "trajectory_id": "t0",
        "group": "g0",
        "reward": None,
        "turns": list(turns or (turn(), turn(tool="finish", tool_outcome="final"))),
        **changes,
    }


def read(tmp_path: Path, *rows: Any) -> list[TraceTrajectory]:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return read_traces(path)


def problems(tmp_path: Path, *rows: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, *rows)
    return caught.value.problems


def test_a_line_is_a_trajectory(tmp_path: Path) -> None:
    (trajectory,) = read(tmp_path, row(reward=1))
    assert (trajectory.trajectory_id, trajectory.group_id) == ("t0", "g0")
    assert (trajectory.prompt_tokens, trajectory.output_tokens) == (20, 14)
    assert trajectory.reward == 1.0
    assert [turn.status for turn in trajectory.turns] == [ToolStatus.OK, None]
    assert trajectory.turns[0].latency_s is None


def test_a_trajectory_without_a_group_is_a_group_of_its_own(tmp_path: Path) -> None:
    trajectories = read(tmp_path, row(group=""), row(trajectory_id="t1", group=None))
    assert [trajectory.group_id for trajectory in trajectories] == ["t0", "t1"]


def test_an_id_that_was_there_before_is_refused_with_both_lines(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, row(), "", row())
    assert "trace.jsonl:3: trajectory_id: 't0' is that of line 1; give" in problem


def test_keys_that_are_like_no_key_that_is_left_out_are_the_writers_own(tmp_path: Path) -> None:
    own = row(turn(tool_name="x", tools=[], latency_s=1), model="m", source="s", group_id=3)
    assert len(read(tmp_path, own)) == 1


def test_an_observation_that_is_not_given_is_what_the_next_turn_adds(tmp_path: Path) -> None:
    first = turn()
    del first["observation_tokens"]
    (trajectory,) = read(tmp_path, row(first, turn(prompt_tokens_added=44)))
    assert trajectory.turns[0].observation_tokens == 44


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("failure", ToolStatus.ERROR),
        ("Runtime-Error", ToolStatus.ERROR),
        ("timed_out", ToolStatus.TIMEOUT),
        ("Time out", ToolStatus.TIMEOUT),
        ("tool timed out error", ToolStatus.TIMEOUT),
        ("no results", ToolStatus.EMPTY),
        ("parse failure", ToolStatus.MALFORMED),
        ("success", ToolStatus.OK),
        ("no errors", ToolStatus.OK),
        ("final", ToolStatus.OK),
        (None, ToolStatus.OK),
    ],
)
def test_outcome_words_of_other_writers_are_understood(word: str, status: ToolStatus) -> None:
    assert status_of(word, last=False) is status


def test_only_the_last_turn_ends_without_a_tool_call() -> None:
    assert status_of("final", last=True) is None
    assert status_of("error", last=True) is ToolStatus.ERROR


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "not JSON"),
        ([1], "the line: must be a JSON object"),
        (row(trajectory_id=None), "trajectory_id: is missing"),
        (row(turns=[]), "turns: must be a list"),
        (row(turns=["x"]), "turns[0]: must be a JSON object"),
        (row(turn(output_tokens=-1)), "turns[0].output_tokens: -1 is not a count"),
        (row(turn(), turn(output_tokens="9")), "turns[1].output_tokens: '9' is not a number"),
        (row(turn(prompt_tokens_added=None)), "turns[0].prompt_tokens_added: is missing"),
        (row(turn(prompt_tokens_added=0)), "turns[0].prompt_tokens_added: is 0"),
        (row(turn(tool_outcome="suxess")), "turns[0].tool_outcome: 'suxess' is no outcome (did"),
        (row(turn(tool_outcome="blue")), "turns[0].tool_outcome: 'blue' is no outcome; write one"),
        (
            row({"prompt_tokens_added": 1, "output_tokens": 1, "tool_outcom": "error"}),
            "turns[0].tool_outcom: unknown key (did you mean 'tool_outcome'?); rename it",
        ),
        (
            {"trajectory_id": "t1", "group_id": "g", "turns": [turn()]},
            "group_id: unknown key (did you mean 'group'?); rename it",
        ),
        (row(turn(tool_latency_s=-0.5)), "turns[0].tool_latency_s: is negative"),
        (row(turn(tool=["x"])), "turns[0].tool: must be a string"),
        (row(reward="good"), "reward: 'good' is not a number"),
        (row(turn(output_tokens=10**400)), "turns[0].output_tokens: is too large"),
        pytest.param("[" * 100_000, "is nested too deeply", id="nested"),
        pytest.param(f'{{"trajectory_id": {"[" * 900 + "]" * 900}}}', "trajectory_id", id="shown"),
    ],
)
def test_a_bad_line_is_named_with_its_key_and_a_remedy(tmp_path: Path, bad: Any, said: str) -> None:
    (problem,) = problems(tmp_path, row(), bad)
    assert f"trace.jsonl:2: {said}" in problem
    assert ";" in problem


def test_many_bad_lines_are_counted_and_the_first_named(tmp_path: Path) -> None:
    found = problems(tmp_path, *["{"] * (PROBLEMS_MAX + 5))
    assert len(found) == PROBLEMS_MAX + 1
    assert "5 more lines are bad" in found[-1]


def test_a_file_that_is_not_there_or_empty_is_said_to_be_so(tmp_path: Path) -> None:
    assert "holds no trajectory" in problems(tmp_path, "")[0]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_traces(tmp_path / "none.jsonl")
