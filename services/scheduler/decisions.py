"""What is written down of a decision, for `libra why` and for the accuracy of predictions."""

import json
from collections.abc import Iterable

from services.scheduler.records import DecisionKind, DecisionRow, TrajectoryState
from services.scheduler.routing.policy import Decision, Option
from services.scheduler.state import Trajectory

OPTIONS_MAX = 4
"""Of the workers that were weighed; the best ones explain a decision, thousands do not."""


def decision_row(
    kind: DecisionKind,
    trajectory: Trajectory,
    at: float,
    source: str,
    why: Decision | str,
) -> DecisionRow:
    """The record of what the trajectory's row says already."""
    row = trajectory.row
    decision = why if isinstance(why, Decision) else None
    residual = decision.residual if decision is not None else None
    return DecisionRow(
        trajectory_id=row.trajectory_id,
        number=trajectory.decisions,
        at=at,
        kind=kind.value,
        turn=row.turns,
        lease=row.lease,
        source=source,
        target=row.worker if row.state == TrajectoryState.RUNNING else "",
        reason=why if isinstance(why, str) else why.reason,
        action_tokens=row.action_tokens,
        context_tokens=row.context_tokens,
        mean=residual.mean if residual is not None else None,
        p50=residual.p50 if residual is not None else None,
        p90=residual.p90 if residual is not None else None,
        options=pack_options(decision.options) if decision is not None else "",
    )


def pack_options(options: Iterable[Option]) -> str:
    """The best few as JSON; empty when none were weighed."""
    best = [(o.peer, round(o.cost_s, 3), round(o.move_s, 3)) for o in options][:OPTIONS_MAX]
    return json.dumps(best) if best else ""


def unpack_options(packed: str) -> list[Option]:
    """Inverse of `pack_options`."""
    return [Option(*option) for option in json.loads(packed)] if packed else []
