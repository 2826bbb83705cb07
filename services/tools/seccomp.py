"""A small filter on system calls: what namespaces and limits do not cover.

Sockets of families that know no network namespace (AF_VSOCK reaches the hypervisor), io_uring,
which would go around this very filter, and kernel interfaces with a history of holes. A program of
classic BPF, as `bwrap --seccomp` reads it.
"""

import errno
import platform
import struct
from dataclasses import dataclass

from common.errors import ConfigError

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
"""Families that the empty network namespace contains."""
X32_BIT = 0x40000000
"""Marks the calls of a second ABI, with numbers of its own."""


@dataclass(frozen=True)
class _Machine:
    """Numbers of one architecture."""

    audit: int
    socket: int
    denied: tuple[int, ...]
    """io_uring_setup, bpf, perf_event_open, add_key, request_key, keyctl, userfaultfd."""


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 41, (425, 321, 298, 248, 249, 250, 323)),
    "aarch64": _Machine(0xC00000B7, 198, (425, 280, 241, 217, 218, 219, 282)),
}


def seccomp_program(machine: str = platform.machine()) -> bytes:
    """The filter for this machine.

    Raises:
        ConfigError: its system calls are not known.
    """
    known = _MACHINES.get(machine)
    if known is None:
        raise ConfigError(f"the sandbox knows {' and '.join(_MACHINES)}, not {machine}")
    steps = [
        _load(ARCHITECTURE_AT),
        *_unless(EQUAL, known.audit, KILL),
        _load(NUMBER_AT),
        *_when(AT_LEAST, X32_BIT, KILL),
    ]
    for number in known.denied:
        steps += _when(EQUAL, number, FAIL | errno.EPERM)
    steps += _unless(EQUAL, known.socket, ALLOW)
    steps.append(_load(FIRST_ARGUMENT_AT))
    for family in (AF_UNIX, AF_INET, AF_INET6):
        steps += _when(EQUAL, family, ALLOW)
    steps.append(_instruction(RETURN, FAIL | errno.EAFNOSUPPORT))
    return b"".join(steps)


def _load(offset: int) -> bytes:
    return _instruction(LOAD, offset)


def _when(test: int, value: int, verdict: int) -> list[bytes]:
    return [_instruction(test, value, no=1), _instruction(RETURN, verdict)]


def _unless(test: int, value: int, verdict: int) -> list[bytes]:
    return [_instruction(test, value, yes=1), _instruction(RETURN, verdict)]


def _instruction(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One `struct sock_filter`: `yes` and `no` are how many instructions to skip."""
    return struct.pack("<HBBI", code, yes, no, value)
