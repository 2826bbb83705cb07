"""The life of one trajectory, read from the ledger of a run that goes on or has ended."""

import json
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from common.errors import ConfigError
from services.scheduler.decisions import unpack_options
from services.scheduler.records import DecisionKind, DecisionRow, TrajectoryRow, TrajectoryState
from services.scheduler.store import Store

SHOWN_MAX = 10
"""Names in an error; more help nobody."""
SIMILARITY_MIN = 0.5


@dataclass(frozen=True, slots=True)
class Weighed:
    """A worker that might have got the trajectory."""

    worker: str
    cost_s: float
    move_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """How the trajectory came to its new worker."""

    path: str
    """`kv` or `recompute`."""
    tokens: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """One decision, with what came of it."""

    at_s: float
    """Seconds since the trajectory's first decision."""
    kind: str
    turn: int
    lease: int
    source: str
    target: str
    reason: str
    context_tokens: int
    mean: float | None
    p50: float | None
    p90: float | None
    actual: int | None
    """Tokens that it still sampled, so far where it has not ended."""
    weighed: tuple[Weighed, ...]
    arrival: Arrival | None
    """Of a placement or move, once a turn was made there."""


@dataclass(frozen=True, slots=True)
class Story:
    """Everything that `libra why` tells."""

    trajectory_id: str
    group_id: str
    task_id: str
    group_state: str
    state: str
    turns: int
    prompt_tokens: int
    action_tokens: int
    observation_tokens: int
    losses: int
    began_at: float
    """Wall clock, in seconds since 1970; 0 when nothing was decided yet."""
    chapters: tuple[Chapter, ...]
    stop_reason: str | None
    reward: float | None
    failure: str | None
    detail: str
    worker: str
    """That holds it, or had it last."""
    since: float | None
    """Wall clock of the last thing that happened to it; None before the first."""

    @property
    def waits_for(self) -> str:
        """What it waits for now, in words; empty when it has ended."""
        if self.state == TrajectoryState.WAITING:
            last = f", last on {self.worker}" if self.worker else ""
            return f"for a worker that takes it{last}"
        if self.state != TrajectoryState.RUNNING:
            return ""
        last = self.chapters[-1].kind if self.chapters else ""
        if last == DecisionKind.MOVED:
            return f"for {self.worker}, to which it moves, to finish turn {self.turns}"
        return f"for {self.worker} to finish turn {self.turns}"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"waits_for": self.waits_for}


class Names:
    """Short names of workers: a restarted one is a new worker of the same name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._count: dict[str, int] = {}

    def of(self, peer: str) -> str:
        """`short-0`, or `short-0#2` for the second process of that name in this story."""
        if not peer:
            return ""
        if peer not in self._names:
            name = peer.split("/")[2] if peer.count("/") == 3 else peer
            number = self._count[name] = self._count.get(name, 0) + 1
            self._names[peer] = name if number == 1 else f"{name}#{number}"
        return self._names[peer]


def find(store: Store, text: str) -> TrajectoryRow | list[TrajectoryRow]:
    """The trajectory of that id or unique prefix, or all those of the group of that id.

    A task's id names its group where it has one.

    Raises:
        ConfigError: there is none, or there are several.
    """
    exact = store.select(TrajectoryRow, "WHERE trajectory_id = ?", (text,))
    if exact:
        return exact[0]
    group = store.select(
        TrajectoryRow, "WHERE group_id = ? ORDER BY number", (_group_of(store, text),)
    )
    if group:
        return group
    begins = store.select(
        TrajectoryRow,
        "WHERE substr(trajectory_id, 1, ?) = ? ORDER BY trajectory_id LIMIT ?",
        (len(text), text, SHOWN_MAX + 1),
    )
    if len(begins) == 1:
        return begins[0]
    if begins:
        named = ", ".join(row.trajectory_id for row in begins[:SHOWN_MAX])
        more = ", …" if len(begins) > SHOWN_MAX else ""
        raise ConfigError(f"{text!r} begins several trajectories: {named}{more}; give more of it")
    raise ConfigError(_unknown(store, text))


def _group_of(store: Store, text: str) -> str:
    """The only group of the task of that id, or the text itself."""
    rows = store.rows("SELECT group_id FROM groups WHERE task_id = ? ORDER BY admission", (text,))
    groups = [group_id for (group_id,) in rows]
    if len(groups) > 1:
        named = ", ".join(groups[-SHOWN_MAX:])
        raise ConfigError(f"task {text!r} has {len(groups)} groups; give one of {named}")
    return groups[0] if groups else text


def _unknown(store: Store, text: str) -> str:
    ids = [found for (found,) in store.rows("SELECT trajectory_id FROM trajectories")]
    if not ids:
        return f"no trajectory {text!r}: this run has not begun any yet"
    groups = list(dict.fromkeys(found.rpartition(".")[0] for found in ids))
    close = get_close_matches(text, [*ids, *groups], n=3, cutoff=SIMILARITY_MIN)
    hint = f"did you mean {' or '.join(close)}?" if close else f"they are named like {ids[-1]!r}"
    return f"no trajectory or group {text!r} in this run; {hint}"


def tell(store: Store, row: TrajectoryRow) -> Story:
    """The story of one trajectory."""
    decisions = store.decisions(row.trajectory_id)
    arrivals = _arrivals(store, row.trajectory_id)
    record = store.group(row.group_id)
    assert record is not None
    names = Names()
    began_at = decisions[0].at if decisions else 0.0
    return Story(
        trajectory_id=row.trajectory_id,
        group_id=row.group_id,
        task_id=record.group.task_id,
        group_state=f"{record.group.state} ({record.group.reason})"
        if record.group.reason
        else record.group.state,
        state=row.state,
        turns=row.turns,
        prompt_tokens=row.prompt_tokens,
        action_tokens=row.action_tokens,
        observation_tokens=row.observation_tokens,
        losses=row.losses,
        began_at=began_at,
        chapters=tuple(
            _chapter(decision, row, arrivals, began_at, names) for decision in decisions
        ),
        stop_reason=row.stop_reason,
        reward=row.reward,
        failure=row.failure,
        detail=row.detail,
        worker=names.of(row.worker),
        since=decisions[-1].at if decisions else None,
    )


def _arrivals(store: Store, trajectory_id: str) -> dict[int, Arrival]:
    """By the number of the placement."""
    found = store.rows(
        "SELECT lease, move FROM turns WHERE trajectory_id = ? AND move <> ''", (trajectory_id,)
    )
    return {lease: Arrival(**json.loads(move)) for lease, move in found}


def _chapter(
    decision: DecisionRow,
    row: TrajectoryRow,
    arrivals: dict[int, Arrival],
    began_at: float,
    names: Names,
) -> Chapter:
    came = decision.kind in (DecisionKind.PLACED, DecisionKind.MOVED)
    return Chapter(
        at_s=round(decision.at - began_at, 3),
        kind=decision.kind,
        turn=decision.turn,
        lease=decision.lease,
        source=names.of(decision.source),
        target=names.of(decision.target),
        reason=decision.reason,
        context_tokens=decision.context_tokens,
        mean=decision.mean,
        p50=decision.p50,
        p90=decision.p90,
        actual=None if decision.p50 is None else row.action_tokens - decision.action_tokens,
        weighed=tuple(
            Weighed(names.of(option.peer), option.cost_s, option.move_s)
            for option in unpack_options(decision.options)
        ),
        arrival=arrivals.get(decision.lease) if came else None,
    )
