"""A simulated rollout worker: the production worker's side of each message, around an engine model.

It holds trajectories under leases, runs their turns on the engine, calls their tools, reports each
turn and waits for the answer, takes over caches, and applies versions between two iterations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from common.errors import Refusal
from common.messages.scheduler import MoveReport, ReportWorker, TrajectoryResult, TurnFinished
from common.trajectory import StopReason, ToolStatus
from common.weights import NO_VERSION
from services.scheduler.state import Assign, TurnReply
from services.simulator.cluster import WorkerPlan
from services.simulator.costs import kv_transfer_s
from services.simulator.devices import ModelShape
from services.simulator.engine import EngineModel, Finished, Job
from services.simulator.network import Network
from services.simulator.scripts import Script
from services.simulator.timeline import Timeline

ITEM_BYTES = 4
"""Tokens, log-probabilities and versions travel as 4 bytes each."""
REPORT_S = 1.0
TOOL_SERVER = "tools"


@dataclass(slots=True, eq=False)
class Held:
    """A trajectory on this worker."""

    script: Script
    lease: int
    turn: int
    """The one that it does now, or does next."""
    move: MoveReport | None = None
    """How it came here, until its first turn here is reported."""
    done: Finished | None = None
    """Its turn, while the tool runs."""

    @property
    def context_tokens(self) -> int:
        """That its turn starts from."""
        return self.script.context_at[self.turn]


class Scheduler(Protocol):
    """What a worker says to the scheduler; called when the message arrives there."""

    node: int

    def turn_finished(self, worker: "SimWorker", turn: TurnFinished) -> None:
        """Answered by `answered`."""
        ...

    def worker_reported(self, worker: "SimWorker", report: ReportWorker) -> None:
        """Answered by `let_go` where there is something to let go."""
        ...

    def worker_gone(self, worker: "SimWorker") -> None:
        """Its process has ended."""
        ...


@dataclass(slots=True)
class Surroundings:
    """What all workers of a world share."""

    timeline: Timeline
    network: Network
    model: ModelShape
    scheduler: Scheduler
    workers: Mapping[str, "SimWorker"]
    """By peer."""


class SimWorker:
    """See the module."""

    def __init__(self, plan: WorkerPlan, engine: EngineModel, around: Surroundings) -> None:
        self.plan = plan
        self.engine = engine
        self.held: dict[str, Held] = {}
        self.version = NO_VERSION
        self.draining = False
        self.dead = False
        self._around = around
        self._timeline = around.timeline
        self._to_scheduler_s = around.network.latency_s(plan.node, around.scheduler.node)
        self._wake_at = inf
        self._wake_serial = 0
        self._swaps: list[tuple[float, int]] = []
        """When each version was applied."""

    # ── trajectories come and go ─────────────────────────────────────────────────────────────

    def assign(self, order: Assign, script: Script) -> Refusal | None:
        """Take a trajectory, or say why not."""
        row, source = order.trajectory, order.kv_source
        if self.draining:
            return Refusal.DRAINING
        if self.version == NO_VERSION:
            return Refusal.NOT_READY
        if row.trajectory_id in self.held:
            return Refusal.STALE_FENCE
        held = Held(script, row.lease, row.turns)
        self.held[row.trajectory_id] = held
        if row.turns and source and source != self.plan.peer:
            self._fetch(held, source)
        elif row.turns:
            self._begin_recomputing(held, "no_source")
        else:
            self._begin_turn(held)
        return None

    def _fetch(self, held: Held, source: str) -> None:
        """Ask the worker that had it for its cache; the answer takes a round trip."""
        peer = self._around.workers[source]
        latency_s = self._around.network.latency_s(self.plan.node, peer.plan.node)
        self._timeline.after(2 * latency_s, self._fetched, held, peer, self._timeline.now)

    def _fetched(self, held: Held, source: "SimWorker", since: float) -> None:
        if not self._holds(held):
            return
        trajectory_id, context = held.script.trajectory_id, held.context_tokens
        same_node = self.plan.node == source.plan.node
        transfer_s = kv_transfer_s(self._around.model, context, same_node=same_node)
        if source.dead or source.version != self.version:
            self._begin_recomputing(held, "gone" if source.dead else "other_version")
        elif not source.gives(trajectory_id, context):
            self._begin_recomputing(held, "evicted")
        elif transfer_s >= self.plan.speed.prefill_s(context):
            source.part(trajectory_id)
            self._begin_recomputing(held, "cheaper")
        else:
            self._timeline.after(transfer_s, self._arrived, held, source, since)

    def _arrived(self, held: Held, source: "SimWorker", since: float) -> None:
        trajectory_id = held.script.trajectory_id
        source.part(trajectory_id)
        if not self._holds(held):
            return
        now, context = self._timeline.now, held.context_tokens
        if source.version != self.version:
            self._begin_recomputing(held, "other_version")
            return
        self.engine.arrive_kv(trajectory_id, held.script.group_id, context, now)
        held.move = MoveReport(path="kv", tokens=context, seconds=now - since, reason="")
        self._begin_turn(held)

    def _begin_recomputing(self, held: Held, reason: str) -> None:
        tokens = held.context_tokens
        seconds = self.plan.speed.prefill_s(tokens)
        held.move = MoveReport(path="recompute", tokens=tokens, seconds=seconds, reason=reason)
        self._begin_turn(held)

    def gives(self, trajectory_id: str, context_tokens: int) -> bool:
        """Whether its cache still has the trajectory's context."""
        return not self.dead and self.engine.kept_tokens(trajectory_id) >= context_tokens // 2

    def part(self, trajectory_id: str) -> None:
        """Another worker has the trajectory now; its cache may go."""
        if not self.dead and trajectory_id not in self.held:
            self.engine.leave(trajectory_id, self._timeline.now)

    def let_go(self, trajectory_ids: list[str]) -> None:
        """The scheduler does not count these as this worker's."""
        for trajectory_id in trajectory_ids:
            if self.held.pop(trajectory_id, None) is not None:
                self.engine.leave(trajectory_id, self._timeline.now)

    def _holds(self, held: Held) -> bool:
        return not self.dead and self.held.get(held.script.trajectory_id) is held

    # ── turns ────────────────────────────────────────────────────────────────────────────────

    def _begin_turn(self, held: Held) -> None:
        script = held.script
        job = Job(
            f"{script.trajectory_id}/{held.turn}/{held.lease}",
            script.trajectory_id,
            script.group_id,
            context_tokens=script.context_at[held.turn],
            prompt_tokens=script.trace.prompt_tokens,
            new_tokens=script.trace.turns[held.turn].output_tokens,
        )
        self.engine.submit(job, self._timeline.now)
        self._rewake()

    def _rewake(self) -> None:
        due = self.engine.next_event()
        if due != self._wake_at and due < inf:
            self._wake_serial += 1
            self._wake_at = due
            self._timeline.at(due, self._wake, self._wake_serial)

    def _wake(self, serial: int) -> None:
        if serial != self._wake_serial or self.dead:
            self._timeline.events -= 1  # Overtaken by a submit: nothing happens.
            return
        self._wake_at = inf
        for finished in self.engine.advance(self._timeline.now):
            self._turn_sampled(finished)
        self._rewake()

    def _turn_sampled(self, finished: Finished) -> None:
        held = self.held.get(finished.trajectory_id)
        if held is None:  # Dropped meanwhile.
            self.engine.leave(finished.trajectory_id, self._timeline.now)
            return
        held.done = finished
        turn = held.script.trace.turns[held.turn]
        tool_s = 2 * self._around.network.same_node_s + (turn.latency_s or 0.0)
        self._timeline.after(tool_s, self._tool_returned, held)

    def _tool_returned(self, held: Held) -> None:
        if self._holds(held):
            message = self._turn_message(held)
            scheduler = self._around.scheduler
            self._timeline.after(self._to_scheduler_s, scheduler.turn_finished, self, message)

    def _turn_message(self, held: Held) -> TurnFinished:
        script, done = held.script, held.done
        assert done is not None
        turn = script.trace.turns[held.turn]
        last = held.turn == len(script.trace.turns) - 1
        output = bytes(ITEM_BYTES * turn.output_tokens)
        return TurnFinished(
            trajectory_id=script.trajectory_id,
            lease=held.lease,
            turn=held.turn,
            prompt_tokens=b"" if held.turn else bytes(ITEM_BYTES * script.trace.prompt_tokens),
            session_id=script.trajectory_id,
            tool_server=TOOL_SERVER,
            action_tokens=output,
            action_logprobs=output,
            action_versions=self._versions(done, turn.output_tokens),
            observation_tokens=b"" if last else bytes(ITEM_BYTES * turn.observation_tokens),
            tool="" if last else turn.tool,
            tool_status=None if last else turn.status or ToolStatus.OK,
            tool_latency_s=turn.latency_s or 0.0,
            decode_s=done.finished_s - done.first_token_s,
            queue_s=done.first_token_s - done.submitted_s,
            result=_result(script) if last else None,
            running=done.running,
            kv_tokens_used=done.kv_tokens_used,
            move=held.move,
        )

    def _versions(self, done: Finished, tokens: int) -> bytes:
        """The version of each token, as if they had come evenly from the first to the last."""
        if len(self._swaps) < 2 or self._swaps[-1][0] <= done.first_token_s:
            return self.version.to_bytes(ITEM_BYTES, "little") * tokens
        span_s = max(1e-9, done.finished_s - done.first_token_s)
        packed, taken = b"", 0
        ends = [*(since for since, _ in self._swaps[1:]), inf]
        for (_, version), until in zip(self._swaps, ends, strict=True):
            share = min(1.0, max(0.0, (until - done.first_token_s) / span_s))
            upto = int(share * tokens)
            packed += version.to_bytes(ITEM_BYTES, "little") * (upto - taken)
            taken = upto
        return packed

    def answered(self, trajectory_id: str, reply: TurnReply) -> None:
        """The scheduler has the turn."""
        held = self.held.get(trajectory_id)
        if self.dead or held is None:
            return
        held.move = held.done = None
        if reply.go_on:
            held.lease = reply.lease
            held.turn += 1
            self._begin_turn(held)
            return
        del self.held[trajectory_id]
        if held.turn == len(held.script.trace.turns) - 1:
            self.engine.leave(trajectory_id, self._timeline.now)
        # Else its cache stays for the worker that it goes on at, until others need the room.

    # ── the worker itself ────────────────────────────────────────────────────────────────────

    def report_regularly(self) -> None:
        """Say once a second how it stands, for as long as it lives."""
        if self.dead:
            return
        self._timeline.after(REPORT_S, self.report_regularly)
        self._report()
        if self.draining and not self.held:
            self.dead = True
            scheduler = self._around.scheduler
            self._timeline.after(2 * self._to_scheduler_s, scheduler.worker_gone, self)

    def _report(self) -> None:
        engine = self.engine
        report = ReportWorker(
            bucket=self.plan.bucket,
            version=self.version,
            kv_tokens_used=engine.kv_tokens_used,
            kv_tokens_free=engine.kv_tokens - engine.kv_tokens_used,
            slots=0 if self.draining else self.plan.slots,
            holding=list(self.held),
            decode_tokens=engine.decode_tokens,
            running=engine.running,
            waiting=engine.waiting,
        )
        scheduler = self._around.scheduler
        self._timeline.after(self._to_scheduler_s, scheduler.worker_reported, self, report)

    def apply_version(self, version: int, pause_s: float) -> None:
        """Swap the weights in, and say so; all caches are of the old ones."""
        if self.dead:
            return
        now = self._timeline.now
        if pause_s:
            self.engine.pause(now, pause_s)
        self.engine.new_version(now)
        self.version = version
        self._swaps = [*self._swaps[-3:], (now, version)]
        self._report()
        self._rewake()

    def drain(self) -> None:
        """Take nothing more, and hand each trajectory back at the end of its turn."""
        self.draining = True
        self._report()

    def kill(self) -> None:
        """Everything on it is lost, and nobody is told."""
        self.dead = True


def _result(script: Script) -> TrajectoryResult:
    return TrajectoryResult(stop_reason=StopReason.ANSWERED, reward=script.trace.reward or 0.0)
