"""The ledger's tables in SQLite, synchronously: write rows, read groups, make a snapshot.

Knows SQL and nothing else. Who calls it from which thread, and when a write is durable, is
decided in `ledger.py`.
"""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from common.errors import LedgerError
from services.scheduler.records import (
    ALIVE,
    ROW_TYPES,
    DecisionRow,
    GroupRecord,
    GroupRow,
    GroupState,
    MetaRow,
    Past,
    Row,
    Snapshot,
    StepRow,
    TaskRow,
    TaskState,
    TrajectoryRow,
    TurnRow,
    TurnSizes,
)

SCHEMA_VERSION = 2
"""Raised with every change of a row type."""
SCHEMA_KEY = "schema_version"
BUSY_TIMEOUT_S = 5.0
"""Readers such as a status command hold the file only for moments."""
SQL_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}

RowT = TypeVar("RowT", bound=Row)


def columns(row_type: type[Row]) -> tuple[str, ...]:
    """Column names in field order."""
    return tuple(item.name for item in fields(row_type))


def _create_sql(row_type: type[Row]) -> str:
    parts = [
        f"{item.name} {SQL_TYPES.get(cast('type', item.type), '')}".rstrip()
        for item in fields(row_type)
    ]
    key = ", ".join(row_type.KEY)
    return f"CREATE TABLE {row_type.TABLE} ({', '.join(parts)}, PRIMARY KEY ({key}))"


def _put_sql(row_type: type[Row]) -> str:
    """An upsert by key. `INSERT OR REPLACE` would delete and insert, twice the pages."""
    names = columns(row_type)
    marks = ", ".join("?" * len(names))
    rest = [name for name in names if name not in row_type.KEY]
    changes = ", ".join(f"{name}=excluded.{name}" for name in rest)
    key = ", ".join(row_type.KEY)
    return (
        f"INSERT INTO {row_type.TABLE} ({', '.join(names)}) VALUES ({marks}) "  # noqa: S608  (all names are ours)
        f"ON CONFLICT ({key}) DO UPDATE SET {changes}"
    )


PUT: dict[type[Row], str] = {row_type: _put_sql(row_type) for row_type in ROW_TYPES}
VALUES: dict[type[Row], Callable[[Any], Any]] = {
    row_type: attrgetter(*columns(row_type)) for row_type in ROW_TYPES
}
SIZES = (
    "trajectory_id, length(prompt_tokens) / 4, length(action_tokens) / 4, "
    "length(observation_tokens) / 4, tool, tool_status, tool_latency_s, lease"
)
"""The columns of `TurnSizes`. SQLite tells the length of a blob without reading it."""
GOES_ON = (
    "trajectory_id IN (SELECT t.trajectory_id FROM trajectories t JOIN groups g USING (group_id) "
    "WHERE g.state = 'running' AND t.state IN ('waiting', 'running'))"
)
INDEXES = (
    "CREATE INDEX groups_by_state ON groups (state)",
    "CREATE INDEX trajectories_by_group ON trajectories (group_id, number)",
)


def connect(path: Path | str, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a ledger file as it is, for use by one thread at a time.

    Raises:
        LedgerError: there is no file, or it cannot be opened.
    """
    try:
        return sqlite3.connect(
            f"file:{path}?mode=ro" if read_only else path,
            uri=read_only,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_TIMEOUT_S,
        )
    except sqlite3.Error as error:
        raise LedgerError(path, f"cannot be opened: {error}") from error


class Store:
    """One open connection with the schema in place."""

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self._path = path
        self._connection = connect(path, read_only=read_only)
        try:
            if not read_only:
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
            self._check_schema(read_only=read_only)
        except sqlite3.Error as error:
            self._connection.close()
            reason = f"is not a usable ledger ({error}); move it away or choose another run.name"
            raise LedgerError(path, reason) from error
        except LedgerError:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def _check_schema(self, *, read_only: bool) -> None:
        found = self._schema_version()
        if found is None and not read_only:
            self._create()
        elif found != SCHEMA_VERSION:
            raise LedgerError(
                self._path,
                f"has schema version {found}, this Libra writes {SCHEMA_VERSION}; continue the "
                "run with the Libra that began it, or choose another run.name",
            )

    def _schema_version(self) -> int | None:
        """None when the file is empty; 0 when it is a database of something else."""
        tables = {name for (name,) in self._all("SELECT name FROM sqlite_master", ())}
        if not tables:
            return None
        if "meta" not in tables:
            return 0
        rows = self._all("SELECT value FROM meta WHERE key = ?", (SCHEMA_KEY,))
        return int(rows[0][0]) if rows else 0

    def _create(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for row_type in ROW_TYPES:
            self._connection.execute(_create_sql(row_type))
        for index in INDEXES:
            self._connection.execute(index)
        self._put([MetaRow(SCHEMA_KEY, str(SCHEMA_VERSION))])
        self._connection.execute("COMMIT")

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def apply(self, rows: Sequence[Row]) -> None:
        """Write rows in one transaction: all of them or none.

        Raises:
            LedgerError: the file cannot be written (disk full, gone).
        """
        if not rows:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._put(rows)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise LedgerError(self._path, f"cannot be written: {error}") from error

    def _put(self, rows: Iterable[Row]) -> None:
        by_type: defaultdict[type[Row], list[Any]] = defaultdict(list)
        for row in rows:
            row_type = type(row)
            by_type[row_type].append(VALUES[row_type](row))
        for row_type, values in by_type.items():
            self._connection.executemany(PUT[row_type], values)

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def _all(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def select(
        self, row_type: type[RowT], rest: str = "", values: Sequence[Any] = ()
    ) -> list[RowT]:
        """Rows of one table; `rest` is everything after the table's name."""
        sql = f"SELECT {', '.join(columns(row_type))} FROM {row_type.TABLE} {rest}"  # noqa: S608  (all names are ours)
        return [row_type(*found) for found in self._all(sql, values)]

    def count(self, sql: str, values: Sequence[Any] = ()) -> int:
        """The single number that a query gives; 0 for NULL and for no row."""
        rows = self._all(sql, values)
        return (rows[0][0] or 0) if rows else 0

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Whatever a query gives."""
        return self._all(sql, values)

    def tally(self, sql: str) -> dict[str, int]:
        """Counts by name, from a query that gives both."""
        return dict(self._all(f"{sql} ORDER BY 1", ()))

    def turns(self, trajectory_id: str) -> list[TurnRow]:
        """The journaled turns of one trajectory, in order."""
        return self.select(TurnRow, "WHERE trajectory_id = ? ORDER BY turn", (trajectory_id,))

    def group(self, group_id: str) -> GroupRecord | None:
        """One group with its trajectories."""
        found = self.select(GroupRow, "WHERE group_id = ?", (group_id,))
        return self._records(found)[0] if found else None

    def group_with_turns(
        self, group_id: str
    ) -> tuple[GroupRecord, dict[str, list[TurnRow]]] | None:
        """One group with everything that was sampled for it."""
        record = self.group(group_id)
        if record is None:
            return None
        ids = [row.trajectory_id for row in record.trajectories]
        return record, {trajectory_id: self.turns(trajectory_id) for trajectory_id in ids}

    def trained_after(self, step: int) -> list[GroupRecord]:
        """Groups that later steps trained, for a resume that forgets those steps."""
        return self._records(
            self.select(
                GroupRow,
                "WHERE state = ? AND step > ? ORDER BY admission",
                (GroupState.TRAINED, step),
            )
        )

    def steps_after(self, step: int) -> list[StepRow]:
        """Attempts at later steps that are not forgotten yet."""
        return self.select(StepRow, "WHERE step > ? AND forgotten = 0", (step,))

    def _records(self, groups: list[GroupRow]) -> list[GroupRecord]:
        return [
            GroupRecord(
                group,
                self.select(TrajectoryRow, "WHERE group_id = ? ORDER BY number", (group.group_id,)),
            )
            for group in groups
        ]

    def decisions(self, trajectory_id: str) -> list[DecisionRow]:
        """What was decided of one trajectory, in order."""
        return self.select(DecisionRow, "WHERE trajectory_id = ? ORDER BY number", (trajectory_id,))

    def sizes(self, trajectory_id: str) -> list[TurnSizes]:
        """The journaled turns of one trajectory without their tokens, in order."""
        sql = f"SELECT {SIZES} FROM turns WHERE trajectory_id = ? ORDER BY turn"  # noqa: S608
        return [TurnSizes(*found) for found in self._all(sql, (trajectory_id,))]

    def _past(self) -> dict[str, Past]:
        """By trajectory that goes on."""
        past: dict[str, Past] = {}
        for found in self._all(f"SELECT {SIZES} FROM turns WHERE {GOES_ON} ORDER BY turn", ()):  # noqa: S608
            sizes = TurnSizes(*found)
            past.setdefault(sizes.trajectory_id, Past()).turns.append(sizes)
        decided = self._all(
            "SELECT trajectory_id, MAX(number), SUM(kind = 'moved' AND reason <> 'draining') "  # noqa: S608
            f"- SUM(kind = 'move_refused') FROM decisions WHERE {GOES_ON} GROUP BY 1",
            (),
        )
        for trajectory_id, newest, moves in decided:
            turns = past.get(trajectory_id, Past()).turns
            past[trajectory_id] = Past(turns, decisions=newest + 1, moves=max(0, moves))
        return past

    def metrics_lines(self) -> list[str]:
        """The content of `metrics.jsonl`."""
        rows = self.select(StepRow, "WHERE skipped = '' ORDER BY lineage, step, attempt")
        return [row.metrics for row in rows if row.metrics]

    def snapshot(self) -> Snapshot:
        """Everything that a scheduler needs to start or go on."""
        states = Counter[str]()
        for state, count in self._all("SELECT state, COUNT(*) FROM groups GROUP BY state", ()):
            states[state] = count
        marks = ", ".join("?" * len(ALIVE))
        alive = self.select(
            GroupRow, f"WHERE state IN ({marks}) ORDER BY admission", [str(s) for s in ALIVE]
        )
        ended = self._all(
            "SELECT t.state, COUNT(*) FROM trajectories t JOIN groups g USING (group_id) "
            "WHERE g.state IN (?, ?) GROUP BY t.state",
            (GroupState.TRAINED, GroupState.DROPPED),
        )
        newest = "ORDER BY lineage DESC, step DESC, attempt DESC LIMIT 1"
        attempts = self.select(StepRow, f"WHERE forgotten = 0 {newest}")
        trained = self.select(StepRow, f"WHERE metrics <> '' {newest}")
        return Snapshot(
            meta={row.key: row.value for row in self.select(MetaRow)},
            tasks_seen=self.count("SELECT COUNT(*) FROM tasks"),
            retries=self.select(
                TaskRow, "WHERE state = ? ORDER BY epoch, task_id", (TaskState.RETRY,)
            ),
            alive=self._records(alive),
            groups_trained=states[GroupState.TRAINED],
            groups_dropped=states[GroupState.DROPPED],
            trajectories_ended=dict(ended),
            past=self._past(),
            admissions=self.count("SELECT MAX(admission) FROM groups"),
            last_step=attempts[0] if attempts else None,
            last_metrics=trained[0].metrics if trained else "",
        )
