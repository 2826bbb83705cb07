"""The row of `metrics.jsonl` that a step leaves, and warnings that the first rows give rise to."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.messages.scheduler import StepFinished
from common.trajectory import StopReason
from common.weights import step_of
from services.scheduler.records import TrajectoryRow

EARLY_STEPS = 5
"""A wrong setting shows from the start; later the same numbers are the policy's own doing."""
CLIPPED_SHARE_MAX = 0.5
ZERO_VARIANCE_SHARE_MAX = 0.5


@dataclass(frozen=True, slots=True)
class EarlyWarning:
    """A setting that will keep the policy from learning."""

    event: str
    key: str
    """The configuration key to change."""
    share: float


def staleness(row: TrajectoryRow, *, step: int) -> int:
    """Optimizer steps between a trajectory's oldest token and the step that trains it."""
    return max(0, step - 1 - step_of(row.oldest_version))


def step_metrics(
    finished: StepFinished,
    rows: Sequence[TrajectoryRow],
    counts: Mapping[str, int],
    *,
    filtered_rewards: Sequence[float],
    passed_s: float,
) -> dict[str, float]:
    """The row of one step, without what only the trainer and the coordinator know.

    Args:
        finished: the step.
        rows: the trajectories that it trained.
        counts: what happened since the step before, by the name of the metric.
        filtered_rewards: of groups that were dropped since then because they were all equal. They
            count for `reward/…`: groups that are all right are dropped too, and without them the
            curve would show the policy's doubts instead of its success.
        passed_s: seconds since the step before.
    """
    batch = batch_metrics(rows, step=finished.step)
    trained = [row.reward for row in rows if row.reward is not None]
    _spread(batch, "reward", [*trained, *filtered_rewards])
    if trained:
        batch["reward/trained_mean"] = sum(trained) / len(trained)
    closed, filtered = counts.get("groups/closed", 0), counts.get("groups/zero_variance", 0)
    return {
        "step": finished.step,
        "lineage": finished.lineage,
        **batch,
        **{name: counts[name] for name in sorted(counts)},
        "groups/zero_variance": filtered,
        "groups/zero_variance_share": filtered / max(1, closed),
        "throughput/tokens_per_s": batch["tokens/trained"] / passed_s if passed_s > 0 else 0.0,
    }


def batch_metrics(rows: Sequence[TrajectoryRow], *, step: int) -> dict[str, float]:
    """What the trajectories of one batch say. `rows` are the usable ones."""
    metrics: dict[str, float] = {}
    _spread(metrics, "staleness", [staleness(row, step=step) for row in rows])
    _spread(metrics, "turns", [row.turns for row in rows])
    action_tokens = [row.action_tokens for row in rows]
    metrics["tokens/action_mean"] = sum(action_tokens) / max(1, len(rows))
    metrics["tokens/context_mean"] = sum(row.context_tokens for row in rows) / max(1, len(rows))
    metrics["tokens/trained"] = sum(action_tokens)
    metrics["trajectories/trained"] = len(rows)
    tools = Counter[str]()
    for row in rows:
        tools.update(row.tool_counts())
    for status in sorted(tools):
        metrics[f"tool/{status}"] = tools[status]
    stops = Counter(row.stop_reason or "" for row in rows)
    for reason in StopReason:
        metrics[f"stop/{reason}"] = stops[reason] / max(1, len(rows))
    return metrics


def _spread(metrics: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        metrics[f"{name}/mean"] = sum(values) / len(values)
        metrics[f"{name}/min"] = min(values)
        metrics[f"{name}/max"] = max(values)


def idle_metrics(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Share of time in which the processes of a role did not do their work.

    Args:
        spans: for each process its role, seconds of work and seconds passed.
    """
    busy: defaultdict[str, float] = defaultdict(float)
    passed: defaultdict[str, float] = defaultdict(float)
    for role, busy_s, passed_s in spans:
        busy[role] += busy_s
        passed[role] += passed_s
    return {
        f"idle/{role}": min(1.0, max(0.0, 1.0 - busy[role] / passed[role]))
        for role in sorted(passed)
        if passed[role] > 0
    }


def early_warnings(row: Mapping[str, float], *, step: int) -> list[EarlyWarning]:
    """What is wrong with the settings, as far as the first steps can show it."""
    if step > EARLY_STEPS:
        return []
    warnings: list[EarlyWarning] = []
    clipped = row.get(f"stop/{StopReason.TOKENS_MAX}", 0.0)
    if clipped > CLIPPED_SHARE_MAX:
        warnings.append(
            EarlyWarning(
                "trajectories.clipped",
                "sampling.turn_tokens_max or sampling.trajectory_tokens_max (raise)",
                clipped,
            )
        )
    share = row.get("groups/zero_variance_share", 0.0)
    if share > ZERO_VARIANCE_SHARE_MAX:
        warnings.append(
            EarlyWarning(
                "signal.missed",
                "training.group_size or sampling.temperature (raise), or tasks.path (other "
                "difficulty)",
                share,
            )
        )
    return warnings
