"""Recorded trajectories: what each turn sampled, which tool it called and what came back."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import cast

from common.config_load import did_you_mean
from common.errors import ConfigError
from common.trajectory import ToolStatus


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One turn."""

    output_tokens: int
    """Sampled by the policy."""
    tool: str
    status: ToolStatus | None
    """None on the turn that ended the trajectory without a tool call."""
    observation_tokens: int
    latency_s: float | None
    """Of the tool; None where it was not recorded."""


@dataclass(frozen=True, slots=True)
class TraceTrajectory:
    """One trajectory; those of one group share a prompt."""

    trajectory_id: str
    group_id: str
    prompt_tokens: int
    turns: tuple[TraceTurn, ...]
    """At least one."""
    reward: float | None = None

    @property
    def output_tokens(self) -> int:
        """Sampled in all."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def context_tokens(self) -> int:
        """At the end."""
        observed = sum(turn.observation_tokens for turn in self.turns)
        return self.prompt_tokens + self.output_tokens + observed


PROBLEMS_MAX = 20
"""So many bad lines are named; the rest is counted."""

_STATUS_OF_WORD = {
    ToolStatus.OK: "ok okay success successful succeeded passed done hit found no_error no_errors",
    ToolStatus.EMPTY: "empty none_found not_found no_result no_results nothing miss",
    ToolStatus.ERROR: "error errored failure failed fail exception crash refused denied",
    ToolStatus.MALFORMED: "malformed invalid unparsed parse_error bad_call unknown_tool",
    ToolStatus.TIMEOUT: "timeout timed_out time_out timedout deadline deadline_exceeded",
    ToolStatus.INFRASTRUCTURE: "infrastructure infra infra_error infrastructure_error lost",
}
_STATUSES = {word: status for status, words in _STATUS_OF_WORD.items() for word in words.split()}
_PARTS = (
    (("timeout", "time_out", "timed"), ToolStatus.TIMEOUT),
    (("infra",), ToolStatus.INFRASTRUCTURE),
    (("malformed", "invalid", "parse"), ToolStatus.MALFORMED),
    (("err", "fail", "exception", "crash"), ToolStatus.ERROR),
    (("empty", "no_result", "not_found"), ToolStatus.EMPTY),
)
_ENDING_WORDS = ("final", "none", "answer", "answered", "stop", "stopped", "end", "finished")
_OUTCOMES = ", ".join([*_STATUS_OF_WORD, "final"])
_KEYS = ("trajectory_id", "group", "reward", "turns")
_KEYS_OF_TURN = (
    "prompt_tokens_added",
    "output_tokens",
    "tool",
    "tool_outcome",
    "tool_latency_s",
    "observation_tokens",
)
_MISSPELT_FROM = 0.7
"""So like a known key that it was meant: `latency_s`, `group_id`, but not `tool_name`."""


def status_of(word: str | None, *, last: bool) -> ToolStatus | None:
    """Read an outcome word: exactly, else by its parts.

    Only the last turn may end without a tool call: a word that says so earlier was followed by
    more, so something came back.

    Raises:
        ValueError: nobody knows what the word means; says what to write.
    """
    name = (word or "").strip().lower().replace(" ", "_").replace("-", "_")
    if name in _STATUSES:
        return _STATUSES[name]
    if not name or name in _ENDING_WORDS:
        return None if last else ToolStatus.OK
    for parts, status in _PARTS:
        if any(part in name for part in parts):
            return status
    hint = did_you_mean(name, ", ".join([*_STATUSES, *_ENDING_WORDS]))
    raise ValueError(f"{word!r} is no outcome{hint}; write one of {_OUTCOMES}")


class _BadLine(Exception):
    """What is wrong with a line, and what to do."""


def read_traces(path: Path) -> list[TraceTrajectory]:
    """Read recorded trajectories, one JSON object per line, in the order of the file.

    A trajectory without a group is a group of its own.

    Raises:
        ConfigError: the file cannot be read, is empty or has bad lines; names up to 20.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    trajectories: list[TraceTrajectory] = []
    problems: list[str] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            trajectory = _trajectory(line)
            _check_new(trajectory.trajectory_id, number, lines_of)
        except _BadLine as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        except RecursionError:  # By the parser, or while a nested value is shown.
            problems.append(f"{path}:{number}: is nested too deeply; see the schema of traces")
            continue
        trajectories.append(trajectory)
    if problems:
        more = len(problems) - PROBLEMS_MAX
        rest = [f"{path}: {more} more lines are bad; mend these first"] if more > 0 else []
        raise ConfigError(*problems[:PROBLEMS_MAX], *rest)
    if not trajectories:
        raise ConfigError(f"{path}: holds no trajectory; write one JSON object per line")
    return trajectories


def _check_new(trajectory_id: str, number: int, lines_of: dict[str, int]) -> None:
    first = lines_of.setdefault(trajectory_id, number)
    if first != number:
        raise _BadLine(
            f"trajectory_id: {trajectory_id!r} is that of line {first}; give each trajectory an id "
            "of its own, or drop one"
        )


def _check_keys(fields: dict[str, object], known: Sequence[str], where: str = "") -> None:
    """Refuse a key that is like one that is left out. Others are the writer's own business."""
    left_out = [key for key in known if key not in fields]
    for key in fields:
        if key not in known and (meant := get_close_matches(key, left_out, 1, _MISSPELT_FROM)):
            raise _BadLine(f"{where}{key}: unknown key (did you mean '{meant[0]}'?); rename it")


def _trajectory(line: bytes) -> TraceTrajectory:
    try:
        row: object = json.loads(line)
    except ValueError as error:
        raise _BadLine(f"not JSON ({error}); write one object per line") from error
    fields = _table(row, "the line")
    _check_keys(fields, _KEYS)
    name = _text(fields, "trajectory_id")
    if not name:
        raise _BadLine("trajectory_id: is missing; give each trajectory an id of its own")
    rows = fields.get("turns")
    if not isinstance(rows, list) or not rows:
        raise _BadLine("turns: must be a list of at least one turn; drop the line if it has none")
    turns = [_table(turn, f"turns[{k}]") for k, turn in enumerate(cast("list[object]", rows))]
    for k, turn in enumerate(turns):
        _check_keys(turn, _KEYS_OF_TURN, f"turns[{k}].")
    prompt_tokens = _count(turns[0], "prompt_tokens_added", "turns[0].")
    if prompt_tokens == 0:
        raise _BadLine("turns[0].prompt_tokens_added: is 0; give the prompt's tokens, at least 1")
    reward = fields.get("reward")
    return TraceTrajectory(
        trajectory_id=name,
        group_id=_text(fields, "group") or name,
        prompt_tokens=prompt_tokens,
        turns=tuple(_turn(turns, k) for k in range(len(turns))),
        reward=None if reward is None else _number(reward, "reward"),
    )


def _turn(turns: list[dict[str, object]], index: int) -> TraceTurn:
    turn, where = turns[index], f"turns[{index}]."
    last = index == len(turns) - 1
    if turn.get("observation_tokens") is not None:
        observed = _count(turn, "observation_tokens", where)
    else:
        next_where = f"turns[{index + 1}]."
        observed = 0 if last else _count(turns[index + 1], "prompt_tokens_added", next_where)
    latency = turn.get("tool_latency_s")
    if latency is not None and (latency := _number(latency, f"{where}tool_latency_s")) < 0:
        raise _BadLine(f"{where}tool_latency_s: is negative; give seconds, or null if not known")
    try:
        status = status_of(_text(turn, "tool_outcome", where), last=last)
    except ValueError as error:
        raise _BadLine(f"{where}tool_outcome: {error}") from error
    return TraceTurn(
        output_tokens=_count(turn, "output_tokens", where),
        tool=_text(turn, "tool", where),
        status=status,
        observation_tokens=observed,
        latency_s=latency,
    )


def _table(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _BadLine(f"{what}: must be a JSON object; see the schema of traces")
    return cast("dict[str, object]", value)


def _text(fields: dict[str, object], key: str, where: str = "") -> str:
    value = fields.get(key)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _BadLine(f"{where}{key}: must be a string; quote it, or use null")
    return str(value)


def _count(fields: dict[str, object], key: str, where: str) -> int:
    value = fields.get(key)
    if value is None:
        raise _BadLine(f"{where}{key}: is missing; give a number of tokens")
    number = _number(value, where + key)
    if number < 0 or number != int(number):
        raise _BadLine(f"{where}{key}: {value!r} is not a count; give a whole number of tokens")
    return int(number)


def _number(value: object, key: str) -> float:
    if not isinstance(value, int | float):
        raise _BadLine(f"{key}: {value!r} is not a number; give one, unquoted")
    try:
        number = float(value)
    except OverflowError:
        raise _BadLine(f"{key}: is too large for a number; give the one that was meant") from None
    if not isfinite(number):
        raise _BadLine(f"{key}: {value!r} is not a number; give one, unquoted")
    return number
