"""Hosts that one machine pretends to have: network namespaces behind links of a set rate."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import LibraError

COMMAND_TIMEOUT_S = 10.0
BURST_BYTES = 128 << 10
"""Of the shaper's bucket: some milliseconds of the link."""
LATENCY = "50ms"
"""What may queue in a shaper; more would be memory that hides the link."""


class LinksUnavailable(LibraError):
    """This machine cannot make shaped links; says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """One end."""

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """To run there."""
        return ["ip", "netns", "exec", self.namespace, *command]


@contextmanager
def hosts(count: int, bytes_per_s: int) -> Generator[list[Host]]:
    """Make so many, each with a link of the rate, both ways; removed afterwards.

    Raises:
        LinksUnavailable: no `ip` or `tc`, no right to use them, or not in this kernel.
    """
    stem = f"libra{os.getpid()}"
    hub = f"{stem}-hub"
    made: list[str] = []
    try:
        _make_namespace(hub, made)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        found = [Host(f"{stem}-{number}", f"10.77.0.{number + 1}") for number in range(count)]
        for number, host in enumerate(found):
            _make_namespace(host.namespace, made)
            _join(hub, host, f"port{number}", bytes_per_s)
        yield found
    finally:
        for namespace in reversed(made):
            _try("ip", "netns", "del", namespace)


def _make_namespace(name: str, made: list[str]) -> None:
    _ip("netns", "add", name)
    made.append(name)
    _ip("-n", name, "link", "set", "lo", "up")


def _join(hub: str, host: Host, port: str, bytes_per_s: int) -> None:
    _ip("-n", hub, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host.namespace)
    _ip("-n", hub, "link", "set", port, "master", "bridge")
    _ip("-n", hub, "link", "set", port, "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")
    for namespace, device in ((hub, port), (host.namespace, "eth0")):
        shape = ("rate", f"{8 * bytes_per_s}bit", "burst", str(BURST_BYTES), "latency", LATENCY)
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    if (problem := _try(*command)) is not None:
        raise LinksUnavailable(f"{' '.join(command[:5])}: {problem}")


def _try(*command: str) -> str | None:
    """Run it; why it failed, or None."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(  # noqa: S603  (fixed commands)
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    return None if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"
