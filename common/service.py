"""The life of a service process: open, run, ask to stop, insist, exit with 0, 1 or 2.

`python -m services.<role> --config FILE --name NAME` ends here. Exit codes: 0 it stopped as
asked or its work is done, 1 it failed, 2 the configuration cannot be used.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol
from urllib.parse import urlsplit

import structlog
import uvloop

from common.config import Config
from common.config_load import load_config
from common.errors import ConfigError, LibraError, RunFailed
from common.identity import new_identity
from common.logs import configure_logs
from common.mesh import Mesh
from common.transport.zmq import ZmqTransport

log = structlog.get_logger()

GRACE_S = 22.0
"""From the first stop signal to cancellation. Longer than any training step of a small model,
shorter than the patience of systemd."""
INSIST_S = 5.0
"""From cancellation to the kernel's SIGALRM, which also ends a blocked event loop."""
PR_SET_PDEATHSIG = 1
EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
COORDINATOR_FILE = "coordinator.json"


@dataclass(frozen=True)
class Runtime:
    """What a service is given. The mesh is entered already."""

    config: Config
    run_id: str
    run_dir: Path
    role: str
    name: str
    mesh: Mesh
    coordinator_address: Callable[[], str]
    """Read again at each (re)connection: a restarted coordinator may listen elsewhere."""
    pid: int = field(default_factory=os.getpid)
    """For people; a simulation gives its own."""


class Service(Protocol):
    """One process of the mesh."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set or the work is done."""
        ...


def main(
    role: str, build: Callable[[Runtime], Service], arguments: Sequence[str] | None = None
) -> int:
    """Run one service to its end and return the exit code."""
    options = _parse(role, arguments)
    die_with_parent(options.parent)
    configure_logs(role, options.name)
    code, asked = EXIT_OK, asyncio.Event()
    try:
        config = load_config(Path(options.config), options.override)
        run_dir = Path(options.run_dir or Path(config.run.directory) / config.run.name)
        run_dir.mkdir(parents=True, exist_ok=True)
        uvloop.run(_supervise(build, config, run_dir, options, asked))
    except* ConfigError as group:
        code = _report(group, EXIT_CONFIG)
    except* LibraError as group:
        code = _report(group, EXIT_FAILED)
    except* Exception as group:  # A bug: the process ends, and says which.
        code = _report(group, EXIT_FAILED)
        log.exception("service.crashed")
    log.info("service.stopped", exit_code=code, asked=asked.is_set())
    return code


def leave(code: int) -> NoReturn:
    """End the process now. Everything of value is written; taking torch apart costs seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGTERM when the launcher is gone, however it went."""
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # It died before the call above.
        sys.exit(EXIT_FAILED)


def publish_coordinator(run_dir: Path, address: str, run_id: str) -> None:
    """Write where the coordinator listens, for the processes of this run directory."""
    path = run_dir / COORDINATOR_FILE
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"address": address, "run_id": run_id, "pid": os.getpid()}))
    draft.replace(path)


def published_coordinator(run_dir: Path, run_id: str) -> str | None:
    """Where this run's coordinator says it listens; None until it has said so."""
    try:
        entry = json.loads((run_dir / COORDINATOR_FILE).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return entry["address"] if entry.get("run_id") == run_id else None


def _parse(role: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"libra serve {role}")
    parser.add_argument("--config", required=True)
    parser.add_argument("--name", default=role)
    parser.add_argument("--run-id", default="")
    parser.add_argument("--run-dir", default="")
    parser.add_argument("--parent", type=int, default=None)
    parser.add_argument("override", nargs="*")
    parser.set_defaults(role=role)
    return parser.parse_args(arguments)


async def _supervise(
    build: Callable[[Runtime], Service],
    config: Config,
    run_dir: Path,
    options: argparse.Namespace,
    stopping: asyncio.Event,
) -> None:
    role: str = options.role
    run_id = options.run_id or config.run.name

    def coordinator_address() -> str:
        return published_coordinator(run_dir, run_id) or config.coordinator.address

    bind = (
        bind_address(config.coordinator.address)
        if role == "coordinator"
        else bind_address(coordinator_address(), local=True)
    )
    transport = ZmqTransport(str(new_identity(run_id, role, options.name)), bind)
    async with Mesh(transport) as mesh:
        runtime = Runtime(config, run_id, run_dir, role, options.name, mesh, coordinator_address)
        log.info("service.started", pid=os.getpid(), address=mesh.address, peer=mesh.identity)
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(build(runtime).run(stopping), name=f"{role}.run")
            _stop_on_signals(stopping, work)
        if work.cancelled():
            raise RunFailed(f"{options.name} did not stop in {GRACE_S:g} s and was cut off")


def _stop_on_signals(stopping: asyncio.Event, work: "asyncio.Task[None]") -> None:
    """First signal: ask. After the grace, or on a second signal: insist."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            work.cancel()
            return
        stopping.set()
        loop.call_later(GRACE_S, work.cancel)
        signal.alarm(int(GRACE_S + INSIST_S))  # Its default action ends the process.

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def bind_address(coordinator: str, *, local: bool = False) -> str:
    """Where to listen: at the coordinator's own address, or on the interface that reaches it.

    Args:
        coordinator: `tcp://host:port`.
        local: bind a free port on the interface from which the coordinator is reached.

    Raises:
        ConfigError: the host cannot be resolved.
    """
    parts = urlsplit(coordinator)
    host, port = parts.hostname or "127.0.0.1", parts.port or 0
    try:
        address = socket.gethostbyname(host)
        if not local:
            return f"tcp://{address}:{port}"
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect((address, port or 1))  # UDP: sends nothing, only picks a route.
            return f"tcp://{probe.getsockname()[0]}:0"
    except OSError as error:
        raise ConfigError(
            f"coordinator.address: cannot resolve {host!r} ({error}); use a reachable host or IP"
        ) from error


def _report(group: BaseExceptionGroup[Exception], code: int) -> int:
    for error in _leaves(group):
        kind = type(error).__name__
        detail = str(error) if isinstance(error, LibraError) else f"{kind}: {error}"
        log.error("service.failed", error=kind, detail=detail)
    return code


def _leaves(group: BaseExceptionGroup[Exception]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
