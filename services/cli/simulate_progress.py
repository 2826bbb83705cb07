"""The progress bar of simulations, on the error output so that results can be piped."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.simulator.runs import RunSpec


class Bar:
    """Counts runs, or per cents. Shows nothing where nobody would see it move."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("simulating", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def at(self, completed: float, what: str) -> None:
        """So much is done."""
        self._progress.update(self._task, completed=completed, description=what)

    def run_done(self, spec: RunSpec) -> None:
        """One run has ended."""
        self._progress.update(self._task, advance=1, description=f"{spec.policy} seed {spec.seed}")
