"""What the book holds in memory, and what its decisions look like."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from common.weights import NO_VERSION, step_of
from services.scheduler.records import (
    GroupRecord,
    GroupRow,
    GroupState,
    MetaRow,
    Row,
    TrajectoryRow,
    TrajectoryState,
)
from services.scheduler.routing.route import Route

LineKey = tuple[bool, float, int]
"""Not taken yet, step of the oldest weights, number of admission: the first is trained first."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """A trajectory of a living group. What must survive is in the row."""

    row: TrajectoryRow
    route: Route
    lease_until: float = inf
    since: float = 0.0
    """When it was admitted, placed, or finished its last turn."""
    turn_lease: int = 0
    """Placement under which its newest turn was made: that worker's context is the journal."""
    moving_from: str = ""
    """Worker that waits for the end of a move, which its present worker has not accepted yet."""
    moving_for: str = ""
    """Why it moves."""
    handed_back: bool = False
    """It waits because its worker was told to stop: that it is still reported means nothing."""
    watched: bool = False
    """Whether its lease is being watched."""
    came_from: str = ""
    """Bucket of the worker that it came from to its present one."""
    cached_tokens: int = 0
    """Of its context, as far as its present worker has computed it."""
    decisions: int = 0
    """Decisions recorded so far."""
    predicted: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Tokens sampled, and the median of what was expected to come, at each decision."""

    @property
    def running(self) -> bool:
        return self.row.state == TrajectoryState.RUNNING

    @property
    def oldest_step(self) -> float:
        """Step of the oldest weights that made, or may make, a token of it; inf if unknown."""
        if self.row.oldest_version != NO_VERSION:
            return step_of(self.row.oldest_version)
        if self.running and self.row.placed_version != NO_VERSION:
            return step_of(self.row.placed_version)
        return inf


@dataclass(slots=True, eq=False)
class Group:
    """A living group and its trajectories, in order."""

    row: GroupRow
    trajectories: list[Trajectory]
    key: LineKey = (True, inf, 0)
    """Its place in the line; kept by `Line`."""
    waiting: int = 0
    """Members that wait for a worker; kept by `Groups`."""

    @classmethod
    def of(cls, record: GroupRecord, now: float) -> "Group":
        """Bring a recorded group to life."""
        task_id = record.group.task_id
        return cls(
            record.group,
            [
                Trajectory(row, Route(row.trajectory_id, row.group_id, task_id), since=now)
                for row in record.trajectories
            ],
        )

    @property
    def usable(self) -> Iterator[TrajectoryRow]:
        """Trajectories that may be trained."""
        return (t.row for t in self.trajectories if t.row.usable)

    @property
    def ended(self) -> bool:
        return all(t.row.ended for t in self.trajectories)

    @property
    def ready(self) -> bool:
        return self.row.state == GroupState.READY

    @property
    def taken(self) -> bool:
        return self.row.state == GroupState.TAKEN

    @property
    def oldest_step(self) -> float:
        """Step of the oldest weights in it; inf while it has no token and no worker."""
        left = (t for t in self.trajectories if t.row.usable or not t.row.ended)
        return min((t.oldest_step for t in left), default=inf)

    @property
    def unbegun(self) -> bool:
        """Whether a member must still begin; with which weights, the group's rank decides."""
        return any(
            t.row.state == TrajectoryState.WAITING and t.oldest_step == inf
            for t in self.trajectories
        )


@dataclass(frozen=True, slots=True)
class Lineage:
    """The history that the trainer is in."""

    number: int = -1
    """-1 until a trainer has begun one."""
    begun_at: int = 0
    """The step whose state the trainer loaded."""
    trainer: str = ""
    """Identity of the trainer that began it."""

    @classmethod
    def of(cls, meta: Mapping[str, str]) -> "Lineage":
        """Read it from the ledger's named values."""
        if "lineage" not in meta:
            return cls()
        return cls(int(meta["lineage"]), int(meta["lineage_begun_at"]), meta["lineage_trainer"])

    def rows(self) -> list[MetaRow]:
        """What the ledger keeps of it."""
        return [
            MetaRow("lineage", str(self.number)),
            MetaRow("lineage_begun_at", str(self.begun_at)),
            MetaRow("lineage_trainer", self.trainer),
        ]


@dataclass(frozen=True, slots=True)
class Assign:
    """Order: send the trajectory to the worker, once the rows of the same outcome are durable."""

    peer: str
    group: GroupRow
    trajectory: TrajectoryRow
    kv_source: str = ""
    """Worker that held it last and may still have its KV cache. In a move it waits for the end."""


class TurnReply(NamedTuple):
    """What the worker that has reported a turn is told."""

    go_on: bool
    lease: int = 0
    """Under which it goes on."""
    move: Assign | None = None
    """First offer it to this worker, once the rows are durable, and give the answer of
    `move_accepted` or `move_refused` instead of this one. None: this is the answer."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an operator should be told."""

    event: str
    fields: dict[str, object]
    warning: bool = True


@dataclass(slots=True)
class Outcome:
    """What one event leads to."""

    rows: list[Row] = field(default_factory=list[Row])
    orders: list[Assign] = field(default_factory=list[Assign])
    notices: list[Notice] = field(default_factory=list[Notice])
    line: str = ""
    """For `metrics.jsonl`."""

    def add(self, later: "Outcome") -> None:
        """Append what a further event leads to."""
        assert not later.line
        self.rows += later.rows
        self.orders += later.orders
        self.notices += later.notices

    def warn(self, event: str, **fields: object) -> None:
        """Add a warning."""
        self.notices.append(Notice(event, fields))

    def tell(self, event: str, **fields: object) -> None:
        """Add a notice."""
        self.notices.append(Notice(event, fields, warning=False))
