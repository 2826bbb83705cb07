"""What a run came to, from its ledger and metrics; the content of `summary.json`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

from services.scheduler.store import Store


def summarise(ledger_path: Path, metrics_path: Path) -> dict[str, Any]:
    """Summarise a run that has ended, or as far as it is.

    `trajectories` adds up: `admitted` = `trained` + `excluded` + `dropped` + `in_flight`, and
    `adds_up` says so. `excluded` are failures inside groups that were trained without them.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    if not ledger_path.exists():  # The run ended before it began.
        return {"steps": 0, "trajectories": {"admitted": 0, "adds_up": True}}
    store = Store(ledger_path, read_only=True)
    try:
        summary = _from_ledger(store)
    finally:
        store.close()
    return summary | _from_metrics(surviving_rows(metrics_path))


def surviving_rows(metrics_path: Path) -> list[dict[str, float]]:
    """The last row of each step, in order: a resume repeats the steps that it forgot."""
    rows: dict[float, dict[str, float]] = {}
    if not metrics_path.exists():
        return []
    for line in metrics_path.read_text(encoding="utf-8").split("\n"):
        try:
            row = cast("dict[str, float]", json.loads(line))
        except ValueError:  # Blank, or torn by a kill; the ledger restores it at the next start.
            continue
        while rows and next(reversed(rows)) >= row["step"]:
            rows.popitem()
        rows[row["step"]] = row
    return list(rows.values())


def _from_ledger(store: Store) -> dict[str, Any]:
    groups = store.tally("SELECT state, COUNT(*) FROM groups GROUP BY state")
    lineages = store.count("SELECT 1 + CAST(value AS INT) FROM meta WHERE key = 'lineage'")
    dropped = store.tally("SELECT reason, COUNT(*) FROM groups WHERE state = 'dropped' GROUP BY 1")
    return {
        "steps": store.count("SELECT MAX(step) FROM steps WHERE skipped = '' AND forgotten = 0"),
        "steps_skipped": store.tally(
            "SELECT skipped, COUNT(*) FROM steps WHERE skipped <> '' GROUP BY 1"
        ),
        "lineages": lineages,
        "versions_published": lineages
        + store.count("SELECT COUNT(*) FROM steps WHERE skipped = ''"),
        "trajectories": _trajectories(store),
        "groups": groups | {"dropped_by_reason": dropped},
        "tasks": store.tally("SELECT state, COUNT(*) FROM tasks GROUP BY state"),
        "tokens": {
            "action": store.count("SELECT SUM(action_tokens) FROM trajectories"),
            "observation": store.count("SELECT SUM(observation_tokens) FROM trajectories"),
            "trained": store.count(
                "SELECT SUM(t.action_tokens) FROM trajectories t JOIN groups g USING (group_id) "
                "WHERE g.state = 'trained' AND t.state = 'finished'"
            ),
        },
        "tool_calls": store.tally(
            "SELECT tool_status, COUNT(*) FROM turns WHERE tool_status IS NOT NULL GROUP BY 1"
        ),
    }


def _trajectories(store: Store) -> dict[str, Any]:
    """Each trajectory in exactly one place, by what became of its group and of itself."""
    trained, excluded, dropped, in_flight = 0, Counter[str](), Counter[str](), Counter[str]()
    admitted = 0
    for group_state, reason, state, failure, count in store.rows(
        "SELECT g.state, g.reason, t.state, COALESCE(t.failure, ''), COUNT(*) "
        "FROM trajectories t JOIN groups g USING (group_id) GROUP BY 1, 2, 3, 4"
    ):
        admitted += count
        if group_state == "dropped":
            dropped[reason] += count
        elif group_state != "trained":
            in_flight[state] += count
        elif state == "finished":
            trained += count
        else:
            excluded[failure] += count
    total = trained + excluded.total() + dropped.total() + in_flight.total()
    return {
        "admitted": admitted,
        "trained": trained,
        "excluded": dict(excluded),
        "dropped": dict(dropped),
        "in_flight": in_flight.total(),
        "in_flight_by_state": dict(in_flight),
        "adds_up": total == store.count("SELECT COUNT(*) FROM trajectories") == admitted,
    }


def _from_metrics(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Means over the first and last tenth of the steps, at least one step each."""
    if not rows:
        return {"reward_first": None, "reward_last": None}
    tenth = max(1, len(rows) // 10)
    return {
        "reward_first": _mean(rows[:tenth], "reward/mean"),
        "reward_last": _mean(rows[-tenth:], "reward/mean"),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in rows),
        "tokens_per_s": _mean(rows, "throughput/tokens_per_s"),
    }


def _mean(rows: list[dict[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None
