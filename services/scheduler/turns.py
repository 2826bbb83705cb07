"""What one finished turn changes: checks of the message, and the rows that it becomes."""

import json
from collections import Counter
from dataclasses import replace
from math import isfinite

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import TrajectoryResult, TurnFinished
from common.trajectory import FailureKind, token_count, unpack_tokens
from common.weights import NO_VERSION
from services.scheduler.records import TrajectoryRow, TrajectoryState, TurnRow


def check_turn(turn: TurnFinished, row: TrajectoryRow) -> None:
    """Refuse a turn that contradicts itself or the journal.

    Raises:
        RequestRefused: `INVALID`, with what is wrong.
    """
    problem = _problem(turn, row)
    if problem:
        raise RequestRefused(Refusal.INVALID, f"{turn.trajectory_id} turn {turn.turn}: {problem}")


def _problem(turn: TurnFinished, row: TrajectoryRow) -> str:
    lengths = {
        len(turn.action_tokens),
        len(turn.action_logprobs),
        len(turn.action_versions),
    }
    result = turn.result
    if turn.turn > row.turns:
        return f"turn {row.turns} is missing"
    if len(lengths) != 1 or (len(turn.action_tokens) | len(turn.observation_tokens)) % 4:
        return "token arrays differ in length or are torn"
    if result is not None and (result.reward is None) == (result.failure is None):
        return "a result is either a reward or a failure"
    if result is None or result.failure is None:  # A failure may come before anything was made.
        if turn.turn == 0 and not turn.prompt_tokens:
            return "the first turn carries the prompt"
        if not turn.action_tokens:
            return "a turn has action tokens"
    return ""


def turn_row(turn: TurnFinished) -> TurnRow:
    """The journal entry."""
    return TurnRow(
        trajectory_id=turn.trajectory_id,
        turn=turn.turn,
        prompt_tokens=turn.prompt_tokens,
        action_tokens=turn.action_tokens,
        action_logprobs=turn.action_logprobs,
        action_versions=turn.action_versions,
        observation_tokens=turn.observation_tokens,
        tool=turn.tool,
        tool_status=turn.tool_status,
        tool_latency_s=turn.tool_latency_s,
        decode_s=turn.decode_s,
        queue_s=turn.queue_s,
    )


def after_turn(row: TrajectoryRow, turn: TurnFinished) -> TrajectoryRow:
    """The trajectory with the turn added, and ended if the turn ends it."""
    versions = unpack_tokens(turn.action_versions)
    known = [row.oldest_version] if row.oldest_version != NO_VERSION else []
    tools = Counter(row.tool_counts())
    if turn.tool_status is not None:
        tools[turn.tool_status.value] += 1
    grown = replace(
        row,
        session_id=turn.session_id,
        tool_server=turn.tool_server,
        turns=turn.turn + 1,
        prompt_tokens=row.prompt_tokens + token_count(turn.prompt_tokens),
        action_tokens=row.action_tokens + token_count(turn.action_tokens),
        observation_tokens=row.observation_tokens + token_count(turn.observation_tokens),
        oldest_version=min([*known, *versions], default=NO_VERSION),
        newest_version=max([row.newest_version, *versions]),
        tools=json.dumps(tools, sort_keys=True),
    )
    return ended(grown, turn.result) if turn.result is not None else grown


def ended(row: TrajectoryRow, result: TrajectoryResult) -> TrajectoryRow:
    """The trajectory with its result. A reward that is no number is our failure, not a zero."""
    if result.reward is not None and not isfinite(result.reward):
        return failed(row, FailureKind.GRADER, f"the reward was {result.reward}")
    if result.failure is not None:
        return failed(row, result.failure, result.detail)
    return replace(
        row,
        state=TrajectoryState.FINISHED,
        stop_reason=None if result.stop_reason is None else result.stop_reason.value,
        reward=result.reward,
        scores=json.dumps(result.scores, sort_keys=True),
        detail=result.detail,
    )


def failed(row: TrajectoryRow, kind: FailureKind, detail: str) -> TrajectoryRow:
    """The trajectory ended by a failure that the policy has not caused."""
    return replace(row, state=TrajectoryState.FAILED, failure=kind.value, detail=detail)
