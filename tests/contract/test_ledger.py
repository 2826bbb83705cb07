"""Both ledgers keep the same promises; the file also survives what files must survive."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import LedgerError
from services.scheduler.ledger import FileLedger, Ledger, MemoryLedger, trained_after, turns_of
from services.scheduler.records import (
    GroupRow,
    GroupState,
    MetaRow,
    Row,
    StepRow,
    TaskRow,
    TaskState,
    TrajectoryRow,
    TurnRow,
)
from services.scheduler.store import SCHEMA_VERSION


def group(number: int, state: GroupState = GroupState.RUNNING, step: int = 0) -> GroupRow:
    return GroupRow(f"g{number}", f"t{number}", 0, 0, number, state.value, step=step)


def member(number: int, group_number: int, state: str = "waiting") -> TrajectoryRow:
    return TrajectoryRow(f"g{group_number}.{number}", f"g{group_number}", number, state)


def turn(trajectory_id: str, number: int) -> TurnRow:
    packed = bytes([number, 0, 0, 0])
    return TurnRow(
        trajectory_id, number, b"", packed, packed, packed, b"", "calculator", "ok", 0.1, 0.2, 0.0
    )


@pytest.fixture(params=["memory", "file"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    if request.param == "memory":
        made = MemoryLedger()
        async with made:
            yield made
        made.close()
    else:
        async with FileLedger(tmp_path / "ledger.sqlite", tmp_path / "metrics.jsonl") as made:
            yield made


async def commit(ledger: Ledger, *rows: Row) -> None:
    await ledger.room()
    await ledger.commit(rows)


async def test_a_fresh_ledger_is_empty(ledger: Ledger) -> None:
    snapshot = ledger.snapshot()
    assert snapshot.meta == {"schema_version": str(SCHEMA_VERSION)}
    assert (snapshot.alive, snapshot.retries, snapshot.tasks_seen) == ([], [], 0)
    assert snapshot.last_step is None


async def test_what_was_committed_is_in_the_snapshot(ledger: Ledger) -> None:
    task = TaskRow(0, "t1", TaskState.ADMITTED.value, 1)
    await commit(ledger, task, group(1), member(1, 1), member(0, 1), MetaRow("lineage", "2"))
    snapshot = ledger.snapshot()
    assert snapshot.meta["lineage"] == "2"
    assert [record.group for record in snapshot.alive] == [group(1)]
    assert snapshot.alive[0].trajectories == [member(0, 1), member(1, 1)]
    assert (snapshot.tasks_seen, snapshot.admissions) == (1, 1)


async def test_a_row_written_again_replaces_itself(ledger: Ledger) -> None:
    await commit(ledger, group(1), group(1, GroupState.READY))
    await commit(ledger, group(1, GroupState.TAKEN))
    assert [record.group.state for record in ledger.snapshot().alive] == ["taken"]


async def test_finished_groups_are_counted_and_not_loaded(ledger: Ledger) -> None:
    await commit(
        ledger,
        group(1, GroupState.TRAINED, step=3),
        group(2, GroupState.DROPPED),
        group(3, GroupState.READY),
        member(0, 1, "finished"),
        member(0, 2, "failed"),
        member(0, 3, "finished"),
    )
    snapshot = ledger.snapshot()
    assert [record.group.group_id for record in snapshot.alive] == ["g3"]
    assert (snapshot.groups_trained, snapshot.groups_dropped) == (1, 1)
    assert snapshot.trajectories_ended == {"finished": 1, "failed": 1}


async def test_a_resume_finds_the_groups_and_steps_that_it_forgets(ledger: Ledger) -> None:
    steps = [StepRow(0, step, 0, "", "[]", f'{{"step": {step}}}') for step in (1, 2, 3)]
    groups = [group(n, GroupState.TRAINED, step=n) for n in (1, 2, 3)]
    await commit(ledger, *steps, *groups)
    found, later = await ledger.read(trained_after(1))
    assert [record.group.group_id for record in found] == ["g2", "g3"]
    assert later == steps[1:]
    assert ledger.snapshot().last_step == steps[2]
    assert ledger.snapshot().last_metrics == '{"step": 3}'


async def test_the_journal_of_a_trajectory_comes_back_in_order_and_exact(ledger: Ledger) -> None:
    turns = [turn("g1.0", number) for number in range(12)]
    await commit(ledger, *reversed(turns), turn("g1.1", 0))
    assert await ledger.read(turns_of("g1.0")) == turns


async def test_commits_resolve_in_order_and_all_are_durable(ledger: Ledger) -> None:
    resolved: list[int] = []

    async def one(number: int) -> None:
        await commit(ledger, MetaRow("newest", str(number)), MetaRow(f"k{number}", ""))
        resolved.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(500):
            tasks.create_task(one(number))
    assert resolved == list(range(500))
    meta = await ledger.read(lambda store: store.select(MetaRow))
    assert len(meta) == 502
    assert MetaRow("newest", "499") in meta


async def test_an_empty_commit_resolves_after_all_earlier_ones(ledger: Ledger) -> None:
    await ledger.room()
    earlier = ledger.commit([MetaRow("a", "1")])
    await ledger.commit([])
    assert await ledger.read(lambda store: store.select(MetaRow, "WHERE key = 'a'"))
    await earlier


async def test_a_cancelled_caller_does_not_undo_its_commit(ledger: Ledger) -> None:
    await ledger.room()
    durable = asyncio.ensure_future(ledger.commit([MetaRow("a", "1")]))  # noqa: TID251
    durable.cancel()
    await ledger.commit([])
    assert await ledger.read(lambda store: store.select(MetaRow, "WHERE key = 'a'"))


# ── the file ─────────────────────────────────────────────────────────────────────────────────


async def test_a_reopened_file_has_everything(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with FileLedger(path) as ledger:
        await commit(ledger, group(1), member(0, 1))
    async with FileLedger(path) as ledger:
        assert [record.group for record in ledger.snapshot().alive] == [group(1)]


async def test_commits_under_way_at_the_close_are_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with FileLedger(path) as ledger:
        under_way = [ledger.commit([MetaRow(f"k{number}", "")]) for number in range(50)]
    assert len(under_way) == 50
    async with FileLedger(path) as ledger:
        assert len(ledger.snapshot().meta) == 51


async def test_another_schema_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with FileLedger(path) as ledger:
        await commit(ledger, MetaRow("schema_version", "99"))
    with pytest.raises(LedgerError, match=r"schema version 99.*choose another run\.name"):
        FileLedger(path)
    with sqlite3.connect(path) as connection:  # Nothing was changed, and nothing is held.
        assert connection.execute("SELECT value FROM meta").fetchone() == ("99",)
    connection.close()


@pytest.mark.parametrize("content", [b"this is no database, just text" * 100, b"\0" * 4096])
def test_a_file_that_is_no_database_is_refused_with_a_remedy(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: .*run\.name"):
        FileLedger(path)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE music (title)")
    connection.close()
    with pytest.raises(LedgerError, match=r"schema version 0"):
        FileLedger(path)


async def test_two_schedulers_cannot_hold_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    async with FileLedger(path):
        with pytest.raises(LedgerError, match="held by another scheduler"):
            FileLedger(path)
    async with FileLedger(path):
        pass


async def test_metrics_lines_follow_their_step_and_are_restored_after_a_tear(
    tmp_path: Path,
) -> None:
    path, metrics = tmp_path / "ledger.sqlite", tmp_path / "metrics.jsonl"
    async with FileLedger(path, metrics) as ledger:
        for step in (1, 2):
            line = f'{{"step": {step}}}'
            await ledger.commit([StepRow(0, step, 0, "", "[]", line)], line)
        assert metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    metrics.write_text('{"step": 1}\n{"st')
    async with FileLedger(path, metrics):
        assert metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


async def test_a_full_disk_fails_every_later_commit_and_loses_no_earlier_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.sqlite"
    async with FileLedger(path) as ledger:
        await commit(ledger, MetaRow("a", "1"))
        pages = ledger._store.count("PRAGMA page_count")
        ledger._store.count(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(LedgerError, match=r"cannot be written: .*full"):
            await commit(ledger, *[MetaRow(f"big{n}", "x" * 4000) for n in range(20)])
        with pytest.raises(LedgerError, match=r"full"):
            await commit(ledger, MetaRow("b", "2"))
    async with FileLedger(path) as ledger:
        assert ledger.snapshot().meta.keys() == {"schema_version", "a"}


async def meta_of(path: Path) -> dict[str, str]:
    async with FileLedger(path) as ledger:
        return ledger.snapshot().meta


WRITER = """
import asyncio, sys
from pathlib import Path
from services.scheduler.ledger import FileLedger
from services.scheduler.records import MetaRow

async def main():
    async with FileLedger(Path(sys.argv[1])) as ledger:
        async def one(number):
            await ledger.room()
            await ledger.commit([MetaRow(f"k{number}", "x" * 200), MetaRow(f"twin{number}", "")])
            print(number, flush=True)
        number = 0
        while True:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(20):
                    tasks.create_task(one(number))
                    number += 1

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("acknowledged_at_least", [1, 300])
def test_sigkill_in_mid_commit_loses_nothing_that_was_acknowledged(
    tmp_path: Path, acknowledged_at_least: int
) -> None:
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(acknowledged_at_least)]
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    kept = asyncio.run(meta_of(path))
    numbers = {int(key[1:]) for key in kept if key.startswith("k")}
    assert numbers >= set(acknowledged)
    assert numbers == {int(key[4:]) for key in kept if key.startswith("twin")}
    assert numbers == set(range(len(numbers)))  # A prefix: order is kept, too.
