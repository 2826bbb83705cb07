"""The routing policy of a run, and what it has learned, kept in the run directory.

`learned.bin` is all that the policy had learned at one time. The logs beside it, `learned-N.log`,
hold the trajectories that finished later: a restart reads the one and learns the others again. A
thread writes both. What is kept only makes decisions better, so nothing that is wrong with the
files stops a run: it is said, and what cannot be read is learned anew.
"""

import os
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple, Self

import structlog
from xxhash import xxh3_128_digest

from common.config import Config
from services.scheduler.lessons import decode, encode
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policies import make_policy
from services.scheduler.routing.policy import Decision, MoveMeasure, Policy, TurnMeasure
from services.scheduler.routing.route import Route

log = structlog.get_logger()

FILE = "learned.bin"
LOGS = "learned-*.log"
DIGEST_BYTES = 16
FIRST_LOG = Struct("<Q")
"""Number of the first log that a copy does not contain."""
PENDING_MAX = 4096
"""Trajectories on their way to the disk: minutes of work. More are left out of the log; the next
copy contains them all the same."""
COPIED_AFTER_MIN = 64
COPIED_AFTER_MAX = 4096
"""Finished trajectories between two copies, twice as many each time. The most take a restart about
half a second to learn again."""
GATHER_S = 0.2
"""Records are gathered for so long and written at once: a wake-up costs more than a record."""
CLOSE_TIMEOUT_S = 5.0
"""Longer than any copy takes; past it the disk is stuck and the process ends anyway."""


def policy_of(config: Config) -> Policy:
    """The policy that `scheduler.placement` names, before it has learned anything."""
    return make_policy(config.scheduler.placement, RoutingParams.of(config), ResidualPredictor())


def restore(make: Callable[[], Policy], run_dir: Path) -> Policy:
    """A policy with what an earlier scheduler of this run has kept. Blocks; for the start only."""
    policy = make()
    first = _load(policy, run_dir / FILE)
    if first is None:
        policy, first = make(), 0  # The other one may have taken over half of it.
    lessons = 0
    for number, path in logs_of(run_dir):
        if number >= first:
            lessons += _learn(policy, path)
    if first or lessons:
        log.info("learning.restored", lessons=lessons)
    return policy


def logs_of(run_dir: Path) -> list[tuple[int, Path]]:
    """The logs by number, oldest first."""
    found = ((path.stem.partition("-")[2], path) for path in run_dir.glob(LOGS))
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def _load(policy: Policy, path: Path) -> int | None:
    """Load a copy; returns the first log that is not in it, or None when it cannot be used."""
    try:
        first, dumped = _read(path)
        policy.load(dumped)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        log.warning("learning.ignored", reason=str(error))
        return None
    return first


def _read(path: Path) -> tuple[int, bytes]:
    """The first log that a copy does not contain, and the copy."""
    kept = path.read_bytes()
    digest, copy = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    if len(copy) < FIRST_LOG.size or xxh3_128_digest(copy) != digest:
        raise ValueError(f"{path} is damaged")
    return FIRST_LOG.unpack_from(copy)[0], copy[FIRST_LOG.size :]


def _next_log(run_dir: Path) -> int:
    """A number beyond those of all logs, and of those that the copy contains."""
    try:
        first, _ = _read(run_dir / FILE)
    except (OSError, ValueError):  # `restore` has said so.
        first = 1
    return max([first, *(number + 1 for number, _ in logs_of(run_dir))])


def _learn(policy: Policy, path: Path) -> int:
    lessons = 0
    try:
        for route in decode(path.read_bytes()):
            policy.end(route, finished=True)
            lessons += 1
    except (OSError, ValueError) as error:
        log.warning("learning.ignored", reason=f"{path}: {error}")
    return lessons


@contextmanager
def remembered(config: Config, run_dir: Path) -> Generator[Policy]:
    """The policy of a run with what it knew, and learns it for the next time."""
    policy = restore(lambda: policy_of(config), run_dir)
    with Memory(run_dir) as memory:
        remembering = Remembering(policy, memory)
        yield remembering
        remembering.keep()


class _Item(NamedTuple):
    """Something to write."""

    content: bytes
    copy: bool
    """Of all that was said before it; else it is a record."""


class Memory:
    """Writes copies and logs in a thread of its own; no method but `close` waits for it."""

    def __init__(self, run_dir: Path, *, pending_max: int = PENDING_MAX) -> None:
        self._run_dir, self._pending_max = run_dir, pending_max
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        """None is the end."""
        self._closing = threading.Event()
        self._number = _next_log(run_dir)
        self._file: BinaryIO | None = None
        self._failed = False
        self.lost = 0
        """Records for which there was no room."""
        self._writer = threading.Thread(target=self._write, name="learning-writer", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is pending and let go."""
        self._closing.set()
        self._queue.put(None)
        self._writer.join(CLOSE_TIMEOUT_S)

    def note(self, record: bytes) -> None:
        """Append a record."""
        self._put(_Item(record, copy=False))

    def copy(self, dumped: bytes) -> bool:
        """Replace everything by a copy that contains all records up to now."""
        return self._put(_Item(dumped, copy=True))

    def _put(self, item: "_Item") -> bool:
        if self._queue.qsize() >= self._pending_max:
            self.lost += 1
            return False
        self._queue.put(item)
        return True

    # ── the writer thread ────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        ended = False
        while not ended:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            ended = items[-1] is None
            for copy, same in groupby(filter(None, items), key=attrgetter("copy")):
                if copy:
                    self._try(self._replace, [*same][-1].content)
                else:
                    self._try(self._append, b"".join(item.content for item in same))
            self._closing.wait(GATHER_S)
        if self._file is not None:
            self._file.close()

    def _try(self, write: Callable[[bytes], None], content: bytes) -> None:
        """Say what goes wrong, once; then nothing is appended until a copy was written.

        A hole in a log is fine, what follows a torn record is lost.
        """
        if self._failed and write == self._append:
            return
        try:
            write(content)
        except OSError as error:
            if not self._failed:
                log.warning("learning.unsaved", reason=str(error))
            self._failed = True
        else:
            self._failed = False

    def _append(self, record: bytes) -> None:
        if self._file is None:
            path = self._run_dir / f"learned-{self._number:06}.log"
            self._file = path.open("ab", buffering=0)  # A killed process loses nothing it wrote.
        if self._file.write(record) < len(record):  # Unbuffered, so it says so instead of raising.
            raise OSError(ENOSPC, os.strerror(ENOSPC), self._file.name)

    def _replace(self, dumped: bytes) -> None:
        """The old copy and its logs stay until the new one is whole."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._number += 1
        copy = FIRST_LOG.pack(self._number) + dumped
        path = self._run_dir / FILE
        draft = path.with_suffix(".tmp")
        try:
            with draft.open("wb") as file:
                file.write(xxh3_128_digest(copy))
                file.write(copy)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()  # The ledger needs the space.
            raise
        for number, old in logs_of(self._run_dir):
            if number < self._number:
                old.unlink()


class Remembering:
    """A policy whose lessons are kept. It decides as the one that it holds."""

    def __init__(self, policy: Policy, memory: Memory) -> None:
        self._policy, self._memory = policy, memory
        self._learns = bool(policy.dump())
        self._lessons = 0
        self._copied_after = COPIED_AFTER_MIN

    def begin(self, route: Route) -> None:
        self._policy.begin(route)

    def place(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        return self._policy.place(route, fleet, terms)

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        return self._policy.returned(route, fleet, terms)

    def end(self, route: Route, *, finished: bool) -> None:
        self._policy.end(route, finished=finished)
        if not finished or not self._learns:
            return
        self._memory.note(encode(route))
        self._lessons += 1
        if self._lessons >= self._copied_after:
            self.keep()

    def turn_measured(self, measure: TurnMeasure) -> None:
        self._policy.turn_measured(measure)

    def move_measured(self, measure: MoveMeasure) -> None:
        self._policy.move_measured(measure)

    def dump(self) -> bytes:
        return self._policy.dump()

    def load(self, dumped: bytes) -> None:
        self._policy.load(dumped)

    def keep(self) -> None:
        """Have a copy of everything written."""
        if self._learns and self._memory.copy(self._policy.dump()):
            self._lessons = 0
            self._copied_after = min(2 * self._copied_after, COPIED_AFTER_MAX)
