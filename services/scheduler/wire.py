"""From the ledger's rows to what travels."""

from collections.abc import Mapping, Sequence

from common.messages.scheduler import GroupData, TrajectoryData, TurnData
from common.trajectory import FailureKind, StopReason, ToolStatus
from services.scheduler.records import GroupRecord, TrajectoryRow, TurnRow


def later_tokens(turns: Sequence[TurnRow]) -> list[bytes]:
    """Action and observation tokens of each turn, alternating."""
    return [part for turn in turns for part in (turn.action_tokens, turn.observation_tokens)]


def group_data(record: GroupRecord, turns: Mapping[str, Sequence[TurnRow]]) -> GroupData:
    """A group as the trainer gets it."""
    return GroupData(
        group_id=record.group.group_id,
        task_id=record.group.task_id,
        trajectories=[_trajectory(row, turns[row.trajectory_id]) for row in record.trajectories],
    )


def _trajectory(row: TrajectoryRow, turns: Sequence[TurnRow]) -> TrajectoryData:
    return TrajectoryData(
        trajectory_id=row.trajectory_id,
        prompt_tokens=turns[0].prompt_tokens if turns else b"",
        turns=[_turn(turn) for turn in turns],
        stop_reason=None if row.stop_reason is None else StopReason(row.stop_reason),
        reward=row.reward,
        failure=None if row.failure is None else FailureKind(row.failure),
    )


def _turn(turn: TurnRow) -> TurnData:
    return TurnData(
        action_tokens=turn.action_tokens,
        action_logprobs=turn.action_logprobs,
        action_versions=turn.action_versions,
        observation_tokens=turn.observation_tokens,
        tool_status=None if turn.tool_status is None else ToolStatus(turn.tool_status),
    )
