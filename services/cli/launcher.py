"""Runs one job on this machine: starts its processes, shows where it stands, ends it cleanly."""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import structlog
from rich.console import Console
from rich.live import Live

from common.config import Config
from common.errors import (
    ConfigError,
    LedgerError,
    LibraError,
    RequestRefused,
    RunFailed,
    TransportError,
)
from common.identity import new_identity
from common.membership import Membership
from common.mesh import Mesh
from common.messages.scheduler import GetRunStatus, RunStatus
from common.service import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    Runtime,
    bind_address,
    published_coordinator,
)
from common.toml_write import to_toml
from common.transport.zmq import ZmqTransport
from services.cli.children import Children
from services.cli.plan import ProcessSpec, processes, spread_cores
from services.cli.plot import plot_reward
from services.cli.progress import Progress, clock
from services.cli.rundir import RunDirectory, open_run_directory
from services.scheduler.summary import summarise

log = structlog.get_logger()

EXIT_INTERRUPTED = 130
COORDINATOR_START_S = 30.0
POLL_S = 0.5
STATUS_TIMEOUT_S = 2.0
SILENCE_S = 15.0
"""Without a step for so long, say what the run waits for."""


def launch(config: Config, *, resume: bool, console: Console) -> int:
    """Run a checked job to its end and return the exit code.

    The last line on stdout is the content of `summary.json` as one line.
    """
    directory = open_run_directory(config, resume=resume)
    try:
        config = spread_cores(config, sorted(os.sched_getaffinity(0)))
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"name": directory.path.name})}
        )
        (directory.path / "config.toml").write_text(to_toml(config))
        console.print(f"run directory: {directory.path}", markup=False, soft_wrap=True)
        launcher = Launcher(config, directory, console)
        asyncio.run(launcher.run())
        return launcher.report()
    finally:
        directory.close()


class Launcher:
    """One launch of one job."""

    def __init__(self, config: Config, directory: RunDirectory, console: Console) -> None:
        self._config = config
        self._directory = directory
        self._console = console
        self._children = Children(directory.path, directory.run_id, directory.scratch)
        self._ended = asyncio.Event()
        self._failure: LibraError | None = None
        self._interrupted = False
        self._wall_s = 0.0

    async def run(self) -> None:
        """Start everything, wait for the end, stop everything."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        try:
            async with asyncio.TaskGroup() as tasks:
                coordinator, *others = processes(self._config)
                tasks.create_task(self._keep(coordinator), name="keep coordinator")
                await self._wait_for_coordinator()
                for spec in others if not self._ended.is_set() else ():
                    tasks.create_task(self._keep(spec), name=f"keep {spec.label}")
                watch = tasks.create_task(self._watch(started_s), name="watch")
                await self._ended.wait()
                await asyncio.sleep(2 * POLL_S)  # One more look, so that the last step is shown.
                watch.cancel()
                await self._children.stop()
        finally:
            self._children.kill()
            self._wall_s = loop.time() - started_s

    def report(self) -> int:
        """Write and print how it went; the exit code says it in short."""
        summary = self._summary()
        steps, wanted = int(summary["steps"]), self._config.run.max_steps
        if self._interrupted:
            self._say("stopped; go on with the same command and --resume")
        elif self._failure is None and steps < wanted:
            self._say(
                f"every task is trained or dropped after {steps} of {wanted} steps;"
                f" tasks: {summary.get('tasks')}, dropped groups:"
                f" {summary.get('groups', {}).get('dropped_by_reason')}"
            )
            if not steps:
                self._failure = RunFailed("no step was trained; see scheduler.log in the logs")
        if self._failure is not None:
            self._say(f"failed: {self._failure}", style="red")
        first, last = summary.get("reward_first"), summary.get("reward_last")
        if first is not None and last is not None:
            self._say(
                f"reward: {first:.3f} → {last:.3f} (first and last tenth of {steps} steps,"
                f" {clock(self._wall_s)})"
            )
        picture = plot_reward(self._directory.path)
        if picture is not None:
            self._say(f"plot: {picture}")
        self._say(f"run directory: {self._directory.path}")
        print_last(self._console, json.dumps(summary))
        if self._failure is not None:
            return EXIT_CONFIG if isinstance(self._failure, ConfigError) else EXIT_FAILED
        return EXIT_INTERRUPTED if self._interrupted else EXIT_OK

    def _summary(self) -> dict[str, Any]:
        """The summary, written to the run directory; a failure to do so is one of the run."""
        path = self._directory.path
        try:
            summary = summarise(path / "ledger.sqlite", path / "metrics.jsonl")
            summary |= {"run_directory": str(path), "wall_s": round(self._wall_s, 3)}
            draft = path / "summary.tmp"
            draft.write_text(json.dumps(summary) + "\n")
            draft.replace(path / "summary.json")
        except (LedgerError, OSError) as error:
            self._failure = self._failure or RunFailed(f"cannot write summary.json: {error}")
            return {"steps": 0, "run_directory": str(path)}
        return summary

    def _say(self, text: str, *, style: str = "") -> None:
        """Print a line as it is: names and messages of others may look like markup."""
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def _interrupt(self) -> None:
        if self._interrupted:
            self._children.kill()
            return
        self._interrupted = True
        self._say("stopping: saving a checkpoint (once more to stop at once)")
        self._ended.set()

    async def _keep(self, spec: ProcessSpec) -> None:
        try:
            await self._children.keep(spec)
        except (ConfigError, RunFailed) as error:
            self._failure = self._failure or error
        self._ended.set()

    async def _wait_for_coordinator(self) -> None:
        directory = self._directory
        try:
            async with asyncio.timeout(COORDINATOR_START_S):
                while not published_coordinator(directory.path, directory.run_id):
                    if self._ended.is_set():
                        return
                    await asyncio.sleep(0.05)  # A file appears: there is nothing to wait on.
        except TimeoutError:
            self._failure = RunFailed(
                f"the coordinator did not listen within {COORDINATOR_START_S:g} s"
                f" (its log: {directory.path / 'logs' / 'coordinator.log'})"
            )
            self._ended.set()

    # ── showing ──────────────────────────────────────────────────────────────────────────────

    async def _watch(self, started_s: float) -> None:
        """Ask the scheduler and the coordinator where things stand, and show it."""
        if self._ended.is_set():
            return
        path, run_id = self._directory.path, self._directory.run_id

        def address() -> str:
            return published_coordinator(path, run_id) or self._config.coordinator.address

        identity = str(new_identity(run_id, "launcher", "launcher"))
        progress = Progress(path.name, started_s)
        async with Mesh(ZmqTransport(identity, bind_address(address(), local=True))) as mesh:
            runtime = Runtime(self._config, run_id, path, "launcher", "launcher", mesh, address)
            membership = Membership(runtime)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(membership.run(), name="launcher.membership")
                if self._console.is_terminal:
                    await self._show_table(membership, progress)
                else:
                    await self._show_lines(membership, progress)

    async def _show_table(self, membership: Membership, progress: Progress) -> None:
        loop = asyncio.get_running_loop()
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            status: RunStatus | None = None
            while True:
                status = await self._status(membership) or status
                if status is not None:
                    progress.note(status, loop.time())
                live.update(progress.table(status, loop.time()))
                await asyncio.sleep(POLL_S)

    async def _show_lines(self, membership: Membership, progress: Progress) -> None:
        loop = asyncio.get_running_loop()
        said_s = loop.time()
        while True:
            status = await self._status(membership)
            if status is not None and progress.note(status, loop.time()):
                self._say(progress.line(status, loop.time()))
                said_s = loop.time()
            elif loop.time() - said_s > SILENCE_S:
                waits = status.waiting_for if status else "the scheduler"
                self._say(f"{clock(loop.time() - progress.started_s)}: waits for {waits}")
                said_s = loop.time()
            await asyncio.sleep(POLL_S)

    async def _status(self, membership: Membership) -> RunStatus | None:
        scheduler = membership.find("scheduler")
        if scheduler is None:
            return None
        try:
            return await membership.request(scheduler, GetRunStatus(), timeout_s=STATUS_TIMEOUT_S)
        except (TransportError, RequestRefused):
            return None  # It restarts; the next look will tell.


class SteadyConsole(Console):
    """A console whose reader may go away: the run goes on without being shown."""

    def on_broken_pipe(self) -> None:
        """Say nothing any more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_last(console: Console, line: str) -> None:
    """Print a line without wrapping or colours, where somebody still reads."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        console.on_broken_pipe()
