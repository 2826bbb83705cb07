"""The rows of the ledger: frozen values that the book makes and the ledger keeps.

A row is always written whole, by key, so writing it twice changes nothing. Finished work leaves
memory; its rows stay.
"""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, NamedTuple

from common.weights import NO_VERSION


class TaskState(StrEnum):
    """What became of a task in one epoch."""

    ADMITTED = "admitted"
    """A group of it is on its way."""
    RETRY = "retry"
    """Its group was dropped through no fault of the task; another one will be admitted."""
    TRAINED = "trained"
    FILTERED = "filtered"
    """Not trained in this epoch, for the reason given."""
    PARKED = "parked"
    """Given up after `attempts_max` groups."""


class GroupState(StrEnum):
    """Where a group stands. The first three are alive and lie in memory."""

    RUNNING = "running"
    READY = "ready"
    """All trajectories ended and enough are usable."""
    TAKEN = "taken"
    """Offered to the trainer for one step."""
    TRAINED = "trained"
    DROPPED = "dropped"


ALIVE = (GroupState.RUNNING, GroupState.READY, GroupState.TAKEN)


class TrajectoryState(StrEnum):
    """Where a trajectory stands."""

    WAITING = "waiting"
    """On no worker."""
    RUNNING = "running"
    FINISHED = "finished"
    """It has a reward."""
    FAILED = "failed"
    """It has a typed failure."""
    DROPPED = "dropped"
    """Its group was dropped before it ended."""


ENDED = (TrajectoryState.FINISHED, TrajectoryState.FAILED, TrajectoryState.DROPPED)


@dataclass(frozen=True, slots=True)
class MetaRow:
    """One named value of the run as a whole."""

    TABLE: ClassVar[str] = "meta"
    KEY: ClassVar[tuple[str, ...]] = ("key",)

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task in one epoch; written when it is first admitted."""

    TABLE: ClassVar[str] = "tasks"
    KEY: ClassVar[tuple[str, ...]] = ("epoch", "task_id")

    epoch: int
    task_id: str
    state: str
    attempts: int
    """Groups that were admitted for it in this epoch."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group: one attempt at one task in one epoch."""

    TABLE: ClassVar[str] = "groups"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: str
    task_id: str
    epoch: int
    attempt: int
    """0-based."""
    admission: int
    """Counts all groups ever admitted; the order of work."""
    state: str
    reason: str = ""
    """Why it was dropped."""
    lineage: int = -1
    step: int = 0
    """The step that took or trained it."""


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory without its tokens."""

    TABLE: ClassVar[str] = "trajectories"
    KEY: ClassVar[tuple[str, ...]] = ("trajectory_id",)

    trajectory_id: str
    group_id: str
    number: int
    """0-based place among its siblings."""
    state: str
    lease: int = 0
    """Number of its placements so far; each one voids the earlier ones."""
    losses: int = 0
    """Workers that lost it."""
    worker: str = ""
    """Identity of the worker that holds, or held it last."""
    placed_version: int = NO_VERSION
    """Policy version of that worker at the placement: no token is older."""
    session_id: str = ""
    tool_server: str = ""
    turns: int = 0
    prompt_tokens: int = 0
    action_tokens: int = 0
    observation_tokens: int = 0
    oldest_version: int = NO_VERSION
    newest_version: int = NO_VERSION
    tools: str = "{}"
    """Tool calls by status, as JSON."""
    stop_reason: str | None = None
    reward: float | None = None
    scores: str = "{}"
    failure: str | None = None
    detail: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ENDED

    @property
    def usable(self) -> bool:
        """Whether it may be trained."""
        return self.state == TrajectoryState.FINISHED

    @property
    def context_tokens(self) -> int:
        """Tokens that its next turn starts from."""
        return self.prompt_tokens + self.action_tokens + self.observation_tokens

    def tool_counts(self) -> dict[str, int]:
        """Tool calls by status."""
        return json.loads(self.tools)


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn with its packed tokens."""

    TABLE: ClassVar[str] = "turns"
    KEY: ClassVar[tuple[str, ...]] = ("trajectory_id", "turn")

    trajectory_id: str
    turn: int
    prompt_tokens: bytes
    action_tokens: bytes
    action_logprobs: bytes
    action_versions: bytes
    observation_tokens: bytes
    tool: str
    tool_status: str | None
    tool_latency_s: float
    decode_s: float
    queue_s: float
    lease: int = 0
    """Number of the placement under which it was made."""
    move: str = ""
    """How the trajectory had arrived where this turn was made, as JSON of `MoveReport`; empty when
    it was there already."""


class DecisionKind(StrEnum):
    """What the scheduler decided of a trajectory, or what befell it."""

    PLACED = "placed"
    """It waited, and was given to a worker."""
    STAYED = "stayed"
    """A tool returned, and it went on where it was."""
    MOVED = "moved"
    """A tool returned, and it was offered to another worker."""
    MOVE_REFUSED = "move_refused"
    """The other worker did not take it, so it went back to where it was."""
    RETURNED = "returned"
    """Its worker did not take it or handed it back; it waits."""
    LOST = "lost"
    """Its worker lost it; it waits, or has failed for good."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One decision with what it was made of; written with the rows that it explains."""

    TABLE: ClassVar[str] = "decisions"
    KEY: ClassVar[tuple[str, ...]] = ("trajectory_id", "number")

    trajectory_id: str
    number: int
    """Counts the decisions of one trajectory, from 0."""
    at: float
    """Wall clock, in seconds since 1970."""
    kind: str
    turn: int
    """Turns journaled before it."""
    lease: int
    """Number of the placement from then on."""
    source: str = ""
    """Identity of the worker that had it, or had it last."""
    target: str = ""
    """Identity of the worker that has it from then on; empty when it waits or has ended."""
    reason: str = ""
    action_tokens: int = 0
    """Sampled in all before it: the rest is the actual residual."""
    context_tokens: int = 0
    mean: float | None = None
    """Tokens that were expected still to be sampled; null when nothing was predicted."""
    p50: float | None = None
    p90: float | None = None
    options: str = ""
    """Workers that were weighed, best first, as JSON: identity, cost and part of the move in it,
    in seconds. Empty when none were."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One attempt at an optimizer step, and what it consumed."""

    TABLE: ClassVar[str] = "steps"
    KEY: ClassVar[tuple[str, ...]] = ("lineage", "step", "attempt")

    lineage: int
    step: int
    attempt: int
    skipped: str
    """Why no optimizer step was taken, or empty."""
    group_ids: str
    """JSON list."""
    metrics: str
    """The row of `metrics.jsonl` as JSON; empty when the step was skipped."""
    forgotten: int = 0
    """1 when a resume from an earlier step left it behind."""


Row = MetaRow | TaskRow | GroupRow | TrajectoryRow | TurnRow | DecisionRow | StepRow
ROW_TYPES: tuple[type[Row], ...] = (
    MetaRow,
    TaskRow,
    GroupRow,
    TrajectoryRow,
    TurnRow,
    DecisionRow,
    StepRow,
)


class TurnSizes(NamedTuple):
    """A journaled turn without its tokens."""

    trajectory_id: str
    prompt_tokens: int
    action_tokens: int
    observation_tokens: int
    tool: str
    tool_status: str | None
    tool_latency_s: float
    lease: int


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group with its trajectories, in order."""

    group: GroupRow
    trajectories: list[TrajectoryRow]


@dataclass(frozen=True, slots=True)
class Past:
    """What a trajectory that goes on has behind it."""

    turns: list[TurnSizes] = field(default_factory=list[TurnSizes])
    decisions: int = 0
    moves: int = 0
    """Those for balance."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the book is built from: everything alive, and counts of what is not."""

    meta: dict[str, str] = field(default_factory=dict[str, str])
    tasks_seen: int = 0
    """Tasks admitted at least once, over all epochs."""
    retries: list[TaskRow] = field(default_factory=list[TaskRow])
    alive: list[GroupRecord] = field(default_factory=list[GroupRecord])
    past: dict[str, Past] = field(default_factory=dict[str, Past])
    """Of trajectories that go on, by id; those without a turn or decision are left out."""
    groups_trained: int = 0
    groups_dropped: int = 0
    trajectories_ended: dict[str, int] = field(default_factory=dict[str, int])
    """Trajectories of groups that are not alive, by state."""
    admissions: int = 0
    last_step: StepRow | None = None
    """The newest attempt of the surviving history."""
    last_metrics: str = ""
    """The newest row of `metrics.jsonl`."""
