"""Whether the jail holds on this machine: what is tried in it, and what to do when it does not."""

import contextlib
import json
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path

from services.tools.jail import Limits

UNSAFE_WARNING = "model-written code runs WITHOUT a sandbox, with the rights of this process"
OR_UNSAFE = "or set `unsafe = true` for this tool server if all code that it will run is yours"
BWRAP_MISSING = (
    "model-written code is run in a sandbox only, and bubblewrap is not installed:"
    f" apt-get install bubblewrap (0.8 or newer), {OR_UNSAFE}"
)

_ATTEMPTS = """
import os, resource, signal, socket, sys
escapes = []

def attempt(name, harm):
    try:
        harm()
    except (OSError, MemoryError):
        return
    escapes.append(name)

def fork_too_often():
    children = []
    try:
        for _ in range(bait["processes"] + 2):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

def write_too_much():
    with open("/workspace/large", "wb") as large:
        for _ in range(bait["file_bytes"] // 65536 + 2):
            large.write(bytes(65536))

def raise_limit():
    try:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    except ValueError as error:
        raise OSError from error

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt("a file of the host can be read", lambda: open(bait["file"]).close())
attempt("the root can be written to", lambda: open("/x", "w").close())
attempt("/usr can be written to", lambda: open("/usr/x", "w").close())
attempt("a port of the host can be reached",
        lambda: socket.create_connection(("127.0.0.1", bait["port"]), 1).close())
attempt("memory is not limited", lambda: bytearray(bait["memory_bytes"]))
attempt("processes are not limited", fork_too_often)
attempt("files are not limited", write_too_much)
attempt("limits can be raised", raise_limit)
if len([pid for pid in os.listdir("/proc") if pid.isdigit()]) > 1:
    escapes.append("other processes can be seen")
if escapes:
    sys.exit("; ".join(escapes))
"""


@contextlib.contextmanager
def bait() -> Generator[dict[str, str | int]]:
    """Things of the host that the sandbox must not reach: a readable file and an open port."""
    with (
        tempfile.NamedTemporaryFile(prefix="libra-bait-") as file,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        Path(file.name).chmod(0o644)
        yield {"file": file.name, "port": server.getsockname()[1]}


def code(bait: dict[str, str | int], limits: Limits) -> str:
    """The attempts, as code for the sandbox. It exits with the list of those that succeeded."""
    values = bait | {
        "processes": limits.processes,
        "file_bytes": limits.file_bytes,
        "memory_bytes": limits.memory_bytes,
    }
    return f"bait = {json.dumps(values)}\n{_ATTEMPTS}"


def cannot_start(reason: str) -> str:
    """For the operator: bubblewrap is there and does not work."""
    return (
        f"model-written code is run in a sandbox only, and it cannot be started here: {reason}."
        " It needs bubblewrap 0.8 and unprivileged user namespaces. In a container: --security-opt"
        " seccomp=unconfined --security-opt systempaths=unconfined. On Ubuntu 24.04: sysctl"
        f" kernel.apparmor_restrict_unprivileged_userns=0; {OR_UNSAFE}"
    )


def does_not_hold(escapes: str) -> str:
    """For the operator: the sandbox starts and does not contain."""
    return (
        "model-written code is run in a sandbox only, and the sandbox does not hold here:"
        f" {escapes}. Run the tool server on a kernel with user namespaces, {OR_UNSAFE}"
    )
