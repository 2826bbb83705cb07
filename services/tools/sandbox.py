"""Runs model-written Python where it can do no harm, or not at all.

`Sandbox.open` proves on this machine that the jail holds before anything runs in it. How a run
ended is what the kernel says of the process; what the code prints is only data.
"""

import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from common.errors import ConfigError
from services.tools import probe
from services.tools.jail import (
    CODE_MAX_BYTES,
    ENVIRONMENT,
    NOBODY,
    Limits,
    find_python,
    jail_command,
    python_command,
)
from services.tools.orphans import end_orphans
from services.tools.sdk import Busy, InfrastructureFailure
from services.tools.seccomp import seccomp_program
from services.tools.threads import NoThreadFree, StillRunning, Threads

log = structlog.get_logger()

SLOTS = 4
"""Runs at once, in one server. Each may use a core and `Limits.memory_bytes` per process."""
SLOT_WAIT_S = 10.0
KILL_S = 5.0
"""For the kernel to end what was killed. A process in an uninterruptible wait may outlast it."""
READ_BYTES = 65536
PROBE_TIMEOUT_S = 20.0
LIMIT_SHARE = 0.5
"""A run that was killed after this share of its CPU limit was killed by that limit. What the kernel
reports and what it limits by differ by a fifth on a busy machine."""

DEFAULT_LIMITS = Limits()


class SandboxStatus(StrEnum):
    """How a run ended."""

    OK = "ok"
    """Exit code 0."""
    FAILED = "failed"
    """Another exit code; an uncaught exception gives 1."""
    KILLED = "killed"
    """By a signal: a crash, or the kernel short of memory."""
    TIMEOUT = "timeout"
    """Wall clock or CPU time was used up."""
    FLOOD = "flood"
    """It printed more than `Limits.flood_bytes`."""


@dataclass(frozen=True)
class SandboxResult:
    """One run, after everything that it started is gone."""

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int
    """128 + n when signal n ended it."""
    wall_s: float
    cpu_s: float


class Sandbox:
    """A few slots in which code runs, each run in a jail of its own."""

    def __init__(self, bwrap: str | None, python: str, slots: int) -> None:
        self._bwrap = bwrap
        self._python = python
        self._filter = seccomp_program() if bwrap else b""
        self._threads = Threads(slots, "sandbox")

    @classmethod
    async def open(cls, *, slots: int = SLOTS, unsafe: bool = False) -> "Sandbox":
        """Make a sandbox and prove that it holds.

        Args:
            slots: runs at once.
            unsafe: run the code as an ordinary process, with limits only.

        Raises:
            ConfigError: bubblewrap is missing or cannot contain code here, and `unsafe` is False.
        """
        if unsafe:
            log.warning("sandbox.disabled", reason="unsafe", detail=probe.UNSAFE_WARNING)
            return cls(None, find_python(), slots)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError(probe.BWRAP_MISSING)
        sandbox = cls(bwrap, find_python(), slots)
        end_orphans(bwrap)
        await sandbox._prove()
        return sandbox

    async def run_python(
        self,
        code: str,
        *,
        timeout_s: float,
        limits: Limits = DEFAULT_LIMITS,
        slot_wait_s: float = SLOT_WAIT_S,
    ) -> SandboxResult:
        """Run code to its end or its limits, and end all that it started.

        Raises:
            ValueError: the code cannot be run as text: a NUL byte, a lone surrogate, too long.
            Busy: no slot became free within `slot_wait_s`.
            InfrastructureFailure: the jail could not be started or ended.
        """
        _check_code(code)
        try:
            return await self._threads.run(
                partial(self._run, code, timeout_s, limits),
                start_wait_s=slot_wait_s,
                limit_s=timeout_s + 2 * KILL_S,
            )
        except NoThreadFree as error:
            raise Busy("every slot of the sandbox is in use") from error
        except StillRunning as error:
            raise InfrastructureFailure(f"the sandbox does not end a run: {error}") from error

    def _run(self, code: str, timeout_s: float, limits: Limits) -> SandboxResult:
        command = python_command(self._python, limits, code)
        if self._bwrap is None:
            with tempfile.TemporaryDirectory(prefix="libra-unsafe-") as cwd, _pipe() as (stdin, _):
                return _Run(command, limits, cwd=cwd, stdin=stdin).finish(timeout_s)
        with (
            _pipe() as (stdin, _),
            _pipe() as (reports, reporter),
            _pipe() as (filter_in, filter_out),
        ):
            filter_out.write(self._filter)  # A few hundred bytes: the pipe takes them at once.
            filter_out.close()
            jail = jail_command(
                self._bwrap,
                limits,
                status_fd=reporter.fileno(),
                seccomp_fd=filter_in.fileno(),
            )
            passed = (reporter.fileno(), filter_in.fileno())
            run = _Run(jail + command, limits, cwd="/", stdin=stdin, reports=reports, passed=passed)
            reporter.close()
            return run.finish(timeout_s)

    async def _prove(self) -> None:
        with probe.bait() as bait:
            try:
                result = await self.run_python(
                    probe.code(bait, DEFAULT_LIMITS), timeout_s=PROBE_TIMEOUT_S
                )
            except InfrastructureFailure as error:
                raise ConfigError(probe.cannot_start(str(error))) from error
        if result.status is not SandboxStatus.OK:
            raise ConfigError(probe.does_not_hold(result.stderr.strip() or result.status.value))


class _Run:
    """One process and what it started. Blocking: it has a thread of its own."""

    def __init__(
        self,
        command: list[str],
        limits: Limits,
        *,
        cwd: str,
        stdin: io.FileIO,
        reports: io.FileIO | None = None,
        passed: tuple[int, ...] = (),
    ) -> None:
        """Start it.

        Args:
            command: what to run.
            limits: what it may use.
            cwd: where it starts.
            stdin: a pipe that is open for as long as this server lives.
            reports: where the jailer reports; None without a jail.
            passed: what the jailer inherits.
        """
        self._limits = limits
        self._jailed = reports is not None
        self._report_fd = reports.fileno() if reports else -1
        self._report_text = b""
        self._started_s = time.monotonic()
        identity: dict[str, Any] = {}
        if reports and os.geteuid() == 0:
            identity = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours, the code is data.
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                cwd=cwd,
                env=ENVIRONMENT,
                start_new_session=reports is None,
                **identity,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise InfrastructureFailure(f"the sandbox cannot be started: {error}") from error
        if reports:
            os.set_blocking(self._report_fd, False)
        assert self._process.stdout
        assert self._process.stderr
        self._outputs = {
            self._process.stdout.fileno(): bytearray(),
            self._process.stderr.fileno(): bytearray(),
        }
        self._open = set(self._outputs)
        self._read_bytes = 0

    def finish(self, timeout_s: float) -> SandboxResult:
        """Wait for the end, bring it about where it does not come, and say how it was."""
        for fd in self._outputs:
            os.set_blocking(fd, False)
        pidfd = os.pidfd_open(self._process.pid)
        try:
            stopped = self._watch(pidfd, self._started_s + timeout_s)
            if stopped or not self._jailed:
                self._kill()
            if stopped and not self._wait(pidfd, KILL_S):
                raise InfrastructureFailure("a killed sandbox does not end")
            _, wait_status, usage = os.wait4(self._process.pid, 0)
        finally:
            os.close(pidfd)
        self._process.returncode = os.waitstatus_to_exitcode(wait_status)
        for fd in tuple(self._open):
            self._drain(fd)
        return self._result(stopped, usage.ru_utime + usage.ru_stime)

    def _watch(self, pidfd: int, deadline_s: float) -> SandboxStatus | None:
        """Read what it prints until it ends by itself (None), floods, or is out of time."""
        poll = select.poll()
        for fd in (pidfd, *self._outputs):
            poll.register(fd, select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = [fd for fd, _ in poll.poll(max(1, int(left_s * 1000)))]
            if pidfd in ready:
                return None
            for fd in ready:
                if not self._read(fd):
                    self._open.discard(fd)
                    poll.unregister(fd)
            if self._read_bytes > self._limits.flood_bytes:
                return SandboxStatus.FLOOD
        return SandboxStatus.TIMEOUT

    def _read(self, fd: int) -> bool:
        """Keep what fits, count everything. False at the end."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        self._read_bytes += len(data)
        kept = self._outputs[fd]
        kept += data[: self._limits.output_bytes - len(kept)]
        return bool(data)

    def _drain(self, fd: int) -> None:
        while self._read_bytes <= 2 * self._limits.flood_bytes and self._read(fd):
            pass

    def _kill(self) -> None:
        """End everything.

        The jail's pid 1 takes all of its namespace along, and the jailer only ends after it, so
        waiting for the jailer is waiting for all of them.
        """
        if self._jailed and (inner := self._inner_pid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, signal.SIGKILL)
        elif self._jailed:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _inner_pid(self) -> int | None:
        """Pid 1 of the jail as the host numbers it, when it is still the jailer's child."""
        pid = self._reports().get("child-pid")
        if not isinstance(pid, int):
            return None
        try:
            stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            return None
        return pid if parent == self._process.pid else None

    def _reports(self) -> dict[str, Any]:
        """What bubblewrap itself said, on a pipe that the code does not have."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._report_fd, READ_BYTES):
                self._report_text += data
        reports: dict[str, Any] = {}
        for line in self._report_text.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                reports |= json.loads(line)
        return reports

    def _wait(self, pidfd: int, timeout_s: float) -> bool:
        return bool(select.select([pidfd], [], [], timeout_s)[0])

    def _result(self, stopped: SandboxStatus | None, cpu_s: float) -> SandboxResult:
        stdout, stderr = (bytes(kept).decode("utf-8", "replace") for kept in self._outputs.values())
        if self._process.stdout and self._process.stderr:
            self._process.stdout.close()
            self._process.stderr.close()
        code = self._process.returncode
        exit_code = 128 - code if code < 0 else code
        if not stopped and self._jailed and "exit-code" not in self._reports():
            raise InfrastructureFailure(f"the sandbox did not start: {stderr.strip()[-500:]}")
        return SandboxResult(
            status=stopped or _status_of(exit_code, cpu_s, self._limits),
            stdout=stdout,
            stderr=stderr,
            exit_code=exit_code,
            wall_s=time.monotonic() - self._started_s,
            cpu_s=cpu_s,
        )


def _status_of(exit_code: int, cpu_s: float, limits: Limits) -> SandboxStatus:
    if exit_code == 0:
        return SandboxStatus.OK
    if exit_code <= 128:
        return SandboxStatus.FAILED
    if exit_code == 128 + signal.SIGKILL and cpu_s >= limits.cpu_s * LIMIT_SHARE:
        return SandboxStatus.TIMEOUT
    return SandboxStatus.KILLED


def _check_code(code: str) -> None:
    if "\0" in code:
        raise ValueError("source code cannot contain null bytes")
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        raise ValueError("source code must be valid Unicode") from error
    if size > CODE_MAX_BYTES:
        raise ValueError(f"source code has {size} bytes; the limit is {CODE_MAX_BYTES}")


@contextlib.contextmanager
def _pipe() -> Generator[tuple[io.FileIO, io.FileIO]]:
    """A pipe whose ends are closed at the end, where they are not already."""
    out, into = os.pipe()
    with os.fdopen(out, "rb", 0) as reader, os.fdopen(into, "wb", 0) as writer:
        yield reader, writer
