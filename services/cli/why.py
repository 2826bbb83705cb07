"""`libra why`: why a trajectory ran where it ran, and what it waits for now."""

import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.errors import ConfigError, LedgerError
from services.cli.why_story import Chapter, Story, find, tell
from services.scheduler.records import DecisionKind, TrajectoryRow, TrajectoryState
from services.scheduler.store import Store

LEDGER = "ledger.sqlite"
RUNS = Path("runs")
NBSP = "\N{NO-BREAK SPACE}"
WIDTH_MIN = 140
"""Columns of a table that is not read on a terminal."""
SAID = {
    DecisionKind.PLACED: "placed",
    DecisionKind.STAYED: "stayed",
    DecisionKind.MOVED: "moved",
    DecisionKind.MOVE_REFUSED: "move refused",
    DecisionKind.RETURNED: "handed back",
    DecisionKind.LOST: "lost",
    DecisionKind.ENDED: "ended",
}
STYLES = {
    DecisionKind.MOVED: "cyan",
    DecisionKind.MOVE_REFUSED: "yellow",
    DecisionKind.RETURNED: "yellow",
    DecisionKind.LOST: "red",
    DecisionKind.ENDED: "bold",
}


def why(trajectory: str, run: Path | None, *, as_json: bool) -> None:
    """Print the story of a trajectory, or a list of those of a group.

    Raises:
        ConfigError: no such run or trajectory; says which there are.
        LedgerError: the run's ledger cannot be read.
    """
    directory = find_run(run)
    now = datetime.now(UTC).timestamp()
    store = Store(directory / LEDGER, read_only=True)
    try:
        found = find(store, trajectory)
        rows = [found] if isinstance(found, TrajectoryRow) else found
        stories = [tell(store, row) for row in rows]
    except sqlite3.Error as error:
        raise LedgerError(directory / LEDGER, f"cannot be read: {error}") from error
    finally:
        store.close()
    if as_json:
        told = [story.as_json() for story in stories]
        print(json.dumps(told[0] if isinstance(found, TrajectoryRow) else told))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(WIDTH_MIN, console.width)
    ended = (directory / "summary.json").exists()
    if isinstance(found, TrajectoryRow):
        print_story(console, stories[0], now, run_ended=ended)
    else:
        print_group(console, stories)


def find_run(run: Path | None) -> Path:
    """The run directory: the given one, or the newest.

    Raises:
        ConfigError: there is none.
    """
    if run is not None:
        if (run / LEDGER).exists():
            return run
        named = RUNS / run
        if (named / LEDGER).exists():
            return named
        raise ConfigError(f"{run}: no run directory (it has no {LEDGER}); {_known(run.parent)}")
    runs = _runs(RUNS)
    if not runs:
        raise ConfigError(f"no run in {RUNS}/; name its directory with --run")
    return max(runs, key=lambda path: (path / LEDGER).stat().st_mtime)


def _runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/{LEDGER}"))


def _known(parent: Path) -> str:
    runs = _runs(parent) or _runs(RUNS)
    return f"there are {', '.join(map(str, runs))}" if runs else f"there is none in {parent}/"


# ── one trajectory ───────────────────────────────────────────────────────────────────────────


def print_story(console: Console, story: Story, now: float, *, run_ended: bool) -> None:
    """A head, one line per decision, and how it ended or stands."""
    console.print(
        f"[bold]{escape(story.trajectory_id)}[/]  task {escape(story.task_id)}, "
        f"group {escape(story.group_id)} {story.group_state}"
    )
    console.print(
        f"{_counted(story.turns, 'turn')}; tokens: {story.prompt_tokens} prompt, "
        f"{story.action_tokens} sampled, {story.observation_tokens} observed; {_moves(story)}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("time", "right"), ("turn", "right"), ("what", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("where")
    table.add_column("why")
    table.add_column("expected (p90)", justify="right", no_wrap=True)
    table.add_column("actual", justify="right", no_wrap=True)
    table.add_column("weighed: cost (move), s")
    for chapter in story.chapters:
        table.add_row(*_cells(chapter), style=STYLES.get(DecisionKind(chapter.kind), ""))
    console.print(table)
    console.print(_end(story, now, run_ended=run_ended))


def _moves(story: Story) -> str:
    moved = [c for c in story.chapters if c.kind == DecisionKind.MOVED]
    refused = sum(c.kind == DecisionKind.MOVE_REFUSED for c in story.chapters)
    text = f"{_counted(len(moved) - refused, 'move')}, {_counted(story.losses, 'loss', 'es')}"
    return f"{text}, {_counted(refused, 'move')} refused" if refused else text


def _counted(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"


def _cells(chapter: Chapter) -> list[str]:
    expected = "" if chapter.p50 is None else f"{chapter.p50:,.0f} ({chapter.p90:,.0f})"
    return [
        f"+{chapter.at_s:.2f}",
        str(chapter.turn),
        SAID[DecisionKind(chapter.kind)],
        _where(chapter),
        escape(_reason(chapter)),
        expected,
        "" if chapter.actual is None else f"{chapter.actual:,}",
        "  ".join(f"{w.worker}{NBSP}{_cost(w.cost_s, w.move_s)}" for w in chapter.weighed),
    ]


def _where(chapter: Chapter) -> str:
    if chapter.kind in (DecisionKind.LOST, DecisionKind.RETURNED):
        return f"from {chapter.source}"
    if chapter.kind == DecisionKind.MOVE_REFUSED:
        return f"{chapter.source} refused, back on {chapter.target}"
    if chapter.kind == DecisionKind.ENDED:
        return f"on {chapter.source}"
    if chapter.source and chapter.source != chapter.target:
        return f"{chapter.source} → {chapter.target}"
    return chapter.target


def _reason(chapter: Chapter) -> str:
    arrival = chapter.arrival
    if arrival is None:
        return chapter.reason
    how = f"{arrival.path}: {arrival.tokens:,} tokens in {arrival.seconds:.2f} s"
    return f"{chapter.reason}; {how}{f' ({arrival.reason})' if arrival.reason else ''}"


def _cost(cost_s: float, move_s: float) -> str:
    return f"{cost_s:.2f}{NBSP}({move_s:.2f})" if move_s else f"{cost_s:.2f}"


def _end(story: Story, now: float, *, run_ended: bool) -> str:
    if story.reward is not None:
        return f"[bold]ended: {story.stop_reason}, reward {story.reward:g}[/]"
    if story.failure is not None:
        return f"[bold red]failed: {story.failure}: {escape(story.detail)}[/]"
    if story.state == TrajectoryState.DROPPED:
        return f"[bold]dropped with its group: {story.group_state}[/]"
    if run_ended:
        return f"[bold]the run ended while it was {story.state}[/]"
    since = "" if story.since is None else f" for {max(0.0, now - story.since):.0f} s"
    return f"[bold]{story.state}{since}; waits {story.waits_for}[/]"


# ── a group ──────────────────────────────────────────────────────────────────────────────────


def print_group(console: Console, stories: Sequence[Story]) -> None:
    """One line per trajectory."""
    first = stories[0]
    console.print(
        f"[bold]{escape(first.group_id)}[/]  task {escape(first.task_id)}, {first.group_state}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trajectory", no_wrap=True)
    table.add_column("state")
    table.add_column("turns", justify="right")
    table.add_column("sampled", justify="right")
    table.add_column("reward", justify="right")
    table.add_column("worker")
    table.add_column("way")
    for story in stories:
        table.add_row(
            escape(story.trajectory_id),
            story.failure or story.stop_reason or story.state,
            str(story.turns),
            f"{story.action_tokens:,}",
            "" if story.reward is None else f"{story.reward:g}",
            story.worker,
            _moves(story),
        )
    console.print(table)
