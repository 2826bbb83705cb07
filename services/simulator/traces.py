"""Recorded trajectories: what each turn sampled, which tool it called and what came back."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import cast

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


def status_of(word: str | None, *, last: bool) -> ToolStatus | None:
    """Read an outcome word: exactly, else by its parts, else as a return like any other.

    Only the last turn may end without a tool call: a word that says so earlier was followed by
    more, so something came back.
    """
    name = (word or "").strip().lower().replace(" ", "_").replace("-", "_")
    if name in _STATUSES:
        return _STATUSES[name]
    if last and (not name or name in _ENDING_WORDS):
        return None
    for parts, status in _PARTS:
        if any(part in name for part in parts):
            return status
    return ToolStatus.OK


class _BadLine(Exception):
    """What is wrong with a line, and what to do."""


def read_traces(path: Path) -> list[TraceTrajectory]:
    """Read recorded trajectories, one JSON object per line, in the order of the file.

    A trajectory without a group is a group of its own. One whose id was there before gets a
    number behind it.

    Raises:
        ConfigError: the file cannot be read, is empty or has bad lines; names up to 20.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    trajectories: list[TraceTrajectory] = []
    problems: list[str] = []
    seen: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            trajectory = _trajectory(line)
        except _BadLine as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        except RecursionError:  # By the parser, or while a nested value is shown.
            problems.append(f"{path}:{number}: is nested too deeply; see the schema of traces")
            continue
        seen[trajectory.trajectory_id] += 1
        if (times := seen[trajectory.trajectory_id]) > 1:
            trajectory = replace(trajectory, trajectory_id=f"{trajectory.trajectory_id}#{times}")
        trajectories.append(trajectory)
    if problems:
        more = len(problems) - PROBLEMS_MAX
        rest = [f"{path}: {more} more lines are bad; mend these first"] if more > 0 else []
        raise ConfigError(*problems[:PROBLEMS_MAX], *rest)
    if not trajectories:
        raise ConfigError(f"{path}: holds no trajectory; write one JSON object per line")
    return trajectories


def _trajectory(line: bytes) -> TraceTrajectory:
    try:
        row: object = json.loads(line)
    except ValueError as error:
        raise _BadLine(f"not JSON ({error}); write one object per line") from error
    fields = _table(row, "the line")
    name = _text(fields, "trajectory_id")
    if not name:
        raise _BadLine("trajectory_id: is missing; give each trajectory an id of its own")
    rows = fields.get("turns")
    if not isinstance(rows, list) or not rows:
        raise _BadLine("turns: must be a list of at least one turn; drop the line if it has none")
    turns = [_table(turn, f"turns[{k}]") for k, turn in enumerate(cast("list[object]", rows))]
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
    return TraceTurn(
        output_tokens=_count(turn, "output_tokens", where),
        tool=_text(turn, "tool", where),
        status=status_of(_text(turn, "tool_outcome", where), last=last),
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
