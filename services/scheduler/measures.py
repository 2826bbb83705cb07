"""What finished turns and moves say of the workers' speeds, for the policy and the metrics."""

from collections import Counter

from common.messages.scheduler import TurnFinished
from services.scheduler.leases import Leases
from services.scheduler.records import TurnSizes
from services.scheduler.routing.policy import MoveMeasure, TurnMeasure
from services.scheduler.state import Trajectory

KV_PATH = "kv"
"""A move whose KV cache came along; on the other path it had to be computed again."""


def measure_turn(
    trajectory: Trajectory,
    turn: TurnFinished,
    sizes: TurnSizes,
    leases: Leases,
    counts: Counter[str],
) -> None:
    """Tell the policy. The trajectory's row is still that of before the turn."""
    row = trajectory.row
    worker = leases.fleet.workers[row.worker]
    context_tokens = row.context_tokens + sizes.prompt_tokens
    if turn.move is not None:
        move = turn.move
        counts[f"moves/{move.path}"] += 1
        if trajectory.came_from:
            leases.policy.move_measured(
                MoveMeasure(
                    source_bucket=trajectory.came_from,
                    target_bucket=worker.bucket,
                    path=move.path,
                    tokens=move.tokens,
                    seconds=move.seconds,
                    reason=move.reason,
                )
            )
        if move.path == KV_PATH:
            trajectory.cached_tokens = move.tokens
    if turn.running:
        leases.policy.turn_measured(
            TurnMeasure(
                peer=worker.peer,
                bucket=worker.bucket,
                prefill_tokens=max(0, context_tokens - trajectory.cached_tokens),
                action_tokens=sizes.action_tokens,
                queue_s=turn.queue_s,
                decode_s=turn.decode_s,
                running=turn.running,
                kv_tokens_used=turn.kv_tokens_used,
            )
        )
    trajectory.cached_tokens = context_tokens + sizes.action_tokens
