"""Pictures of simulations: policies side by side, and curves over the dial. Needs matplotlib."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from services.simulator.compare import Spread

COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3", "#636363", "#cb181d", "#a6761d", "#2b8cbe")
HEADINGS = {
    "tokens/s": ("sampled tokens per second", False),
    "p99 s": ("99th percentile of trajectory time, s", False),
    "moved": ("context tokens moved", True),
    "routed right": ("returns routed right", True),
}
"""Of the panels: what is shown, and whether it is a share."""
THOUSANDS = "{x:,.0f}"
PERCENT = "{x:.0%}"


def check_plot(path: Path | None) -> None:
    """Say before a long run that its picture could not be written.

    Raises:
        ConfigError: without matplotlib, or when the file cannot be written.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is not installed; pip install 'libra[train]'")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: {path.parent} is no folder; make it, or choose another file")
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ConfigError(f"--plot: {path.name} is no .png, .svg or .pdf; name it so")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """Try it: permissions alone do not say it, and a superuser has all of them."""
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror}") from error
    if not existed:
        path.unlink()


def plot_bars(path: Path, title: str, panels: Mapping[str, Mapping[str, Spread]]) -> None:
    """One panel for each figure, one bar with its range for each policy."""
    figure = _figure(width=3.2 * len(panels), height=3.6)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, spreads) in zip(axes, panels.items(), strict=True):
        for place, (policy, spread) in enumerate(spreads.items()):
            error = [[spread.median - spread.low], [spread.high - spread.median]]
            colour = COLOURS[place % len(COLOURS)]
            axis.bar(place, spread.median, yerr=error, color=colour, label=policy, capsize=3)
        axis.set_xticks(range(len(spreads)), list(spreads), rotation=45, ha="right", fontsize=8)
        heading, share = HEADINGS.get(name, (name, False))
        axis.set_title(heading, fontsize=9)
        axis.set_ylim(bottom=0.0)
        axis.yaxis.set_major_formatter(PERCENT if share else THOUSANDS)
        _plain(axis)
    figure.suptitle(f"{title} (bars: median, whiskers: range)", fontsize=10)
    _save(figure, path)


def plot_curves(
    path: Path, title: str, xs: Sequence[float], curves: Mapping[str, Sequence[Spread]], *, y: str
) -> None:
    """A curve with its range for each policy over the outcome strength."""
    figure = _figure(width=6.4, height=4.8)
    axis = figure.subplots()
    for place, (policy, spreads) in enumerate(curves.items()):
        colour = COLOURS[place % len(COLOURS)]
        axis.plot(xs, [s.median for s in spreads], color=colour, label=policy, marker="o", ms=4)
        low, high = [s.low for s in spreads], [s.high for s in spreads]
        axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
    axis.set_xlabel("outcome strength (share of residual variance that outcomes explain)")
    axis.set_ylabel(y)
    axis.set_ylim(bottom=0.0)
    axis.yaxis.set_major_formatter(THOUSANDS)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    _plain(axis)
    axis.set_title(f"{title} (lines: median, bands: range)", fontsize=10)
    _save(figure, path)


def _figure(*, width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axis: Any) -> None:
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(str(path), dpi=130)
