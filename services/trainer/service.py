"""The trainer: takes complete groups, makes optimizer steps, publishes each as a version.

It starts from the newest checkpoint of the run directory where there is one, whoever started it
and why: a restart is a start. Torch works in one thread of its own, weights are copied out in
another, and the event loop only moves messages, so heartbeats go on during a step.

The launcher sets `MALLOC_MMAP_MAX_=0` and a large `MALLOC_TRIM_THRESHOLD_` in this process's
environment: without them the allocator gives activations back to the kernel and a step takes up
to 1.6 times as long.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import blake3
import structlog

from common.errors import RunFailed
from common.membership import MEMORY, Membership
from common.messages.coordinator import MemberUpdate
from common.messages.scheduler import GroupData, StepFinished
from common.messages.trainer import GetTrainerStatus, TrainerStatus
from common.service import Runtime
from common.stream import Streamer
from common.weights import NO_VERSION, version_id
from services.trainer import checkpoint
from services.trainer.batch import TrainingSequence, batch_sequences
from services.trainer.crew import Crew, Fetcher
from services.trainer.gradients import StreamedGradients
from services.trainer.model import DTYPES
from services.trainer.peers import Peers
from services.trainer.publish import COPY_TIMEOUT_S, Publisher, Segment
from services.trainer.ranks import Ranks
from services.trainer.step import StepAbandoned, StepResult

log = structlog.get_logger()

T = TypeVar("T")
JOIN_TIMEOUT_S = 60.0
"""The coordinator starts together with the trainer, or was restarted."""
SEGMENT_MARGIN_S = 10.0
"""A worker that reads a segment for longer than `apply_timeout_s` is dropped from the run."""
POLL_S = 0.05
"""Between two questions for a free segment; it is rarely asked twice."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step and what it took to get them."""

    groups: list[GroupData]
    wait_s: float
    fetch_s: float

    @property
    def group_ids(self) -> list[str]:
        """In the order in which the scheduler offered them."""
        return [group.group_id for group in self.groups]


class TrainerService:
    """The training loop of one run."""

    def __init__(
        self,
        runtime: Runtime,
        segments: Path = MEMORY,
        open_streamer: Callable[[Runtime], AbstractAsyncContextManager[Streamer]] | None = None,
    ) -> None:
        self._runtime, self._open_streamer = runtime, open_streamer
        self._training = runtime.config.training
        self._membership = Membership(runtime)
        self._segments = segments
        self._step = self._recorded = self._saved = 0
        self._lineage = 0
        self._announced: tuple[int, Segment, list[float]] | None = None
        """The newest version that the coordinator accepted, where it lies, and its canary."""
        self._announcement = asyncio.Lock()
        """An older version must not be announced again after a newer one."""
        self._skipped = self._nonfinite = 0
        self._step_began = 0.0
        self._spare: asyncio.Task[Segment] | None = None
        """Becomes the segment of the next version; it stays free once it is."""
        self._publish_s = 0.0
        """From the end of the last step until its copy ran: what the loop spent on it."""
        self._phase, self._phase_began = "loading", 0.0

    async def run(self, stopping: asyncio.Event) -> None:
        """Train until the run is over or `stopping` is set; then checkpoint and leave."""
        self._stopping = stopping
        self._peers = Peers(self._membership, stopping)
        self._set_phase("loading")
        self._runtime.mesh.serve(GetTrainerStatus, self._status)
        async with contextlib.AsyncExitStack() as stack:
            fetcher = None
            if self._open_streamer is not None:
                streamer = await stack.enter_async_context(self._open_streamer(self._runtime))
                fetcher = StreamedGradients(streamer)
            await self._run(fetcher)

    async def _run(self, fetcher: Fetcher | None) -> None:
        with (
            ThreadPoolExecutor(1, "libra-train") as self._train_thread,
            ThreadPoolExecutor(1, "libra-copy") as copy_thread,
            ThreadPoolExecutor(1, "libra-gradients") as gradient_thread,
        ):
            self._crew = Crew(self._training.ranks, gradient_thread, fetcher=fetcher)
            self._crew.serve_on(self._runtime.mesh)
            self._membership.on_change(self._note_departure)
            self._publisher = Publisher(
                self._segments,
                self._runtime.run_id,
                DTYPES[self._runtime.config.model.dtype],
                copy_thread,
            )
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    background = [
                        self._tasks.create_task(self._membership.run(), name="membership"),
                        self._tasks.create_task(self._watch_announcement(), name="announcement"),
                    ]
                    await self._work()
                    for task in background:
                        task.cancel()
                    if self._spare is not None:
                        self._spare.cancel()
            finally:
                self._publisher.close()

    async def _work(self) -> None:
        ranks = await self._in_thread(self._load)
        self._crew.prepare(ranks.learner.layout)
        try:
            await self._begin(ranks)
            try:
                await self._train(ranks)
            except RunFailed:
                await self._save(ranks)
                raise
            self._set_phase("stopping")
            await self._save(ranks)
            await self._announcing
        finally:
            await self._in_thread(ranks.close)

    def _load(self) -> Ranks:
        """Load the newest checkpoint, or else the configured model."""
        config = self._runtime.config
        found = checkpoint.latest(self._runtime.run_dir)
        if found is None:
            return Ranks(config, Path(config.model.path), resume=False)
        self._step = self._recorded = self._saved = found.contents.step
        log.info("checkpoint.loaded", path=str(found.path), step=self._step)
        return Ranks(config, found.path, resume=True)

    async def _begin(self, ranks: Ranks) -> None:
        """Open the lineage and publish what it starts from, before anything is sampled."""
        await self._membership.joined(timeout_s=JOIN_TIMEOUT_S)
        self._lineage = await self._peers.begin_lineage(self._step)
        self._set_phase("publishing")
        self._publisher.prepare(ranks.outlet.shapes)
        self._announcing = await self._publish(ranks)

    # ── the loop ─────────────────────────────────────────────────────────────────────────────

    async def _train(self, ranks: Ranks) -> None:
        self._step_began = self._now()
        while (batch := await self._next_batch()) is not None:
            self._set_phase("training")
            self._look_for_segment()
            began = self._now()
            try:
                sequences = batch_sequences(batch.groups, self._training)
                result = await self._in_thread(lambda: self._run_step(ranks, sequences))  # noqa: B023
            except StepAbandoned:
                log.info("step.abandoned", step=self._step + 1)
                return
            train_s = self._now() - began
            self._membership.busy_s += train_s
            if await self._conclude(ranks, batch, result, train_s):
                return

    def _run_step(self, ranks: Ranks, sequences: list[TrainingSequence]) -> StepResult:
        def abandon_when_stopping() -> None:
            if self._stopping.is_set():
                raise StepAbandoned

        self._crew.expect(self._step + 1, version_id(self._lineage, self._step))
        return ranks.train(
            sequences,
            self._step + 1,
            before_update=self._publisher.join,
            between=abandon_when_stopping,
            sharing=self._crew,
        )

    async def _next_batch(self) -> Batch | None:
        """The next step's groups; None when there are no more or the process is to stop."""
        self._set_phase("waiting")
        began = self._now()
        while not self._stopping.is_set():
            offer = await self._peers.take_batch(self._lineage, self._step + 1)
            if offer.exhausted:
                log.info("tasks.exhausted", step=self._step, waiting_for=offer.waiting_for)
                return None
            if offer.group_ids:
                complete = self._now()
                groups = await self._peers.fetch(offer.group_ids)
                return Batch(groups, complete - began, self._now() - complete)
        return None

    async def _conclude(
        self, ranks: Ranks, batch: Batch, result: StepResult, train_s: float
    ) -> bool:
        """Publish and report a step; True when the run is over."""
        attempt = self._skipped
        metrics = result.metrics | self._times(batch, train_s) | self._crew.metrics
        if result.skipped:
            self._skipped += 1
            self._nonfinite += result.skipped == "nonfinite"
            log.warning("step.skipped", step=self._step + 1, reason=result.skipped)
        else:
            self._step += 1
            self._skipped = self._nonfinite = 0
            await self._announcing
            self._announcing = await self._publish(ranks)
        recorded = await self._peers.step_finished(
            StepFinished(
                lineage=self._lineage,
                step=self._step + (1 if result.skipped else 0),
                attempt=attempt,
                skipped=result.skipped,
                group_ids=batch.group_ids,
                metrics=metrics,
            )
        )
        self._recorded = self._step
        log.info("step.finished", step=self._step, **_rounded(metrics))
        self._check_nonfinite()
        if not result.skipped and self._step % self._training.checkpoint_every_steps == 0:
            await self._save(ranks)
        return recorded.stop

    def _times(self, batch: Batch, train_s: float) -> dict[str, float]:
        now = self._now()
        step_s, self._step_began = now - self._step_began, now
        return {
            "time/step": step_s,
            "time/wait_batch": batch.wait_s,
            "time/fetch": batch.fetch_s,
            "time/train": train_s,
            "time/publish": self._publisher.copy_s,
            "time/publish_loop": self._publish_s + self._publisher.join_s,
        }

    def _check_nonfinite(self) -> None:
        limit = self._training.nonfinite_steps_max
        if self._nonfinite >= limit:
            raise RunFailed(
                f"{limit} steps in a row had a non-finite loss or gradient; the weights are those "
                f"of step {self._step}; lower training.learning_rate or look at the rewards"
            )

    # ── versions ─────────────────────────────────────────────────────────────────────────────

    async def _publish(self, ranks: Ranks) -> "asyncio.Task[None]":
        """Start to copy the weights; the task ends when they are announced."""
        self._set_phase("publishing")
        began = time.perf_counter()
        segment = await self._spare_segment()
        copied = await self._in_thread(lambda: ranks.publish(self._publisher, segment))
        self._publish_s = time.perf_counter() - began
        version = version_id(self._lineage, self._step)
        announcement = self._announce(copied, version, segment)
        return self._tasks.create_task(announcement, name=f"announce {version}")

    def _look_for_segment(self) -> "asyncio.Task[Segment]":
        """Find the next segment while a step is trained, so that nobody waits for it then."""
        if self._spare is None:
            self._spare = self._tasks.create_task(self._free_segment(), name="choose segment")
        return self._spare

    async def _spare_segment(self) -> Segment:
        segment = await self._look_for_segment()
        self._spare = None
        return segment

    async def _free_segment(self) -> Segment:
        patience_s = self._runtime.config.coordinator.apply_timeout_s + SEGMENT_MARGIN_S
        deadline = self._now() + patience_s
        while (segment := self._publisher.choose(await self._peers.segments_in_use())) is None:
            if self._now() > deadline:
                raise RunFailed(f"every weight segment was in use for {patience_s:g} s")
            await asyncio.sleep(POLL_S)
        return segment

    async def _announce(
        self, copied: "Future[list[float]]", version: int, segment: Segment
    ) -> None:
        loop = asyncio.get_running_loop()
        canary = await loop.run_in_executor(None, copied.result, 2 * COPY_TIMEOUT_S)
        async with self._announcement:
            await self._peers.publish(version, str(segment.path), canary)
            self._announced = (version, segment, canary)
        self._membership.applied_version = version
        log.info("version.published", policy_version=version, duration_s=self._publisher.copy_s)

    async def _watch_announcement(self) -> None:
        """Announce the current version again to a coordinator that was restarted without it."""
        missing = NO_VERSION
        while True:
            await asyncio.sleep(self._runtime.config.coordinator.lease_s)
            async with self._announcement:
                version, segment, canary = self._announced or (NO_VERSION, None, [])
                if segment is None or self._membership.version >= version:
                    missing = NO_VERSION
                elif missing != version:  # The heartbeat may just be older; look again.
                    missing = version
                else:
                    await self._peers.publish(version, str(segment.path), canary)
                    log.info(
                        "version.published", policy_version=version, reason="coordinator_restarted"
                    )

    # ── the rest ─────────────────────────────────────────────────────────────────────────────

    async def _save(self, ranks: Ranks) -> None:
        """Checkpoint a step that the scheduler has recorded; no other could be resumed from."""
        if self._step != self._recorded or self._step == self._saved:
            return
        config = self._runtime.config
        contents = checkpoint.Contents(
            step=self._step,
            lineage=self._lineage,
            config=blake3.blake3(config.model_dump_json().encode()).hexdigest(),
        )

        def save() -> None:
            checkpoint.save(
                self._runtime.run_dir,
                contents,
                source=Path(config.model.path),
                model=ranks.weights(),
                optimizer=ranks.optimizer_state(),
            )
            checkpoint.prune(self._runtime.run_dir, self._training.checkpoints_kept)

        await self._in_thread(save)
        self._saved = self._step

    def _note_departure(self, update: MemberUpdate) -> None:
        if update.gone:
            self._crew.lost(update.member.peer)

    def _status(self, sender: str, request: GetTrainerStatus) -> TrainerStatus:
        return TrainerStatus(
            step=self._step, phase=self._phase, phase_s=self._now() - self._phase_began
        )

    def _set_phase(self, phase: str) -> None:
        self._phase, self._phase_began = phase, self._now()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run torch work where it blocks nobody. Its collectives have time-outs of their own."""
        return await asyncio.get_running_loop().run_in_executor(self._train_thread, work)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _rounded(metrics: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items()}
