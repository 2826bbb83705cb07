"""Child processes: started, watched, started again, stopped in order, never orphaned."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import structlog

from common.errors import ConfigError, RunFailed
from common.logs import last_lines
from services.cli.plan import (
    GRACE_S,
    SETTLED_S,
    STOP_ORDER,
    AfterExit,
    ProcessSpec,
    after_exit,
    common_environment,
    describe_end,
)

log = structlog.get_logger()

RESTART_DELAY_S = 0.5
KILL_WAIT_S = 5.0
LOG_TAIL_LINES = 40


class Children:
    """All processes of one run."""

    def __init__(self, run_dir: Path, run_id: str, scratch: Path) -> None:
        self._run_dir = run_dir
        self._run_id = run_id
        self._scratch = scratch
        self._running: dict[str, tuple[ProcessSpec, asyncio.subprocess.Process]] = {}
        self._stopping = False

    async def keep(self, spec: ProcessSpec) -> None:
        """Keep one process running until the run stops. Returns when the job is finished.

        Raises:
            ConfigError: it says that the configuration cannot be used.
            RunFailed: it failed for good.
        """
        loop = asyncio.get_running_loop()
        in_a_row, first_s = 0, loop.time()
        while not self._stopping:
            started_s = loop.time()
            process = await self._start(spec)
            if self._stopping:  # It was asked while this one was being made.
                _signal(process, signal.SIGTERM)
            code = await process.wait()
            self._running.pop(spec.label, None)
            if self._stopping:
                return
            if code == 0 and was_asked(self._last_lines(spec)):  # By somebody else than us.
                code = -signal.SIGTERM
            if loop.time() - started_s > SETTLED_S:
                in_a_row, first_s = 0, started_s
            match after_exit(spec.role, code, in_a_row):
                case AfterExit.FINISHED:
                    return
                case AfterExit.GIVE_UP:
                    raise self._failure(spec, code, in_a_row, loop.time() - first_s)
                case AfterExit.RESTART:
                    in_a_row += 1
                    log.warning("process.restarted", process=spec.label, exit_code=code)
                    await asyncio.sleep(RESTART_DELAY_S)

    async def stop(self) -> None:
        """Stop what runs, role by role, so that each still finds whom it reports to."""
        self._stopping = True
        for role in STOP_ORDER:
            processes = [p for spec, p in self._running.values() if spec.role == role]
            await _stop_all(processes, GRACE_S[role])

    def kill(self) -> None:
        """End everything at once."""
        self._stopping = True
        for _, process in self._running.values():
            _signal(process, signal.SIGKILL)

    async def _start(self, spec: ProcessSpec) -> asyncio.subprocess.Process:
        arguments = [
            *("-m", spec.module),
            *("--config", str(self._run_dir / "config.toml")),
            *("--name", spec.name),
            *("--run-dir", str(self._run_dir)),
            *("--run-id", self._run_id),
            *("--parent", str(os.getpid())),
        ]
        environment: Mapping[str, str] = {
            **common_environment(os.environ, self._scratch),
            **dict(spec.environment),
        }
        with self._log(spec).open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher only.
            )
        self._running[spec.label] = (spec, process)
        return process

    def _failure(
        self, spec: ProcessSpec, code: int, restarts: int, within_s: float
    ) -> ConfigError | RunFailed:
        detail = failure_detail(self._last_lines(spec))
        end = describe_end(code, restarts, within_s, detail)
        if code == 2:
            return ConfigError(detail or end)
        return RunFailed(f"{spec.label}: {end}\n(its log: {self._log(spec)})")

    def _log(self, spec: ProcessSpec) -> Path:
        return self._run_dir / "logs" / f"{spec.label}.log"

    def _last_lines(self, spec: ProcessSpec) -> list[str]:
        return last_lines(self._log(spec), LOG_TAIL_LINES)


def failure_detail(lines: list[str]) -> str:
    """What a process said of its own end in its last life, else its last words."""
    for line, event in reversed([(line, parsed(line)) for line in lines]):
        if event.get("event") == "service.failed":
            return str(event.get("detail", ""))
        if event.get("event") == "service.started":
            return ""
        if line.strip() and not event:
            return line.strip()
    return ""


def was_asked(lines: list[str]) -> bool:
    """Whether a process ended because somebody sent it a signal, by its own word."""
    events = [event for event in map(parsed, lines) if event.get("event") == "service.stopped"]
    return bool(events) and bool(events[-1].get("asked"))


def parsed(line: str) -> dict[str, Any]:
    """A line of a log as an event; empty when it is none."""
    try:
        entry: Any = json.loads(line)
    except ValueError:
        return {}
    return cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}


async def _stop_all(processes: list[asyncio.subprocess.Process], grace_s: float) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    for process in processes:
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            log.warning("process.killed", pid=process.pid, reason="grace_exceeded")
            _signal(process, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
