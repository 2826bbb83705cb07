"""The run directory: made or found again, locked, swept."""

import fcntl
import secrets
from pathlib import Path
from typing import IO

from common.config import Config
from common.errors import ConfigError

SEGMENT_DIRECTORY = Path("/dev/shm")  # noqa: S108  (the memory file system, not a temp dir)
NAMES_MAX = 1000


class RunDirectory:
    """`runs/<name>/`, held by one launcher at a time."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self.run_id = f"{path.name}-{secrets.token_hex(4)}"
        """Fresh for each launch: processes of an earlier one are strangers."""

    def close(self) -> None:
        """Give the directory up, and remove what the run left in memory."""
        self.sweep()
        self._lock.close()

    def sweep(self) -> list[Path]:
        """Remove the weight segments of this run."""
        found = sorted(SEGMENT_DIRECTORY.glob(f"libra-{self.run_id}-*"))
        for segment in found:
            segment.unlink(missing_ok=True)
        return found


def open_run_directory(config: Config, *, resume: bool) -> RunDirectory:
    """Make a new run directory, or find the newest one of this name again.

    A new run never touches an older one: `demo`, then `demo-2`, and so on.

    Raises:
        ConfigError: nothing to resume, or another launcher holds the directory.
    """
    root = Path(config.run.directory)
    taken = [path for path in _candidates(root, config.run.name) if path.exists()]
    if resume:
        if not taken:
            raise ConfigError(
                f"{root / config.run.name}: nothing to resume; run without --resume first"
            )
        return _hold(taken[-1])
    for path in _candidates(root, config.run.name):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return _hold(path)
    raise ConfigError(f"{root}: {NAMES_MAX} runs named {config.run.name!r}; choose another name")


def _candidates(root: Path, name: str) -> list[Path]:
    return [root / (name if n == 1 else f"{name}-{n}") for n in range(1, NAMES_MAX + 1)]


def _hold(path: Path) -> RunDirectory:
    (path / "logs").mkdir(exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)
    lock = (path / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"{path}: another libra run holds this directory") from error
    return RunDirectory(path, lock)
