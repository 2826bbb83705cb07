"""The command line of the sandbox: what model-written code can see and how much it can use.

Pure: from limits and the layout of this machine to an argument vector. bubblewrap makes the
namespaces (user, mount, pid, net, ipc, uts, cgroup), the code itself is pid 1 of its own, so its
end is the end of everything that it started.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

CODE_MAX_BYTES = 96 * 1024
"""The code travels as one argument, and the kernel takes at most 128 KiB in one."""
NOBODY = 65534
"""Uid and gid of the code, inside and, where the server is root, outside. Root would be exempt from
the limit on processes."""
PYTHON_PATH = "/usr/bin:/usr/local/bin"
ROOT_LINKS = ("bin", "lib", "lib64", "lib32", "libx32")

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "LIBRA_SANDBOX": "1",
}
"""All that the code finds in its environment."""

PRELUDE = """
def _start(names):
    import posix, resource as r, sys
    del names["_start"]
    try:
        posix.set_blocking(0, False)
        posix.read(0, 1)
        posix._exit(1)
    except BlockingIOError:
        posix.dup2(posix.open("/dev/null", 0), 0)
    limits = map(int, sys.argv[1].split(","))
    for kind, limit in zip((r.RLIMIT_CORE, r.RLIMIT_CPU, r.RLIMIT_AS, r.RLIMIT_NPROC,
                            r.RLIMIT_FSIZE, r.RLIMIT_NOFILE), limits):
        r.setrlimit(kind, (limit, limit))
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass
    shown = sys.excepthook
    def show(kind, error, tb):
        tb = tb and tb.tb_next and tb.tb_next.tb_next
        shown(kind, error.with_traceback(tb), tb)
    sys.excepthook = show
    code = sys.argv[2]
    sys.argv[:] = ["main.py"]
    exec(compile(code, "main.py", "exec"), names)
_start(globals())
"""
"""Runs before the code, in the same interpreter: a second start would double the cost.

Stdin is a pipe that the server holds open: at its end the server is gone, and died before this
process was tied to its life. Then come the limits, hard ones that the code cannot raise again, an
offer to be the first when the kernel runs out of memory, and tracebacks that show only the code."""


@dataclass(frozen=True)
class Limits:
    """What one run may use. Memory and CPU are per process, `processes` bounds their number."""

    cpu_s: int = 4
    memory_bytes: int = 256 << 20
    """Address space."""
    processes: int = 16
    """Threads included."""
    file_bytes: int = 8 << 20
    """One file."""
    disk_bytes: int = 16 << 20
    """`/workspace` and `/tmp` together; it is memory."""
    open_files: int = 64
    output_bytes: int = 64 * 1024
    """Kept of each of stdout and stderr; the rest is read and thrown away."""
    flood_bytes: int = 8 << 20
    """Code that prints more than this is stopped."""

    def argument(self) -> str:
        """For the prelude, in its order."""
        return (
            f"0,{self.cpu_s},{self.memory_bytes},{self.processes},{self.file_bytes}"
            f",{self.open_files}"
        )


def find_python() -> str:
    """A Python below /usr, which is all that the sandbox shows of the host.

    Raises:
        ConfigError: there is none.
    """
    python = shutil.which("python3", path=PYTHON_PATH)
    if python is None:
        raise ConfigError("the sandbox needs a Python below /usr: apt-get install python3-minimal")
    return python


def python_command(python: str, limits: Limits, code: str) -> list[str]:
    """The interpreter, started as cheaply as it can be: no site, no user paths, no bytecode."""
    return [python, "-I", "-S", "-B", "-c", PRELUDE, limits.argument(), code]


def jail_command(bwrap: str, limits: Limits, *, status_fd: int, seccomp_fd: int) -> list[str]:
    """The jail, up to the command that runs in it.

    Args:
        bwrap: path of bubblewrap.
        limits: what the code may use.
        status_fd: where bubblewrap reports; the code does not get it.
        seccomp_fd: from where it reads the filter.
    """
    unshared = ("user", "pid", "net", "ipc", "uts", "cgroup-try")
    return [
        bwrap,
        *(f"--unshare-{namespace}" for namespace in unshared),
        "--disable-userns",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        *("--json-status-fd", str(status_fd)),
        *("--seccomp", str(seccomp_fd)),
        *("--ro-bind", "/usr", "/usr"),
        *_root_links(),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
        *("--proc", "/proc"),
        *("--dev-bind", "/dev/null", "/dev/null"),
        *("--dev-bind", "/dev/zero", "/dev/zero"),
        *("--dev-bind", "/dev/urandom", "/dev/urandom"),
        # One quota for everything that the code writes; the rest cannot be written to.
        *("--size", str(limits.disk_bytes), "--perms", "1777", "--tmpfs", "/tmp"),  # noqa: S108
        *("--symlink", "tmp", "/workspace"),
        *("--remount-ro", "/"),
        *("--chdir", "/workspace"),
        *("--uid", str(NOBODY), "--gid", str(NOBODY)),
        *("--hostname", "sandbox"),
        "--",
    ]


def _root_links() -> list[str]:
    """`/lib` and its like, as this distribution has them."""
    arguments: list[str] = []
    for name in ROOT_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments
