"""Runs one job on this machine: starts its processes, shows where it stands, ends it cleanly."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.live import Live

from common.config import Config
from common.errors import ConfigError, LibraError, RequestRefused, RunFailed, TransportError
from common.identity import new_identity
from common.membership import Membership
from common.mesh import Mesh
from common.messages.coordinator import Fleet, GetFleet
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


def launch(config: Config, *, resume: bool, console: Console) -> int:
    """Run a checked job to its end and return the exit code.

    The last line on stdout is the content of `summary.json` as one line.
    """
    directory = open_run_directory(config, resume=resume)
    try:
        config = spread_cores(config, len(os.sched_getaffinity(0)))
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"name": directory.path.name})}
        )
        (directory.path / "config.toml").write_text(to_toml(config))
        console.print(f"run directory: {directory.path}")
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
        self._children = Children(directory.path, directory.run_id)
        self._ended = asyncio.Event()
        self._failure: LibraError | None = None
        self._interrupted = False
        self._wall_s = 0.0
        self._fleet: Fleet | None = None

    async def run(self) -> None:
        """Start everything, wait for the end, stop everything."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            async with asyncio.TaskGroup() as tasks:
                coordinator, *others = processes(self._config)
                tasks.create_task(self._keep(coordinator), name="keep coordinator")
                await self._wait_for_coordinator()
                for spec in others if not self._ended.is_set() else ():
                    tasks.create_task(self._keep(spec), name=f"keep {spec.name}")
                watch = tasks.create_task(self._watch(started_s), name="watch")
                await self._ended.wait()
                watch.cancel()
                await self._children.stop()
        finally:
            self._children.kill()
            self._wall_s = loop.time() - started_s

    def report(self) -> int:
        """Write and print how it went; the exit code says it in short."""
        summary = write_summary(self._directory.path, self._wall_s, self._fleet)
        if self._failure is not None:
            self._console.print(f"[red]failed:[/red] {self._failure}", soft_wrap=True)
        elif self._interrupted:
            self._console.print("stopped; go on with the same command and --resume")
        first, last = summary.get("reward_first"), summary.get("reward_last")
        if first is not None and last is not None:
            self._console.print(
                f"reward: {first:.3f} → {last:.3f} (first and last tenth of"
                f" {summary.get('steps', 0)} steps, {clock(self._wall_s)})"
            )
        picture = plot_reward(self._directory.path)
        if picture is not None:
            self._console.print(f"plot: {picture}")
        self._console.print(f"run directory: {self._directory.path}")
        print(json.dumps(summary), flush=True)
        if self._failure is not None:
            return EXIT_CONFIG if isinstance(self._failure, ConfigError) else EXIT_FAILED
        return EXIT_INTERRUPTED if self._interrupted else EXIT_OK

    def _interrupt(self) -> None:
        if self._interrupted:
            self._children.kill()
            return
        self._interrupted = True
        self._console.print("stopping: saving a checkpoint (once more to stop at once)")
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
        while True:
            status = await self._status(membership)
            if status is not None and progress.note(status, loop.time()):
                self._console.print(progress.line(status, loop.time()), soft_wrap=True)
            await asyncio.sleep(POLL_S)

    async def _status(self, membership: Membership) -> RunStatus | None:
        scheduler = membership.find("scheduler")
        if scheduler is None:
            return None
        try:
            self._fleet = await membership.ask_coordinator(GetFleet(), timeout_s=STATUS_TIMEOUT_S)
            return await membership.request(scheduler, GetRunStatus(), timeout_s=STATUS_TIMEOUT_S)
        except (TransportError, RequestRefused):
            return None  # It restarts; the next look will tell.


def write_summary(path: Path, wall_s: float, fleet: Fleet | None) -> dict[str, Any]:
    """Summarise the ledger and the metrics into `summary.json`."""
    summary = summarise(path / "ledger.sqlite", path / "metrics.jsonl")
    summary["run_directory"] = str(path)
    summary["wall_s"] = round(wall_s, 3)
    summary["versions_published"] = 0 if fleet is None else fleet.versions_published
    draft = path / "summary.tmp"
    draft.write_text(json.dumps(summary) + "\n")
    draft.replace(path / "summary.json")
    return summary
