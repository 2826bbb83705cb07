"""The run that `bench_migrate` measures: real processes around a scheduler that has every batch.

Coordinator, trainer, rollout workers and a replica are the production processes. The scheduler is
scripted, in the benchmark's own process: it offers the same prepared batch at every step, changes
the condition between blocks of steps, and keeps what the trainer reports of each step. While a
condition is being entered the trainer waits for its batch, and the first steps of a block are not
counted.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config import Config
from common.errors import LibraError, RequestRefused, RunFailed, TransportError
from common.membership import Membership
from common.mesh import Mesh
from common.messages.coordinator import Fleet, GetFleet, SetSplit, SlotStatus
from common.messages.scheduler import (
    BatchOffer,
    BeginLineage,
    FetchGroup,
    LineageBegun,
    ReportWorker,
    StepFinished,
    StepRecorded,
    TakeBatch,
    WorkerReported,
)
from common.service import published_coordinator
from services.cli.bench_migrate_stage import (
    CONDITIONS,
    NEIGHBOURS,
    QUIET,
    RUN,
    STREAMING,
    SWITCHING,
    Stage,
    join,
    prepared_batch,
)
from services.trainer.batch import batch_sequences
from services.trainer.packing import plan

Holds = Callable[[Fleet], bool]

SETTLE_STEPS = 2
"""At the start of a block; not counted."""
START_S = 240.0
"""Seven Python processes, five of which import torch, on one core that may be shared."""
ENTER_S = 60.0
"""For a slot to change sides and for a receiver to begin."""
STEP_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """What the trainer reported of one counted step."""

    condition: str
    round: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Program:
    """How long to measure."""

    rounds: int
    block_steps: int
    """Counted steps of each condition in each round."""
    switch_every: int
    """Steps between two orders to the slot while switching."""


@dataclass
class Outcome:
    """What was seen."""

    steps: list[Step] = field(default_factory=list[Step])
    switches: list[SlotStatus] = field(default_factory=list[SlotStatus])
    """The slot after each completed change of side."""
    received: dict[str, float] = field(default_factory=dict[str, float])
    """As `bench_migrate_receiver.Received`."""
    packs: int = 0
    """Micro-batches of a step, all of the same cost."""


class Conductor:
    """The scripted scheduler: offers the batch, changes conditions, keeps what is reported."""

    def __init__(
        self, config: Config, stage: Stage, membership: Membership, program: Program
    ) -> None:
        self._config = config
        self._stage = stage
        self._membership = membership
        self._program = program
        self._groups = prepared_batch()
        self._offering = asyncio.Event()
        self._stepped = asyncio.Event()
        self._condition, self._round = QUIET, 0
        self._done = 0
        """Steps of this block."""
        self._steps = 0
        self._over = False
        self._outcome = Outcome()

    def serve_on(self, mesh: Mesh) -> None:
        """Be the scheduler."""
        mesh.serve(BeginLineage, lambda _sender, _request: LineageBegun(lineage=1))
        mesh.serve(ReportWorker, lambda _sender, _request: WorkerReported(drop=[]))
        mesh.serve(TakeBatch, self._take)
        mesh.serve(FetchGroup, lambda _sender, request: self._groups[request.group_id])
        mesh.serve(StepFinished, self._finish)

    async def run(self) -> Outcome:
        """All rounds; the conditions in turn, in the other order every second round."""
        await self._await_fleet(_settled_on_rollout, START_S)
        for number in range(self._program.rounds):
            self._round = number
            for condition in CONDITIONS if number % 2 == 0 else reversed(CONDITIONS):
                await self._enter(condition)
                await self._block()
        await self._enter(QUIET)
        self._over = True
        training = self._config.training
        sequences = batch_sequences(self._groups.values(), training)
        self._outcome.packs = len(plan(sequences, training.micro_batch_tokens, share=True))
        return self._outcome

    async def _enter(self, condition: str) -> None:
        for neighbour, busy_while in NEIGHBOURS.items():
            self._stage.order(neighbour, "go" if condition == busy_while else "stop")
        await self._split(train=0)
        await self._await_fleet(_settled_on_rollout, ENTER_S)
        if condition == STREAMING:
            await self._membership.wait_for("rollout", name="receiver", timeout_s=ENTER_S)
        self._condition, self._done = condition, 0

    async def _block(self) -> None:
        self._offering.set()
        train, switches = 0, 0
        while self._done < SETTLE_STEPS + self._program.block_steps:
            try:
                async with asyncio.timeout(STEP_S):
                    await self._stepped.wait()
            except TimeoutError as error:
                self._stage.check()
                raise RunFailed(f"no step within {STEP_S:g} s while {self._condition}") from error
            self._stepped.clear()
            self._stage.check()
            if self._condition == SWITCHING:
                if self._done % self._program.switch_every == 1:
                    train = 1 - train
                    await self._split(train=train)
                switches = await self._note_switch(switches)
        self._offering.clear()

    async def _note_switch(self, seen: int) -> int:
        (slot,) = (await self._fleet()).slots
        if slot.phase == "active" and slot.switches > seen:
            self._outcome.switches.append(slot)
        return max(seen, slot.switches)

    # ── what the trainer asks ────────────────────────────────────────────────────────────────

    async def _take(self, _sender: str, _request: TakeBatch) -> BatchOffer:
        if self._over:
            return BatchOffer(group_ids=[], waiting_for="", exhausted=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._offering.wait()
        ready = self._offering.is_set()
        names = list(self._groups) if ready else []
        return BatchOffer(group_ids=names, waiting_for="" if ready else "bench", exhausted=False)

    def _finish(self, _sender: str, request: StepFinished) -> StepRecorded:
        assert not request.skipped, request.skipped
        if request.step > self._steps:
            self._steps = request.step
            self._done += 1
            block = SETTLE_STEPS + self._program.block_steps
            if SETTLE_STEPS < self._done <= block:
                step = Step(self._condition, self._round, request.metrics)
                self._outcome.steps.append(step)
            if self._done >= block:  # Before the next offer, which would be of this condition.
                self._offering.clear()
            self._stepped.set()
        return StepRecorded(stop=self._over, reason="")

    # ── what the coordinator is asked ────────────────────────────────────────────────────────

    async def _split(self, *, train: int) -> None:
        order = SetSplit(train=train, rollout=1 - train, by="operator", hold_s=0.0)
        await self._membership.ask_coordinator(order, timeout_s=5.0)

    async def _fleet(self) -> Fleet:
        return await self._membership.ask_coordinator(GetFleet(), timeout_s=5.0)

    async def _await_fleet(self, holds: Holds, timeout_s: float) -> None:
        fleet: Fleet | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while fleet is None or not holds(fleet):
                    self._stage.check()
                    await asyncio.sleep(POLL_S)
                    with contextlib.suppress(TransportError, RequestRefused):
                        fleet = await self._fleet()
        except TimeoutError as error:
            slots = fleet.slots if fleet else "no answer"
            raise RunFailed(f"the slot did not settle in {timeout_s:g} s: {slots}") from error


def _settled_on_rollout(fleet: Fleet) -> bool:
    settled = [slot.side == "rollout" and slot.phase == "active" for slot in fleet.slots]
    return bool(settled) and all(settled)


async def perform(config: Config, stage: Stage, program: Program) -> Outcome:
    """Be the scheduler of the started run until all is measured."""
    try:
        async with asyncio.timeout(START_S):
            while not published_coordinator(stage.run_dir, RUN):
                stage.check()
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise RunFailed(f"the coordinator did not listen within {START_S:g} s") from error
    failure: LibraError | None = None
    outcome = Outcome()
    async with join(config, stage.run_dir, "scheduler", "scheduler") as (mesh, membership):
        conductor = Conductor(config, stage, membership, program)
        conductor.serve_on(mesh)
        try:
            await membership.joined(timeout_s=START_S)
            outcome = await conductor.run()
        except LibraError as error:  # Outside of the task group, it would be one of a group.
            failure = error
    if failure is not None:
        raise failure
    return outcome
