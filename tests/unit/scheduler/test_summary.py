"""The summary of a run adds up, whatever has happened in it."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.store import Store
from services.scheduler.summary import _from_ledger, _from_metrics, summarise, surviving_rows
from tests.support.scheduling import Desk, with_rules


def rewards(values: list[float]) -> list[dict[str, float]]:
    return [{"step": n, "reward/mean": value} for n, value in enumerate(values, start=1)]


@given(st.integers(0, 10_000), st.integers(0, 25))
@settings(max_examples=20)
def test_every_trajectory_is_in_exactly_one_place(seed: int, rounds: int) -> None:
    desk = Desk(with_rules(group_size=3), tasks=12)
    pick = random.Random(seed)
    desk.start()
    for _ in range(rounds):
        desk.round(pick, failing=0.3)
        if pick.random() < 0.2:
            desk.kill("w0")
            desk.publish()
    summary = _from_ledger(desk.ledger._store)
    found = summary["trajectories"]
    parts = found["trained"] + sum(found["excluded"].values()) + sum(found["dropped"].values())
    assert found["adds_up"]
    assert found["admitted"] == parts + found["in_flight"]
    assert summary["steps"] == desk.book.step
    assert summary["tokens"]["trained"] <= summary["tokens"]["action"]
    desk.close()


def test_the_first_and_last_tenth_are_compared() -> None:
    summary = _from_metrics(rewards([0.0, 0.2, *([0.5] * 16), 0.8, 1.0]))
    assert summary["reward_first"] == pytest.approx(0.1)
    assert summary["reward_last"] == pytest.approx(0.9)


def test_a_run_of_one_step_and_of_none_have_a_summary() -> None:
    assert _from_metrics(rewards([0.25]))["reward_last"] == 0.25
    assert _from_metrics([]) == {"reward_first": None, "reward_last": None}


def test_a_step_trained_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1}', '{"step": 2, "a": 0}', '{"step": 3}', '{"step": 2, "a": 1}', '{"st']
    path.write_text("\n".join(lines))
    assert surviving_rows(path) == [{"step": 1}, {"step": 2, "a": 1}]
    assert surviving_rows(tmp_path / "none.jsonl") == []


def test_a_run_that_has_not_begun_has_done_nothing(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "ledger.sqlite", tmp_path / "metrics.jsonl")
    assert summary["steps"] == 0
    assert summary["trajectories"] == {"admitted": 0, "adds_up": True}


def test_a_ledger_without_a_lineage_has_done_nothing(tmp_path: Path) -> None:
    Store(tmp_path / "ledger.sqlite").close()
    summary = summarise(tmp_path / "ledger.sqlite", tmp_path / "metrics.jsonl")
    assert (summary["steps"], summary["lineages"], summary["versions_published"]) == (0, 0, 0)
