"""Ends what a server that was killed may have left: a jail that never came to run its code.

bubblewrap ties itself to its parent in two steps. Killed between them, its child waits for ever for
a word of it: harmless, since no code runs yet, but there. The next server of this machine ends such
children; a sandbox whose server lives is never touched, whatever run it belongs to.
"""

import contextlib
import os
import signal
from pathlib import Path

from services.tools.jail import PRELUDE


def end_orphans(bwrap: str) -> int:
    """Kill the jailers whose server is gone, and return how many there were."""
    orphans = [pid for pid in _jailers(bwrap) if _server_is_gone(pid)]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(orphans)


def _jailers(bwrap: str) -> list[int]:
    """Processes that still are bubblewrap, on behalf of any tool server."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().split(b"\0")
            if command[0] == bwrap.encode() and PRELUDE.encode() in command:
                found.append(int(path.parent.name))
    return found


def _server_is_gone(pid: int) -> bool:
    """Whether nobody holds the other end of its stdin, which its server does while it lives."""
    stdin = Path("/proc", str(pid), "fd", "0")
    try:
        if not str(stdin.readlink()).startswith("pipe:"):
            return False
        fd = os.open(stdin, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False  # It ended, or belongs to somebody else.
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
