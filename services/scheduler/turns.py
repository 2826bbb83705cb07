"""What one finished turn changes: checks of the message, and the rows that it becomes."""

import json
from collections import Counter
from dataclasses import replace
from math import inf, isfinite

from common.errors import Refusal, RequestRefused
from common.messages.scheduler import TrajectoryResult, TurnFinished
from common.trajectory import FailureKind, ToolStatus, token_count, unpack_tokens
from common.weights import NO_VERSION
from services.scheduler.records import TrajectoryRow, TrajectoryState, TurnRow, TurnSizes
from services.scheduler.routing.outcomes import PayloadSizes, ToolOutcome
from services.scheduler.routing.route import Route

INT_MAX = 2**63 - 1
"""Of the ledger's columns."""
SIGN_BIT = 0x80
"""In the last byte of a packed int32."""


def check_turn(turn: TurnFinished, row: TrajectoryRow) -> None:
    """Refuse a turn that contradicts itself or the journal.

    Raises:
        RequestRefused: `INVALID`, with what is wrong.
    """
    problem = _problem(turn, row)
    if not problem and not _measured(turn):
        problem = "a time is no number, or a count or version is negative"
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
    prompt, observation = len(turn.prompt_tokens), len(turn.observation_tokens)
    if len(lengths) != 1 or (len(turn.action_tokens) | prompt | observation) % 4:
        return "token arrays differ in length or are torn"
    if result is not None and (result.reward is None) == (result.failure is None):
        return "a result is either a reward or a failure"
    if result is None or result.failure is None:  # A failure may come before anything was made.
        if (turn.turn == 0) != (prompt > 0):
            return "the first turn carries the prompt, and no other"
        if not turn.action_tokens:
            return "a turn has action tokens"
    return ""


def _measured(turn: TurnFinished) -> bool:
    """Whether its times, counts and versions can be: what is no number stays in every mean."""
    move = turn.move
    return (
        -inf < turn.tool_latency_s < inf
        and -inf < turn.decode_s < inf
        and -inf < turn.queue_s < inf
        and 0 <= turn.running <= INT_MAX
        and 0 <= turn.kv_tokens_used <= INT_MAX
        and max(turn.action_versions[3::4], default=0) < SIGN_BIT
        and (move is None or (-inf < move.seconds < inf and 0 <= move.tokens <= INT_MAX))
    )


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
        lease=turn.lease,
        move="" if turn.move is None else turn.move.model_dump_json(),
    )


def turn_sizes(turn: TurnFinished) -> TurnSizes:
    """The same without the tokens."""
    return TurnSizes(
        turn.trajectory_id,
        token_count(turn.prompt_tokens),
        token_count(turn.action_tokens),
        token_count(turn.observation_tokens),
        turn.tool,
        turn.tool_status,
        turn.tool_latency_s,
        turn.lease,
    )


def grow_route(route: Route, turn: TurnSizes, sizes: PayloadSizes) -> None:
    """Add a turn that a tool return ended."""
    route.prompt_tokens += turn.prompt_tokens
    payload_tokens = turn.observation_tokens
    outcome = ToolOutcome(
        tool=turn.tool,
        status=ToolStatus.OK if turn.tool_status is None else ToolStatus(turn.tool_status),
        payload=sizes.class_of(payload_tokens),
        payload_tokens=payload_tokens,
        latency_s=turn.tool_latency_s,
    )
    route.returned(
        outcome, action_tokens=turn.action_tokens, observation_tokens=turn.observation_tokens
    )


def end_route(route: Route, turn: TurnSizes) -> None:
    """Add the last turn: no tool return, but tokens that count for all earlier ones."""
    route.prompt_tokens += turn.prompt_tokens
    route.action_tokens += turn.action_tokens
    route.observation_tokens += turn.observation_tokens


def after_turn(row: TrajectoryRow, turn: TurnFinished, sizes: TurnSizes) -> TrajectoryRow:
    """The trajectory with the turn added, and ended if the turn ends it."""
    oldest, newest = _versions(turn.action_versions, row)
    grown = replace(
        row,
        session_id=turn.session_id,
        tool_server=turn.tool_server,
        turns=turn.turn + 1,
        prompt_tokens=row.prompt_tokens + sizes.prompt_tokens,
        action_tokens=row.action_tokens + sizes.action_tokens,
        observation_tokens=row.observation_tokens + sizes.observation_tokens,
        oldest_version=oldest,
        newest_version=newest,
        tools=_count_tool(row.tools, turn.tool_status),
    )
    return ended(grown, turn.result) if turn.result is not None else grown


def _versions(packed: bytes, row: TrajectoryRow) -> tuple[int, int]:
    """The oldest and newest version of any token, with those of one more turn."""
    if not packed:
        return row.oldest_version, row.newest_version
    if packed == packed[:4] * (len(packed) // 4):  # Hardly any turn sees the weights change.
        oldest = newest = int.from_bytes(packed[:4], "little", signed=True)
    else:
        versions = unpack_tokens(packed)
        oldest, newest = min(versions), max(versions)
    if row.oldest_version != NO_VERSION:
        oldest = min(row.oldest_version, oldest)
    return oldest, max(row.newest_version, newest)


def _count_tool(counts: str, status: ToolStatus | None) -> str:
    if status is None:
        return counts
    if counts == "{}":
        return f'{{"{status.value}": 1}}'
    tools = Counter[str](json.loads(counts))
    tools[status.value] += 1
    return json.dumps(tools, sort_keys=True)


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
