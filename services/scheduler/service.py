"""The scheduler: carries messages and rows to and from the book, which decides."""

import asyncio
from collections.abc import Awaitable
from contextlib import nullcontext
from datetime import UTC, datetime

import structlog

from common.errors import (
    LedgerError,
    Refusal,
    RequestRefused,
    RequestTimeout,
    RunFailed,
    TransportError,
)
from common.identity import Identity
from common.membership import Membership
from common.messages.coordinator import MemberUpdate
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import (
    BatchOffer,
    BeginLineage,
    FetchGroup,
    GetRunStatus,
    GroupData,
    LineageBegun,
    ReportWorker,
    RunStatus,
    StepFinished,
    StepRecorded,
    TakeBatch,
    TurnFinished,
    TurnRecorded,
    WorkerReported,
)
from common.service import Runtime
from services.scheduler.book import Book
from services.scheduler.learning import remembered
from services.scheduler.ledger import FileLedger, Ledger, trained_after, turns_of
from services.scheduler.planning import Planning
from services.scheduler.pulse import Pulse
from services.scheduler.records import MetaRow
from services.scheduler.routing.policy import Policy
from services.scheduler.rules import GATHER_S, Rules
from services.scheduler.state import Assign, Outcome, TurnReply
from services.scheduler.status import run_status
from services.scheduler.tasks import TaskOrder, load_tasks, trajectory_seed
from services.scheduler.watch import Watch
from services.scheduler.wire import group_data, later_tokens

log = structlog.get_logger()

TICK_S = 1.0
"""Leases are checked, and placement is tried, at least so often."""
OFFER_WAIT_S = 1.0
"""A batch that is not complete by then is answered with what it waits for."""
ASSIGN_TIMEOUT_S = 5.0
MOVE_TIMEOUT_S = 2.0
"""For the target of a move to say that it has the trajectory, while the source waits."""
FAREWELL_S = 10.0
"""How long a failed run waits for its trainer to ask and be told why."""
FLUSH_S = 0.5
"""For the reply that tells it to leave the process."""
RETRY_ELSEWHERE = (
    Refusal.DRAINING,
    Refusal.NOT_READY,
    Refusal.OVERLOADED,
    Refusal.STALE_FENCE,
)
"""Refusals that say nothing against the trajectory. Others would come again from every worker."""


class SchedulerService:
    """One run's tasks, trajectories and batches."""

    def __init__(
        self, runtime: Runtime, ledger: Ledger | None = None, policy: Policy | None = None
    ) -> None:
        self._runtime = runtime
        self._config = runtime.config
        self._path = runtime.run_dir / "ledger.sqlite"
        self._task_rows = {task.task_id: task for task in load_tasks(runtime.config)}
        self._ledger = ledger or FileLedger(self._path, runtime.run_dir / "metrics.jsonl")
        self._learned = nullcontext(policy) if policy else remembered(self._config, runtime.run_dir)
        self._membership = Membership(runtime)
        self._tasks = asyncio.TaskGroup()
        self._moving: dict[str, asyncio.Task[TurnReply]] = {}
        """Moves under way, by trajectory."""
        self._changed = Pulse()
        """Something may be placed now."""
        self._gathering = False
        """A worker has reported, and others may within `GATHER_S`."""
        self._groups_changed = Pulse()
        """A batch may be complete now."""
        self._changes_seen = 0
        self._history = asyncio.Lock()
        """Held where the history of steps is read and then changed."""
        self._gone: list[str] = []
        """Rollout workers that left since the last look."""
        self._expire_at = 0.0
        self._watch = Watch(self._membership)
        self._planning = Planning(self._membership, self._config)
        self._told = asyncio.Event()
        """The trainer has been told that the run failed."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until asked to stop.

        Raises:
            LedgerError: the ledger belongs to other tasks, or cannot be written.
            RunFailed: group after group failed.
        """
        async with self._ledger:
            with self._learned as policy:
                await self._open_book(policy)
                await self._run(stopping)

    async def _run(self, stopping: asyncio.Event) -> None:
        self._membership.on_change(self._member_changed)
        async with self._tasks as tasks:
            self._serve()
            loops = [
                tasks.create_task(self._membership.run(), name="scheduler.membership"),
                tasks.create_task(self._work(), name="scheduler.work"),
                tasks.create_task(self._watch.run(), name="scheduler.watch"),
            ]
            await stopping.wait()
            for loop in loops:
                loop.cancel()

    async def _open_book(self, policy: Policy) -> None:
        training = self._config.tasks
        order = TaskOrder(list(self._task_rows), seed=self._config.run.seed, epochs=training.epochs)
        snapshot = self._ledger.snapshot()
        digest = snapshot.meta.setdefault("tasks_digest", order.digest())
        if digest != order.digest():
            raise LedgerError(
                self._path,
                "was begun with other tasks or another run.seed; restore tasks.path and run.seed, "
                "or choose another run.name",
            )
        await self._ledger.commit([MetaRow("tasks_digest", digest)])
        self._book = Book(
            Rules.of(self._config),
            order,
            snapshot,
            policy,
            now=_now(),
            wall_offset_s=datetime.now(UTC).timestamp() - _now(),
        )
        log.info(
            "ledger.opened",
            step=self._book.step,
            lineage=self._book.lineage.number,
            groups=len(self._book.groups.alive),
        )

    def _serve(self) -> None:
        mesh = self._runtime.mesh
        mesh.serve(ReportWorker, self._report_worker)
        mesh.serve(TurnFinished, self._turn_finished)
        mesh.serve(TakeBatch, self._take_batch)
        mesh.serve(FetchGroup, self._fetch_group)
        mesh.serve(StepFinished, self._step_finished)
        mesh.serve(BeginLineage, self._begin_lineage)
        mesh.serve(GetRunStatus, self._run_status)

    # ── changes ──────────────────────────────────────────────────────────────────────────────

    def _submit(self, outcome: Outcome) -> Awaitable[None]:
        """Queue the rows; the result resolves when they, and all queued before, are durable.

        Nothing is awaited between the change that made the outcome and this.
        """
        durable = self._ledger.commit(outcome.rows, outcome.line)
        for notice in outcome.notices:
            report = log.warning if notice.warning else log.info
            report(notice.event, **notice.fields)
        if self._book.groups.changes != self._changes_seen:
            self._changes_seen = self._book.groups.changes
            self._groups_changed.beat()
        return durable

    async def _commit(self, outcome: Outcome) -> None:
        """Return when the rows are durable."""
        await self._submit(outcome)

    def _member_changed(self, update: MemberUpdate) -> None:
        if not update.gone:
            self._book.worker_joined(update.member.peer)
        elif update.member.role == "rollout":
            self._gone.append(update.member.peer)
        self._changed.beat()

    async def _work(self) -> None:
        """Admit, place and expire: when something changed, and at every tick."""
        while True:
            ticket = self._changed.ticket()
            await self._ledger.room()
            outcome = self._next_work()
            await self._commit(outcome)
            for order in outcome.orders:
                self._tasks.create_task(
                    self._send(order), name=f"assign {order.trajectory.trajectory_id}"
                )
            if self._book.groups.failure:
                await self._say_farewell()
            await Pulse.wait(ticket, until=_now() + TICK_S)

    def _next_work(self) -> Outcome:
        now = _now()
        outcome = Outcome()
        if now >= self._expire_at:
            outcome.add(self._book.expire(now))
            self._expire_at = now + TICK_S
        while self._gone:
            outcome.add(self._book.worker_gone(self._gone.pop(), now))
        outcome.add(self._book.advance(now))
        return outcome

    async def _say_farewell(self) -> None:
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._told.wait()
                await asyncio.sleep(FLUSH_S)
        except TimeoutError:
            log.warning("trainer.untold")
        raise RunFailed(self._book.groups.failure)

    async def _send(self, order: Assign) -> None:
        """Give a worker a trajectory. Without an answer the lease decides who has it."""
        try:
            await self._assign(order, timeout_s=ASSIGN_TIMEOUT_S)
        except RequestTimeout:
            return
        except RequestRefused as error:
            await self._give_back(order, str(error), lost=error.refusal not in RETRY_ELSEWHERE)
        except TransportError as error:
            await self._give_back(order, str(error), lost=False)

    async def _assign(self, order: Assign, *, timeout_s: float) -> None:
        member = self._membership.members.get(order.peer)
        if member is None:
            raise RequestRefused(Refusal.NOT_READY, "no member of the run, or not yet")
        row, task = order.trajectory, self._task_rows[order.group.task_id]
        turns = await self._ledger.read(turns_of(row.trajectory_id)) if row.turns else []
        message = AssignTrajectory(
            trajectory_id=row.trajectory_id,
            group_id=row.group_id,
            lease=row.lease,
            environment=task.environment,
            task=task.row,
            seed=trajectory_seed(self._config.run.seed, row.trajectory_id),
            turn=row.turns,
            prompt_tokens=turns[0].prompt_tokens if turns else b"",
            later_tokens=later_tokens(turns),
            session_id=row.session_id,
            tool_server=row.tool_server,
            kv_source=order.kv_source,
        )
        await self._membership.request(member, message, timeout_s=timeout_s)
        log.debug(
            "trajectory.assigned",
            trajectory_id=row.trajectory_id,
            worker=member.name,
            lease=row.lease,
            turn=row.turns,
        )

    async def _give_back(self, order: Assign, reason: str, *, lost: bool) -> None:
        await self._ledger.room()
        outcome = self._book.assignment_failed(order, reason, _now(), lost=lost)
        await self._commit(outcome)
        self._changed.beat()

    # ── rollout workers ──────────────────────────────────────────────────────────────────────

    async def _report_worker(self, sender: str, report: ReportWorker) -> WorkerReported:
        await self._ledger.room()
        name, member = Identity.parse(sender).name, sender in self._membership.members
        drop, outcome = self._book.worker_reported(sender, name, report, _now(), member=member)
        if outcome.rows:
            await self._commit(outcome)
        if self._book.groups.needy() and not self._gathering:
            self._gathering = True
            asyncio.get_running_loop().call_later(GATHER_S, self._gathered)
        return WorkerReported(drop=drop)

    def _gathered(self) -> None:
        self._gathering = False
        self._changed.beat()

    async def _turn_finished(self, sender: str, turn: TurnFinished) -> TurnRecorded:
        await self._ledger.room()
        while moving := self._moving.get(turn.trajectory_id):  # Said twice; the first waits, too.
            await asyncio.wait({moving})
            await self._ledger.room()
        reply, outcome = self._book.turn_finished(sender, turn, _now())
        durable = self._submit(outcome)
        if reply.move is not None:
            name = f"move {turn.trajectory_id}"
            move = self._tasks.create_task(self._move(reply.move, durable), name=name)
            self._moving[turn.trajectory_id] = move
            reply = await asyncio.shield(move)  # It goes on when the caller gives up.
        else:
            await durable  # Also when it was said twice: the first may be on its way.
        if not reply.go_on:
            self._changed.beat()
        return TurnRecorded(go_on=reply.go_on, lease=reply.lease)

    async def _move(self, order: Assign, durable: Awaitable[None]) -> TurnReply:
        """Offer a reserved trajectory to its target; whatever comes of it, somebody has it."""
        try:
            await durable
            refused = await self._offer(order)
            await self._ledger.room()
            if refused:
                reply, outcome = self._book.move_refused(order, refused, _now())
            else:
                reply, outcome = self._book.move_accepted(order, _now())
            durable = self._submit(outcome)
            if outcome.rows:
                await durable
        finally:
            del self._moving[order.trajectory.trajectory_id]
        self._changed.beat()
        return reply

    async def _offer(self, order: Assign) -> str:
        """Why the target did not take it, or empty."""
        try:
            await self._assign(order, timeout_s=MOVE_TIMEOUT_S)
        except RequestRefused as error:
            return error.refusal.value
        except RequestTimeout:
            return "timeout"
        except TransportError:
            return "unreachable"
        return ""

    # ── the trainer ──────────────────────────────────────────────────────────────────────────

    async def _take_batch(self, _sender: str, request: TakeBatch) -> BatchOffer:
        until = _now() + OFFER_WAIT_S
        while True:
            ticket = self._groups_changed.ticket()
            await self._ledger.room()
            offer, outcome = self._book.take_batch(request.lineage, request.step, _now())
            await self._commit(outcome)
            if outcome.rows:
                self._changed.beat()
            if offer.group_ids or offer.exhausted or _now() >= until:
                self._note_told(stop=offer.exhausted)
                return offer
            await Pulse.wait(ticket, until=until)

    async def _fetch_group(self, _sender: str, request: FetchGroup) -> GroupData:
        found = await self._ledger.read(lambda store: store.group_with_turns(request.group_id))
        if found is None:
            raise RequestRefused(Refusal.NOT_FOUND, request.group_id)
        return group_data(*found)

    async def _step_finished(self, _sender: str, finished: StepFinished) -> StepRecorded:
        async with self._history:
            await self._ledger.room()
            step = self._book.step
            extra = self._watch.idle() | self._planning.metrics
            reply, outcome = self._book.step_finished(finished, extra, _now())
            if self._book.step > step:
                self._watch.step_finished()
                self._planning.step_finished(self._watch.fleet, self._book, self._tasks)
            await self._commit(outcome)
        self._changed.beat()
        self._note_told(stop=reply.stop)
        return reply

    async def _begin_lineage(self, sender: str, request: BeginLineage) -> LineageBegun:
        async with self._history:
            await self._ledger.commit([])  # So that the query below sees all there is.
            later = await self._ledger.read(trained_after(request.step))
            await self._ledger.room()
            outcome = self._book.begin_lineage(sender, request.step, later, _now())
            await self._commit(outcome)
        self._changed.beat()
        return LineageBegun(lineage=self._book.lineage.number)

    def _note_told(self, *, stop: bool) -> None:
        if stop and self._book.groups.failure:
            self._told.set()

    # ── people ───────────────────────────────────────────────────────────────────────────────

    def _run_status(self, _sender: str, _request: GetRunStatus) -> RunStatus:
        return run_status(self._book, _now(), self._watch.fleet.slots)


def _now() -> float:
    return asyncio.get_running_loop().time()
