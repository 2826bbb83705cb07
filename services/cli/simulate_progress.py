"""The progress bar of simulations, on the error output so that results can be piped."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.simulator.runs import RunSpec


class Bar:
    """Counts runs. Shows nothing where nobody would see it move."""

    def __init__(self, runs: int) -> None:
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
        self._task = self._progress.add_task("simulating", total=runs)

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

    def run_done(self, spec: RunSpec) -> None:
        """One run has ended."""
        self._progress.update(self._task, advance=1, description=f"{spec.policy} seed {spec.seed}")
