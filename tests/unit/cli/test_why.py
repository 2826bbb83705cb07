"""`libra why`, on the ledger of a scripted run."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError, LedgerError
from common.messages.scheduler import MoveReport
from services.cli.why import find_run, why
from services.cli.why_story import Names, find, tell
from services.scheduler.records import TrajectoryRow
from services.scheduler.routing.baselines import LeastLoad
from services.scheduler.routing.fleet import Fleet, Terms
from services.scheduler.routing.policy import Decision, Option
from services.scheduler.routing.route import Residual, Route
from tests.support.scheduling import Desk, reward, with_rules

FIRST, SECOND = "t0.e0.a0.0", "t0.e0.a0.1"


class OnceOver(LeastLoad):
    """Moves each trajectory at its first tool return, and knows what it costs."""

    def returned(self, route: Route, fleet: Fleet, terms: Terms) -> Decision | None:
        other = next(w.peer for w in fleet.workers.values() if w.peer != route.worker)
        residual = Residual(5.0, 4.0, 9.0, 2.0)
        options = (Option(other, 1.5, 0.25), Option(route.worker, 2.5, 0.0))
        if route.turns == 1:
            return Decision(other, "cheaper", residual, options)
        return Decision(route.worker, "best", residual, options[::-1])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The first has ended after a move; the second lost its worker and waits."""
    desk = Desk(with_rules(group_size=2), tasks=1, make_policy=OnceOver)
    desk.start()
    source = next(w for w in desk.workers.values() if FIRST in w.held)
    target = next(w for w in desk.workers.values() if w is not source)
    desk.now = 1.0
    desk.turn(source.name, FIRST)
    held = target.held[FIRST]
    arrived = MoveReport(path="recompute", tokens=6, seconds=0.5, reason="source_gone")
    turn = held.finish(FIRST, 0).model_copy(update={"move": arrived})
    desk.now = 2.0
    assert desk.send_turn(target.peer, turn) is True
    held.turn = 2
    desk.now = 3.0
    desk.turn(target.name, FIRST, reward(1.0))
    desk.kill(next(w.name for w in desk.workers.values() if SECOND in w.held))
    yield save(desk, tmp_path / "runs" / "one")
    desk.close()


def save(desk: Desk, directory: Path) -> Path:
    directory.mkdir(parents=True)
    with sqlite3.connect(directory / "ledger.sqlite") as file:
        desk.ledger._store._connection.backup(file)
    file.close()
    return directory


def told(run: Path, trajectory: str, capsys: pytest.CaptureFixture[str]) -> str:
    why(trajectory, run, as_json=False)
    return capsys.readouterr().out


def told_json(run: Path, trajectory: str, capsys: pytest.CaptureFixture[str]):  # noqa: ANN201
    why(trajectory, run, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_each_decision_is_told_with_what_was_expected_and_what_came(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = told_json(run, FIRST, capsys)
    kinds = [chapter["kind"] for chapter in story["chapters"]]
    assert kinds == ["placed", "moved", "stayed", "ended"]
    placed, moved, stayed, _ = story["chapters"]
    assert placed["actual"] is None  # Nothing was predicted.
    assert [moved["at_s"], moved["p50"], moved["p90"], moved["actual"]] == [1.0, 4.0, 9.0, 4]
    assert stayed["actual"] == 2
    assert moved["weighed"][0] == {"worker": moved["target"], "cost_s": 1.5, "move_s": 0.25}
    assert moved["arrival"]["path"] == "recompute"
    assert (story["reward"], story["waits_for"]) == (1.0, "")


def test_the_table_names_path_and_cost_of_a_move_and_the_end(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(run, FIRST, capsys)
    flat = " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
    for words in ("recompute: 6 tokens in 0.50 s", "source_gone", "1.50 (0.25)", "4 (9)", " → "):
        assert words in flat
    assert "ended: answered, reward 1" in text
    assert "1 move, 0 losses" in text


def test_one_that_waits_says_since_when_and_for_whom(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(run, SECOND, capsys)
    assert "lost" in text
    assert "worker_gone" in text
    assert "; waits for a worker that takes it, last on w" in text
    (run / "summary.json").write_text("{}")
    assert "the run ended while it was waiting" in told(run, SECOND, capsys)


def test_a_groups_id_lists_its_trajectories(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(run, "t0.e0.a0", capsys)
    assert FIRST in text
    assert SECOND in text
    assert [story["turns"] for story in told_json(run, "t0.e0.a0", capsys)] == [3, 0]


def test_a_tasks_id_is_that_of_its_only_group(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(run, "t0", capsys) == told(run, "t0.e0.a0", capsys)
    assert told_json(run, "t0", capsys) == told_json(run, "t0.e0.a0", capsys)


def test_a_task_of_several_groups_names_them() -> None:
    desk = Desk(with_rules(group_size=2), tasks=1, epochs=2)
    desk.start()
    with pytest.raises(
        ConfigError, match=r"task 't0' has 2 groups; give one of t0\.e0\.a0, t0\.e1"
    ):
        find(desk.ledger._store, "t0")
    desk.close()


def rewrite(run: Path, *statements: str) -> None:
    with sqlite3.connect(run / "ledger.sqlite") as file:
        for statement in statements:
            file.execute(statement)
    file.close()


def test_ids_that_look_like_markup_are_told_as_they_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(
        run,
        "UPDATE groups SET task_id = '[/x]', group_id = '[red]' || group_id",
        "UPDATE trajectories SET trajectory_id = '[/]' || number, group_id = '[red]' || group_id",
    )
    assert "[/]0  task [/x], group [red]t0.e0.a0" in told(run, "[/]0", capsys)
    text = told(run, "[red]t0.e0.a0", capsys)
    assert "[red]t0.e0.a0  task [/x]" in text
    assert "[/]1" in text


def test_a_ledger_that_is_damaged_is_said_to_be(run: Path) -> None:
    rewrite(run, "DROP TABLE decisions")
    with pytest.raises(LedgerError, match="cannot be read: no such table"):
        why(FIRST, run, as_json=False)


def test_a_unique_beginning_is_enough_and_an_ambiguous_one_is_not(tmp_path: Path) -> None:
    desk = Desk(with_rules(group_size=2), tasks=12)
    desk.start()
    store = desk.ledger._store
    ids = sorted(desk.book.groups.trajectories)
    with pytest.raises(ConfigError, match="begins several"):
        find(store, ids[0][:-1])
    store.apply([TrajectoryRow("lonely.e0.a0.0", "lonely.e0.a0", 0, "waiting")])
    found = find(store, "lon")
    assert isinstance(found, TrajectoryRow)
    assert found.trajectory_id == "lonely.e0.a0.0"
    desk.close()


def test_an_unknown_id_is_refused_with_what_is_close(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*t0\.e0\.a0\.[01]"):
        why("t0.e1.a0.0", run, as_json=False)


def test_without_a_run_those_that_exist_are_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"there are .*one"):
        find_run(run.parent / "two")
    monkeypatch.chdir(run.parent.parent)
    assert find_run(None) == Path("runs/one")
    assert find_run(Path("one")) == Path("runs/one")
    monkeypatch.chdir(run)
    with pytest.raises(ConfigError, match="no run in runs"):
        find_run(None)


def test_a_running_one_waits_for_its_worker() -> None:
    desk = Desk(with_rules(group_size=2), tasks=1)
    desk.start()
    found = find(desk.ledger._store, FIRST)
    assert isinstance(found, TrajectoryRow)
    story = tell(desk.ledger._store, found)
    assert story.waits_for == f"for {story.worker} to finish turn 0"
    desk.close()


def test_a_restarted_worker_is_told_apart_from_the_one_before() -> None:
    names = Names()
    assert names.of("run/rollout/short-0/aa") == "short-0"
    assert names.of("run/rollout/short-0/bb") == "short-0#2"
    assert names.of("run/rollout/short-0/aa") == "short-0"
    assert names.of("") == ""
