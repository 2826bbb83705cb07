"""What the scheduler receives: turns from workers, batches and steps from the trainer."""

from common.messages.base import Message, Request, Wire
from common.messages.coordinator import SlotStatus
from common.trajectory import FailureKind, StopReason, ToolStatus


class WorkerReported(Message):
    """The scheduler has noted the report."""

    drop: list[str]
    """Trajectories that the worker holds and the scheduler does not count as its own."""


class ReportWorker(Request[WorkerReported]):
    """A rollout worker's load, once a second; also renews the leases of what it holds."""

    bucket: str
    version: int
    """Policy version that the engine decodes with, or -1 before the first one."""
    kv_tokens_used: int
    kv_tokens_free: int
    slots: int
    """Trajectories that the worker is willing to hold at once."""
    holding: list[str]
    """Ids of the trajectories it works on."""
    decode_tokens: int
    """Tokens sampled since the process started."""
    running: int = 0
    """Requests in the engine's batch."""
    waiting: int = 0
    """Requests that wait for a place in it."""


class TrajectoryResult(Message):
    """How a trajectory ended: with a reward, or with a typed failure, never with both."""

    stop_reason: Wire[StopReason] | None
    reward: float | None
    scores: dict[str, float] = {}
    """Named parts of the reward, for the logs."""
    failure: Wire[FailureKind] | None = None
    detail: str = ""
    """What failed, in the words of whoever failed."""


class TurnRecorded(Message):
    """The turn is in the ledger, durably."""

    go_on: bool
    """False: stop working on this trajectory and free what it holds; it goes on elsewhere or
    was dropped."""
    lease: int = 0
    """Number under which the worker holds it from now on; higher than before when a move was
    tried and taken back. 0 when it does not go on here."""


class MoveReport(Message):
    """How a trajectory arrived at a worker in the middle of its life."""

    path: str
    """`kv` when its cache came along, `recompute` when it had to be computed again."""
    tokens: int
    """Context that moved."""
    seconds: float
    """Until the context was usable: the transfer, or the prefill."""
    reason: str
    """Why it was not `kv`, or empty."""


class TurnFinished(Request[TurnRecorded]):
    """One turn, journaled before the next begins. Sent by the rollout worker.

    Idempotent by (trajectory_id, turn). Refused with `STALE_FENCE` when the trajectory was
    placed again since, and with `NOT_FOUND` when it is no longer wanted.
    """

    trajectory_id: str
    lease: int
    """Number of the placement under which the turn was made."""
    turn: int
    """0-based. Turn 0 also carries the prompt."""
    prompt_tokens: bytes
    """Packed int32; empty unless `turn` is 0."""
    session_id: str
    """Tool session, kept across moves."""
    tool_server: str
    """Name of the tool server that holds the session."""
    action_tokens: bytes
    """Packed int32: what the policy sampled."""
    action_logprobs: bytes
    """Packed float32, of the sampled tokens under the sampling distribution."""
    action_versions: bytes
    """Packed int32: the policy version that sampled each token."""
    observation_tokens: bytes
    """Packed int32: what the environment appended; empty after the last turn."""
    tool: str
    """Tool that was called, or empty."""
    tool_status: Wire[ToolStatus] | None
    tool_latency_s: float
    decode_s: float
    queue_s: float
    result: TrajectoryResult | None
    """Set on the last turn only."""
    running: int = 0
    """Requests in the engine's batch while the turn was decoded."""
    kv_tokens_used: int = 0
    """KV tokens of all of them."""
    move: MoveReport | None = None
    """On the first turn after it came from another worker."""


class TurnData(Message):
    """One journaled turn, as the trainer gets it."""

    action_tokens: bytes
    action_logprobs: bytes
    action_versions: bytes
    observation_tokens: bytes
    tool_status: Wire[ToolStatus] | None


class TrajectoryData(Message):
    """One finished trajectory with its tokens."""

    trajectory_id: str
    prompt_tokens: bytes
    turns: list[TurnData]
    stop_reason: Wire[StopReason] | None
    reward: float | None
    """None when `failure` is set: the trajectory counts for nothing."""
    failure: Wire[FailureKind] | None


class GroupData(Message):
    """All trajectories of one group, usable and failed."""

    group_id: str
    task_id: str
    trajectories: list[TrajectoryData]


class FetchGroup(Request[GroupData]):
    """Read one group of an offered batch. Sent by the trainer. Changes nothing."""

    group_id: str


class BatchOffer(Message):
    """Complete groups for one step, or word of what is missing."""

    group_ids: list[str]
    """Empty when the batch is not complete yet; ask again."""
    waiting_for: str
    """What the step waits for, for people; empty when the batch is complete."""
    exhausted: bool
    """True when no further batch can ever be complete: all tasks are trained or dropped."""


class TakeBatch(Request[BatchOffer]):
    """Ask for the groups of one step; answered at the latest after a second.

    Idempotent by (lineage, step): the same step gets the same groups.
    """

    lineage: int
    step: int
    """The step that will be trained with it, 1-based."""


class StepRecorded(Message):
    """The step and what it consumed are in the ledger."""

    stop: bool
    """True when the run has reached its last step or cannot go on."""
    reason: str


class StepFinished(Request[StepRecorded]):
    """One optimizer step consumed these groups (or was skipped). Sent by the trainer.

    Idempotent by (lineage, step, attempt).
    """

    lineage: int
    step: int
    """The step that was attempted. A skipped step is attempted again with other groups."""
    attempt: int
    """Counts skipped attempts at this step, from 0."""
    skipped: str
    """Why no optimizer step was taken (`nonfinite`, `zero_variance`), or empty."""
    group_ids: list[str]
    metrics: dict[str, float]
    """Names as in `metrics.jsonl`, made by the trainer."""


class LineageBegun(Message):
    """Trained steps after `step` are forgotten and their groups ready again."""

    lineage: int
    """Number of the new lineage; versions of it order after all earlier ones."""


class BeginLineage(Request[LineageBegun]):
    """The trainer has loaded the state after `step` and goes on from there.

    Idempotent by the trainer's incarnation.
    """

    step: int
    """0 for a fresh start."""


class WorkerStatus(Message):
    """One rollout worker as the scheduler sees it."""

    name: str
    bucket: str
    version: int
    holding: int
    kv_tokens_used: int
    kv_tokens_free: int
    decode_tokens: int


class RunStatus(Message):
    """Where the run stands, for people."""

    step: int
    steps_max: int
    lineage: int
    version: int
    trajectories: dict[str, int]
    """Count by state: `waiting`, `running`, `finished`, `failed`, …"""
    groups: dict[str, int]
    """Count by state: `running`, `ready`, `taken`, `trained`, `dropped`."""
    workers: list[WorkerStatus]
    last_metrics: dict[str, float]
    """The newest row of `metrics.jsonl`."""
    waiting_for: str
    """What the next step waits for."""
    slots: list[SlotStatus] = []
    """The hybrid ones, as the coordinator saw them last."""


class GetRunStatus(Request[RunStatus]):
    """Read-only; for the live table and `libra status`."""
