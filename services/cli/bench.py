"""What a benchmark reports: raw figures, and checks that each say whether a limit holds."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from common.service import EXIT_FAILED, EXIT_OK

RUNS = "runs"
"""Figures of every single run, which are for scripts: a table leaves them out."""


@dataclass(frozen=True, slots=True)
class Check:
    """One claim and what was measured."""

    name: str
    value: float
    unit: str
    limit: str
    """For people and scripts alike, such as `<= 2.5`."""
    ok: bool


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The outcome of one benchmark."""

    name: str
    figures: dict[str, Any]
    """Raw figures, as nested JSON values."""
    checks: list[Check]

    @property
    def exit_code(self) -> int:
        """0 only if all checks hold."""
        return EXIT_OK if all(check.ok for check in self.checks) else EXIT_FAILED

    def to_json(self) -> str:
        """One object on one line."""
        return json.dumps(asdict(self))

    def print_table(self) -> None:
        """Figures and checks for people."""
        console = Console(highlight=False)
        figures = Table(title=self.name, box=None, padding=(0, 2), title_justify="left")
        figures.add_column("figure")
        figures.add_column("value", justify="right")
        for name, value in flatten(self.figures):
            if name.rpartition(".")[2] == RUNS:
                continue
            figures.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
        console.print(figures)
        self.print_checks()

    def print_checks(self) -> None:
        """The checks for people; nothing where there are none."""
        if not self.checks:
            return
        console = Console(highlight=False)
        checks = Table(box=None, padding=(0, 2))
        for column in ("check", "value", "limit", ""):
            checks.add_column(column)
        for check in self.checks:
            mark = "[green]ok[/green]" if check.ok else "[red]missed[/red]"
            checks.add_row(check.name, f"{check.value:.4g} {check.unit}", check.limit, mark)
        console.print(checks)


def at_most(name: str, value: float, unit: str, limit: float) -> Check:
    """A check that a value does not exceed a limit."""
    return Check(name, value, unit, f"<= {limit:g}", value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Check:
    """A check that a value reaches a limit."""
    return Check(name, value, unit, f">= {limit:g}", value >= limit)


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested figures as dotted names."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            flat.extend(flatten(value, f"{prefix}{name}."))  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat.append((prefix + name, value))
    return flat
