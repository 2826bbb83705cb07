"""What a policy has learned, across restarts of its scheduler."""

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgpack
import pytest
from structlog.testing import capture_logs
from xxhash import xxh3_64_intdigest

from common.config import SchedulerConfig
from common.trajectory import ToolStatus
from services.scheduler.learning import (
    COPIED_AFTER_MIN,
    FILE,
    Memory,
    Remembering,
    logs_of,
    policy_of,
    remembered,
    restore,
)
from services.scheduler.lessons import HEAD, decode, encode
from services.scheduler.routing.outcomes import Payload, ToolOutcome
from services.scheduler.routing.policy import Policy
from services.scheduler.routing.route import Route
from tests.support.sim import sim_config

LIBRA = sim_config(scheduler=SchedulerConfig(placement="libra"))
CMLFQ = sim_config(scheduler=SchedulerConfig(placement="cmlfq"))


def fresh() -> Policy:
    return policy_of(LIBRA)


def restored(run_dir: Path) -> Policy:
    return restore(fresh, run_dir)


def finished(number: int) -> Route:
    route = Route(f"g{number}.0", f"g{number}", f"t{number}", prompt_tokens=10)
    outcome = ToolOutcome("search", ToolStatus.OK, Payload.SMALL, 5, 0.1)
    route.returned(outcome, action_tokens=50 + number, observation_tokens=5)
    route.action_tokens += 30
    return route


def teach(policy: Policy, trajectories: int = 20, *, first: int = 0) -> None:
    for number in range(first, first + trajectories):
        route = finished(number)
        policy.begin(route)
        policy.end(route, finished=True)


def teach_and_die(run_dir: Path, trajectories: int, *, first: int = 0) -> Policy:
    """Nothing is copied at the end; the thread has written what it was given."""
    policy = restored(run_dir)
    with Memory(run_dir) as memory:
        teach(Remembering(policy, memory), trajectories, first=first)
    return policy


def whole_records(log: bytes) -> int:
    """How many can be read before the first that cannot."""
    count = 0
    with suppress(ValueError):
        for _ in decode(log):
            count += 1
    return count


@pytest.fixture
def taught(tmp_path: Path) -> bytes:
    """What was learned; its log is in the directory, and no copy."""
    return teach_and_die(tmp_path, 20).dump()


def test_a_killed_scheduler_has_learned_all_that_was_written(tmp_path: Path, taught: bytes) -> None:
    assert not (tmp_path / FILE).exists()
    assert restored(tmp_path).dump() == taught != fresh().dump()


def test_kill_after_kill_nothing_is_learned_twice_or_lost(tmp_path: Path) -> None:
    whole = fresh()
    teach(whole, 3 * COPIED_AFTER_MIN)
    for life in range(3):
        teach_and_die(tmp_path, COPIED_AFTER_MIN, first=life * COPIED_AFTER_MIN)
    dumped = restored(tmp_path).dump()
    assert len(dumped) == len(whole.dump())
    assert (tmp_path / FILE).exists()


def test_an_orderly_end_leaves_a_copy_and_no_log(tmp_path: Path) -> None:
    with remembered(LIBRA, tmp_path) as policy:
        teach(policy)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert restored(tmp_path).dump() == policy.dump()


def test_a_kill_after_an_orderly_end_loses_neither_life(tmp_path: Path) -> None:
    with remembered(LIBRA, tmp_path) as policy:
        teach(policy)
    policy = teach_and_die(tmp_path, 5, first=20)
    assert len(restored(tmp_path).dump()) == len(policy.dump())


def test_a_copy_contains_what_was_said_before_it_and_the_log_what_came_after(
    tmp_path: Path,
) -> None:
    policy = teach_and_die(tmp_path, COPIED_AFTER_MIN + 5)
    ((_, path),) = logs_of(tmp_path)
    assert len(list(decode(path.read_bytes()))) == 5
    assert len(restored(tmp_path).dump()) == len(policy.dump())


def test_logs_that_a_copy_contains_are_not_learned_again(tmp_path: Path, taught: bytes) -> None:
    """A kill between the new copy and the removal of its logs leaves both."""
    ((_, path),) = logs_of(tmp_path)
    records = path.read_bytes()
    with Memory(tmp_path) as memory:
        memory.copy(taught)
    path.write_bytes(records)
    assert restored(tmp_path).dump() == taught


def test_a_first_start_has_nothing_to_restore(tmp_path: Path) -> None:
    assert restored(tmp_path).dump() == fresh().dump()


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_copy_is_a_fresh_start(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE).write_bytes(damage)
    assert restored(tmp_path).dump() == fresh().dump()


def test_a_torn_copy_is_a_fresh_start(tmp_path: Path) -> None:
    with remembered(LIBRA, tmp_path) as policy:
        teach(policy)
    whole = (tmp_path / FILE).read_bytes()
    for length in range(0, len(whole), len(whole) // 20):
        (tmp_path / FILE).write_bytes(whole[:length])
        assert restored(tmp_path).dump() == fresh().dump()


def test_a_torn_record_ends_a_log_and_spoils_none_before_it() -> None:
    records = [encode(finished(number)) for number in range(3)]
    whole = b"".join(records)
    for length in range(len(whole)):
        complete = sum(len(b"".join(records[:n])) <= length for n in (1, 2, 3))
        assert whole_records(whole[:length]) == complete


@pytest.mark.parametrize("at", [0, 4, 13, 40])
def test_a_damaged_record_is_not_believed(at: int) -> None:
    record = bytearray(encode(finished(1)))
    record[at] ^= 0x55
    assert whole_records(encode(finished(0)) + bytes(record)) == 1


def test_a_damaged_log_is_said_and_learned_as_far_as_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "learned-000001.log").write_bytes(encode(finished(0)) + b"garbage")
    with capture_logs() as logged:
        restored(tmp_path)
    assert [line["event"] for line in logged] == ["learning.ignored", "learning.restored"]
    assert "learned-000001.log" in logged[0]["reason"]


@pytest.mark.parametrize(
    "fields",
    [
        5,
        [1] * 10,
        ["a", "b", "c", 1, 2, 3, [["search", "unheard of", "small", 1, 0.1]], [1], [1], []],
        ["a", "b", "c", 1, 2, 3, [["search", "ok", "small", 1, 0.1]], [], [], []],
    ],
)
def test_a_record_of_another_version_is_said_and_stops_nothing(
    tmp_path: Path, fields: object
) -> None:
    lesson = msgpack.packb(fields)
    record = HEAD.pack(len(lesson), xxh3_64_intdigest(lesson)) + lesson
    (tmp_path / "learned-000001.log").write_bytes(encode(finished(0)) + record)
    with capture_logs() as logged:
        restored(tmp_path)
    assert [line["event"] for line in logged] == ["learning.ignored", "learning.restored"]
    assert logged[1]["lessons"] == 1


def test_a_record_is_small_and_says_all_that_is_learned() -> None:
    route = finished(7)
    fresh().begin(route)
    (again,) = decode(encode(route))
    assert (again.outcomes, again.action_tokens) == (route.outcomes, route.action_tokens)
    assert (again.task_id, again.context_tokens) == (route.task_id, route.context_tokens)
    assert list(again.siblings_at) == list(route.siblings_at)
    assert len(encode(route)) < 200


def test_the_memory_of_another_policy_is_a_fresh_start(tmp_path: Path) -> None:
    with remembered(LIBRA, tmp_path) as policy:
        teach(policy)
    assert restore(lambda: policy_of(CMLFQ), tmp_path).dump() == policy_of(CMLFQ).dump()


def test_the_published_tree_is_kept_by_the_same_log(tmp_path: Path) -> None:
    tree = policy_of(CMLFQ)
    with Memory(tmp_path) as memory:
        teach(Remembering(tree, memory))
    assert restore(lambda: policy_of(CMLFQ), tmp_path).dump() == tree.dump()


def test_a_policy_that_learns_nothing_keeps_nothing(tmp_path: Path) -> None:
    config = sim_config(scheduler=SchedulerConfig(placement="round_robin"))
    with remembered(config, tmp_path) as policy:
        teach(policy)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_stops_nothing_and_is_said_once(tmp_path: Path) -> None:
    with capture_logs() as logged, Memory(tmp_path / "gone") as memory:
        policy = Remembering(fresh(), memory)
        teach(policy)
        policy.keep()
    assert [line["event"] for line in logged] == ["learning.unsaved"]
    assert len(policy.dump()) > len(fresh().dump())


@contextmanager
def files_of(bytes_max: int) -> Generator[None]:
    """No file may grow larger, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_record_that_fits_in_part_is_said_and_nothing_is_written_behind_it(
    tmp_path: Path,
) -> None:
    policy = fresh()
    with capture_logs() as logged, files_of(550), Memory(tmp_path) as memory:
        teach(Remembering(policy, memory), 10)
    assert [line["event"] for line in logged] == ["learning.unsaved"]


def test_a_draft_that_does_not_fit_leaves_the_space_to_the_ledger(tmp_path: Path) -> None:
    with files_of(550), Memory(tmp_path) as memory:
        memory.copy(b"x" * 10_000)
    assert list(tmp_path.iterdir()) == []


def test_whoever_teaches_never_waits_for_the_disk(tmp_path: Path) -> None:
    memory = Memory(tmp_path, pending_max=2)
    os.mkfifo(tmp_path / "learned-000001.log")  # Opening it waits until somebody reads.
    for _ in range(10):
        memory.note(b"record")
    assert memory.lost >= 7
    (tmp_path / "learned-000001.log").open("rb").close()
    memory.close()
