"""The picture of a run: reward over steps, from `metrics.jsonl`."""

import importlib.util
from pathlib import Path
from typing import Any

from services.scheduler.summary import surviving_rows

SMOOTHED_STEPS = 5


def smooth(values: list[float], width: int = SMOOTHED_STEPS) -> list[float]:
    """Running mean over the last `width` values."""
    return [
        sum(values[max(0, end - width) : end]) / min(width, end)
        for end in range(1, len(values) + 1)
    ]


def plot_reward(run_dir: Path) -> Path | None:
    """Draw `reward.png` into the run directory; None without steps or without matplotlib."""
    rows = [row for row in surviving_rows(run_dir / "metrics.jsonl") if "reward/mean" in row]
    if not rows or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    rewards = [row["reward/mean"] for row in rows]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot(steps, rewards, color="#9ecae1", label="mean reward of the step")
    upper.plot(steps, smooth(rewards), color="#08519c", label=f"mean of {SMOOTHED_STEPS} steps")
    upper.set_ylabel("reward")
    upper.set_ylim(0, max(1.0, *rewards))
    upper.set_title(run_dir.name)
    upper.legend(loc="lower right", frameon=False)
    _plot_staleness(lower, rows, steps)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    picture = run_dir / "reward.png"
    figure.savefig(str(picture), dpi=120)  # pyright: ignore[reportUnknownMemberType]
    return picture


def _plot_staleness(axes: Any, rows: list[dict[str, float]], steps: list[float]) -> None:
    axes.plot(steps, [row.get("staleness/mean", 0.0) for row in rows], color="#d94801")
    axes.set_ylabel("staleness\n(steps)")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
