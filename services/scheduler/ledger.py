"""The ledger: the one source of truth for what was admitted, made, trained and dropped.

Two forms of one contract. `FileLedger` is an SQLite file written by one thread: writes queue up
while a transaction is on its way and share the next one, so a thousand small commits cost a few
disk flushes. `MemoryLedger` does everything at once and never waits, for simulations.
"""

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from common.errors import LedgerError
from services.scheduler.records import GroupRecord, Row, Snapshot, StepRow, TurnRow
from services.scheduler.store import Store

PENDING_MAX = 4096
"""Commits on their way before `room` waits: about a second of a slow disk."""
GROUP_MAX = 512
"""Commits that share one transaction, so that the first of them does not wait for ever."""
CLOSE_TIMEOUT_S = 10.0
"""Longer than any transaction; past it the disk is stuck and the process ends anyway."""

T = TypeVar("T")


class Ledger(Protocol):
    """What a scheduler needs of a ledger."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def snapshot(self) -> Snapshot:
        """Everything needed to start or go on. Blocks; for the start only."""
        ...

    async def room(self) -> None:
        """Wait until the queue has room.

        Call it before the change that will be committed: between a change and its `commit`
        nothing may be awaited, or the order is lost.
        """
        ...

    def commit(self, rows: Sequence[Row], line: str = "") -> Awaitable[None]:
        """Queue rows, and a line for `metrics.jsonl`, at once and in order.

        The result resolves when they, and all rows queued before, are durable.

        Raises:
            LedgerError: an earlier write has failed, so nothing more can be written.
        """
        ...

    async def read(self, query: Callable[[Store], T]) -> T:
        """Run a query on what is durable."""
        ...


class MemoryLedger:
    """Everything at once, in this thread; gone with the object, not with its user."""

    def __init__(self) -> None:
        self._store = Store(":memory:")
        self.lines: list[str] = []
        self.commits = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Keep the rows: whoever opens it next finds them, as in a file."""

    def close(self) -> None:
        self._store.close()

    def snapshot(self) -> Snapshot:
        return self._store.snapshot()

    async def room(self) -> None:
        return

    def apply(self, rows: Sequence[Row]) -> None:
        """`commit` without an event loop."""
        self._store.apply(rows)
        self.commits += 1

    def commit(self, rows: Sequence[Row], line: str = "") -> Awaitable[None]:
        self.apply(rows)
        if line:
            self.lines.append(line)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def read(self, query: Callable[[Store], T]) -> T:
        return query(self._store)


@dataclass(frozen=True, slots=True)
class _Commit:
    rows: Sequence[Row]
    line: str
    durable: "asyncio.Future[None]"


class FileLedger:
    """An SQLite file in WAL mode with a flush per transaction."""

    def __init__(self, path: Path, metrics_path: Path | None = None) -> None:
        self._path = path
        self._metrics_path = metrics_path
        self._lock = _lock(path)
        try:
            self._store = Store(path)
        except LedgerError:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[_Commit | None] = queue.SimpleQueue()
        self._pending = 0
        self._roomy = asyncio.Event()
        self._failure: LedgerError | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ledger-reader")
        self._reading = Store(path, read_only=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._restore_metrics()
        self._roomy.set()
        self._writer = threading.Thread(target=self._write, name="ledger-writer", daemon=True)
        self._writer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._queue.put(None)
        await self._loop.run_in_executor(self._reader, self._writer.join, CLOSE_TIMEOUT_S)
        self._reader.shutdown()
        self._reading.close()
        self._store.close()
        os.close(self._lock)

    def snapshot(self) -> Snapshot:
        return self._reading.snapshot()

    async def room(self) -> None:
        while self._pending >= PENDING_MAX and self._failure is None:
            self._roomy.clear()
            await self._roomy.wait()  # Ends with the transaction that the writer is in.

    def commit(self, rows: Sequence[Row], line: str = "") -> Awaitable[None]:
        if self._failure is not None:
            raise self._failure
        durable: asyncio.Future[None] = self._loop.create_future()
        self._pending += 1
        self._queue.put(_Commit(rows, line, durable))
        return durable

    async def read(self, query: Callable[[Store], T]) -> T:
        return await self._loop.run_in_executor(self._reader, query, self._reading)

    # ── the writer thread ────────────────────────────────────────────────────────────────────

    def _write(self) -> None:
        closing = False
        while not closing:
            group, closing = self._next_group()
            failure = self._write_group(group) if group else None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._resolve, group, failure)

    def _next_group(self) -> tuple[list[_Commit], bool]:
        """What has queued up, and whether the ledger is being closed after it."""
        first = self._queue.get()
        if first is None:
            return [], True
        group = [first]
        while len(group) < GROUP_MAX:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                return group, True
            group.append(item)
        return group, False

    def _write_group(self, group: list[_Commit]) -> LedgerError | None:
        if self._failure is not None:  # Later rows must not be written where earlier ones failed.
            return self._failure
        try:
            self._store.apply([row for commit in group for row in commit.rows])
            self._append([commit.line for commit in group if commit.line])
        except LedgerError as error:
            self._failure = error
        except OSError as error:
            place = self._metrics_path or self._path
            self._failure = LedgerError(place, f"cannot be written: {error}")
        return self._failure

    def _append(self, lines: list[str]) -> None:
        if lines and self._metrics_path is not None:
            with self._metrics_path.open("a") as file:
                file.writelines(line + "\n" for line in lines)

    def _resolve(self, group: list[_Commit], failure: LedgerError | None) -> None:
        self._pending -= len(group)
        self._roomy.set()
        for commit in group:
            if commit.durable.done():  # Its caller was cancelled.
                continue
            if failure is None:
                commit.durable.set_result(None)
            else:
                commit.durable.set_exception(failure)

    def _restore_metrics(self) -> None:
        """Make `metrics.jsonl` agree with the ledger: a kill may have torn its last line."""
        if self._metrics_path is None:
            return
        wanted = "".join(line + "\n" for line in self._store.metrics_lines())
        path = self._metrics_path
        if not path.exists() or path.read_text(errors="replace") != wanted:
            draft = path.with_suffix(".tmp")
            draft.write_text(wanted)
            draft.replace(path)


def _lock(path: Path) -> int:
    """Hold the ledger for this process alone; the kernel lets go when the process ends."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        reason = "is held by another scheduler; stop that run first, or choose another run.name"
        raise LedgerError(path, reason) from error
    return lock


def trained_after(step: int) -> Callable[[Store], tuple[list[GroupRecord], list[StepRow]]]:
    """Query: groups and steps that a resume from `step` forgets."""
    return lambda store: (store.trained_after(step), store.steps_after(step))


def turns_of(trajectory_id: str) -> Callable[[Store], list[TurnRow]]:
    """Query: the journal of one trajectory."""
    return lambda store: store.turns(trajectory_id)
