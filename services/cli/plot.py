"""The picture of a run: reward over steps, from `metrics.jsonl`."""

import importlib.util
import json
from pathlib import Path
from typing import Any

SMOOTHED_STEPS = 5


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file, the last one per step (a resume may repeat steps)."""
    if not path.exists():
        return []
    rows: dict[float, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        row: dict[str, float] = json.loads(line)
        rows[row.get("step", 0)] = row
    return [rows[step] for step in sorted(rows)]


def smooth(values: list[float], width: int = SMOOTHED_STEPS) -> list[float]:
    """Running mean over the last `width` values."""
    return [
        sum(values[max(0, end - width) : end]) / min(width, end)
        for end in range(1, len(values) + 1)
    ]


def plot_reward(run_dir: Path) -> Path | None:
    """Draw `reward.png` into the run directory; None without steps or without matplotlib."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "reward/mean" in row]
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
