"""The run directory: made or found again, locked, swept."""

import fcntl
import json
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import IO

from common.config import Config
from common.errors import ConfigError
from common.membership import MEMORY
from common.service import COORDINATOR_FILE

NAMES_MAX = 1000
NAME_CHARS_MAX = 41
"""Of `run.name`; the suffix of a further run of the same name counts."""


class RunDirectory:
    """`runs/<name>/`, held by one launcher at a time."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock
        self.run_id = f"{path.name}-{secrets.token_hex(4)}"
        """Fresh for each launch: processes of an earlier one are strangers."""
        self.scratch = Path(tempfile.mkdtemp(prefix="libra-"))
        """For temporary files of all processes. The path is short: sockets are made in it."""
        sweep(previous_run_id(path))

    def close(self) -> None:
        """Give the directory up, and remove what the run left elsewhere."""
        sweep(self.run_id)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self._lock.close()


def sweep(run_id: str) -> None:
    """Remove what a run left in memory: weights, gradients, differences."""
    for segment in MEMORY.glob(f"libra-{run_id}-*") if run_id else ():
        segment.unlink(missing_ok=True)


def previous_run_id(path: Path) -> str:
    """Of the launch that held the directory before, which may have been killed; or empty."""
    try:
        return str(json.loads((path / COORDINATOR_FILE).read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


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
        except (OSError, ValueError) as error:
            raise ConfigError(f"run.directory: cannot make {str(path)!r}: {error}") from error
        return _hold(path)
    raise ConfigError(f"{root}: {NAMES_MAX} runs named {config.run.name!r}; choose another name")


def _candidates(root: Path, name: str) -> list[Path]:
    suffixes = ["", *(f"-{number}" for number in range(2, NAMES_MAX + 1))]
    return [root / f"{name[: NAME_CHARS_MAX - len(suffix)]}{suffix}" for suffix in suffixes]


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
