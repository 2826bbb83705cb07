"""The life of one trajectory on one worker, as a coroutine.

Open a session, then turn by turn: decode, parse, call the tool, append what it returned, report
the turn. Then ask for the reward and report the last turn with the result. It ends with a reward,
with a typed failure, or without a word when the trajectory is no longer wanted here.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from common.errors import EngineError, GradeError, ToolError
from common.messages.rollout import AssignTrajectory
from common.messages.scheduler import (
    MoveReport,
    TrajectoryResult,
    TurnFinished,
    TurnRecorded,
)
from common.messages.tools import (
    SessionOpened,
    ToolReturned,
    ToolSpec,
    TranscriptTurn,
)
from common.trajectory import (
    FailureKind,
    StopReason,
    ToolStatus,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from services.rollout.engine import Engine, FinishReason, GenerateRequest, Generation
from services.rollout.equipment import Equipment
from services.rollout.limits import Progress, next_budget, why_cut
from services.rollout.moves import Arrival, Company, company
from services.rollout.parsers import MalformedCall, ParsedTurn, error_line, with_ignored
from services.rollout.tool_client import SessionRef

log = structlog.get_logger()

INLINE_TOKENS_MAX = 16_384
"""Longer transcripts are decoded in a thread: the event loop must go on."""
PROBE_TIMEOUT_S = 30.0
"""For an engine that failed a request to show that it still works."""


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """What one turn added to the context."""

    action: Sequence[int]
    observation: Sequence[int]


@dataclass(slots=True)
class TurnDraft:
    """What is known of the turn at work; reported as it stands when the trajectory fails."""

    generation: Generation | None = None
    company: Company = field(default_factory=Company)
    move: MoveReport | None = None
    observation: list[int] = field(default_factory=list[int])
    tool: str = ""
    tool_status: ToolStatus | None = None
    tool_latency_s: float = 0.0


def turn_seed(trajectory_seed: int, turn: int) -> int:
    """Sampling seed of one turn: 63 bits, equal for equal arguments in any process."""
    digest = hashlib.blake2b(f"{trajectory_seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Trajectory:
    """One assignment: the trajectory from the turn it was assigned with to its end here.

    Raises:
        ValueError: when made of tokens or turns that contradict themselves.
    """

    def __init__(self, assignment: AssignTrajectory, equipment: Equipment) -> None:
        self._assignment = assignment
        self.lease = assignment.lease
        """Number under which this worker holds it; grows when a move was taken back."""
        self.reporting = False
        """A turn is on its way to the scheduler, whose reply says who goes on."""
        self.begun = assignment.turn > 0
        """A turn of it is journaled, so a cache of its context is worth something."""
        self._with = equipment
        self._turn = assignment.turn
        later = [unpack_tokens(tokens) for tokens in assignment.later_tokens]
        self._prompt = unpack_tokens(assignment.prompt_tokens)
        self._turns = [
            TurnTokens(action, observation)
            for action, observation in zip(later[::2], later[1::2], strict=True)
        ]
        if len(self._turns) != self._turn:
            raise ValueError(f"{len(self._turns)} turns before turn {self._turn}")
        self._context = [*self._prompt, *(token for part in later for token in part)]
        self._arrival: Arrival | None = None
        """Until the first turn tells of it."""
        self._session: SessionRef | None = None
        self._tools: list[ToolSpec] = []
        self._draft = TurnDraft()
        self._blamed = FailureKind.ENVIRONMENT
        """Who failed, if something does that nobody expects."""

    async def run(self, on_finished: Callable[[], object] = lambda: None) -> None:
        """Work on the trajectory until it ends, moves away or is not wanted any more.

        Args:
            on_finished: Called when the result is recorded and only the session is left to close.

        Raises:
            EngineError: the engine works no more; the process must end, and the trajectories go
                on elsewhere.
        """
        started_s = asyncio.get_running_loop().time()
        try:
            result = await self.boundary()
            if result is None:
                return
            recorded = await self._record(result)
            on_finished()
            if recorded and self._session:  # Else whoever has the trajectory now may need it.
                await self._with.tools.close(self._session)
            self._report(result, asyncio.get_running_loop().time() - started_s)
        finally:
            if self._session is not None:
                self._with.tools.forget(self._session)

    async def boundary(self) -> TrajectoryResult | None:
        """Turn every way in which one trajectory can fail into a typed result.

        Nothing else in the worker catches what it does not expect: one broken trajectory must
        not take the others with it.
        """
        try:
            return await self._play()
        except ToolError as error:
            return _failed(FailureKind.TOOL, str(error))
        except GradeError as error:
            return _failed(FailureKind.GRADER, str(error))
        except EngineError as error:
            if not await _works(self._with.engine, self._context):
                raise
            return _failed(FailureKind.ENGINE, str(error))
        except Exception as error:
            log.exception("trajectory.failed", **self._ids(), reason=self._blamed.value)
            return _failed(self._blamed, f"{type(error).__name__}: {error}")

    async def _play(self) -> TrajectoryResult | None:
        if self._turn:  # First of all: the worker that it comes from may be leaving.
            self._arrival = await self._arrive()
        opened = await self._open()
        if opened.failure is not None:
            return _failed(opened.failure, opened.detail)
        self._tools = opened.tools
        if not self._turn:
            self._prompt = await self._with.renderer.prompt(opened.messages, opened.tools)
            self._context = list(self._prompt)
        while True:
            budget = next_budget(self._with.limits, self._progress())
            if isinstance(budget, StopReason):
                return await self._end_before_turn(budget)
            reason = await self._play_turn(budget)
            if reason is not None:
                return await self._grade(reason)
            recorded = await self._record(None)
            if recorded is None or not recorded.go_on or self._with.draining():
                return None
            self._turn += 1
            self._draft = TurnDraft()

    async def _arrive(self) -> Arrival:
        """Get the cache of all but the last observation, which no engine has seen yet."""
        asked, now_s = self._assignment, asyncio.get_running_loop().time
        started_s = now_s()
        seen = len(self._context) - len(self._turns[-1].observation)
        miss = await self._with.caches.take_over(
            asked.kv_source, asked.trajectory_id, self._context[:seen]
        )
        return Arrival(miss, now_s() - started_s)

    async def _open(self) -> SessionOpened:
        asked, tools = self._assignment, self._with.tools
        if asked.turn:
            session = SessionRef(asked.session_id, asked.tool_server)
            opened = await tools.resume(session, asked.environment, asked.task)
            self._session = session
            return opened
        # The number of the placement makes it a new session: whoever had the trajectory before
        # may still be at work in the old one.
        session_id = f"{asked.trajectory_id}-{asked.lease}"
        self._session, opened = await tools.open(session_id, asked.environment, asked.task)
        return opened

    async def _end_before_turn(self, reason: StopReason) -> TrajectoryResult:
        if self._turns:
            return await self._grade(reason)
        tokens, most = len(self._prompt), self._with.limits.context_tokens_max
        detail = f"the prompt has {tokens} tokens; the context holds {most} with the answer"
        return _failed(FailureKind.ENVIRONMENT, detail)

    async def _play_turn(self, budget: int) -> StopReason | None:
        """One turn; the reason if it was the last."""
        before = self._progress()
        generation = await self._generate(budget)
        text = self._with.renderer.action_text(generation.tokens)
        parsed = self._with.parser.parse(text, self._tools)
        cut = generation.finish_reason is FinishReason.LENGTH
        if parsed.call is None or (cut and isinstance(parsed.call, MalformedCall)):
            self._turns.append(TurnTokens(generation.tokens, ()))
            return why_cut(self._with.limits, before) if cut else StopReason.ANSWERED
        self._blamed = FailureKind.TOOL
        returned = await self._call(parsed)
        content = with_ignored(returned.content, parsed.ignored_calls)
        observation = await self._with.renderer.observation(generation.tokens, content)
        self._turns.append(TurnTokens(generation.tokens, observation))
        self._context += observation
        reason = self._why_last(done=returned.done)
        if reason is None:
            self._draft.observation = observation
        return reason

    async def _generate(self, budget: int) -> Generation:
        self._blamed = FailureKind.ENGINE
        asked, engine = self._assignment, self._with.engine
        before = engine.load()
        generation = await self._with.sampler.generate(
            GenerateRequest(
                request_id=f"{asked.trajectory_id}/{self.lease}/{self._turn}",
                context=tuple(self._context),
                max_tokens=budget,
                temperature=self._with.temperature,
                seed=turn_seed(asked.seed, self._turn),
                stop=self._with.parser.stop_strings(self._tools),
            )
        )
        if generation.finish_reason is FinishReason.ABORTED:
            raise EngineError("the engine aborted the generation by itself")
        self._draft.generation = generation
        self._draft.company = company(before, engine.load())
        if self._arrival:
            tokens, queue_s = len(self._context), generation.queue_s
            self._draft.move = self._arrival.report(context_tokens=tokens, queue_s=queue_s)
            self._arrival = None
        self._context += generation.tokens
        return generation

    async def _call(self, parsed: ParsedTurn) -> ToolReturned:
        draft, call = self._draft, parsed.call
        if call is None or isinstance(call, MalformedCall):
            message = call.message if call else ""
            draft.tool_status = ToolStatus.MALFORMED
            return ToolReturned(
                status=draft.tool_status, content=error_line(message), latency_s=0.0
            )
        assert self._session is not None
        draft.tool = call.tool
        draft.tool_status = ToolStatus.INFRASTRUCTURE  # Until it has answered.
        started_s = asyncio.get_running_loop().time()
        try:
            returned = await self._with.tools.call(
                self._session, str(self._turn), call.tool, call.arguments
            )
        finally:
            draft.tool_latency_s = asyncio.get_running_loop().time() - started_s
        draft.tool_status = returned.status
        return returned

    def _why_last(self, *, done: bool) -> StopReason | None:
        if done:
            return StopReason.ENVIRONMENT
        budget = next_budget(self._with.limits, self._progress())
        return budget if isinstance(budget, StopReason) else None

    async def _grade(self, reason: StopReason) -> TrajectoryResult:
        self._blamed = FailureKind.GRADER
        assert self._session is not None
        if len(self._context) <= INLINE_TOKENS_MAX:
            transcript = self._transcript()
        else:
            transcript = await asyncio.to_thread(self._transcript)
        graded = await self._with.tools.grade(self._session, transcript, reason.value)
        if graded.failure is not None:
            return _failed(graded.failure, graded.detail)
        return TrajectoryResult(stop_reason=reason, reward=graded.reward, scores=graded.scores)

    def _transcript(self) -> list[TranscriptTurn]:
        """All turns as text, of earlier workers too: always decoded from the tokens."""
        renderer = self._with.renderer
        return [
            TranscriptTurn(
                action=renderer.action_text(turn.action),
                observation=renderer.text(turn.observation),
            )
            for turn in self._turns
        ]

    async def _record(self, result: TrajectoryResult | None) -> TurnRecorded | None:
        self.reporting = True
        try:
            recorded = await self._with.journal.record(self._turn_finished(result))
        finally:
            self.reporting = False
        if recorded:
            self.begun = True
            self.lease = recorded.lease or self.lease
        return recorded

    def _turn_finished(self, result: TrajectoryResult | None) -> TurnFinished:
        asked, draft, session = self._assignment, self._draft, self._session
        made = draft.generation
        return TurnFinished(
            trajectory_id=asked.trajectory_id,
            lease=self.lease,
            turn=self._turn,
            prompt_tokens=b"" if self._turn else pack_tokens(self._prompt),
            session_id=session.session_id if session else "",
            tool_server=session.server if session else "",
            action_tokens=pack_tokens(made.tokens if made else ()),
            action_logprobs=pack_logprobs(made.logprobs if made else ()),
            action_versions=pack_tokens(made.versions if made else ()),
            observation_tokens=pack_tokens(draft.observation),
            tool=draft.tool,
            tool_status=draft.tool_status,
            tool_latency_s=draft.tool_latency_s,
            decode_s=made.decode_s if made else 0.0,
            queue_s=made.queue_s if made else 0.0,
            result=result,
            running=draft.company.running,
            kv_tokens_used=draft.company.kv_tokens_used,
            move=draft.move,
        )

    def _progress(self) -> Progress:
        return Progress(
            turns=len(self._turns),
            sampled_tokens=sum(len(turn.action) for turn in self._turns),
            context_tokens=len(self._context),
        )

    def _ids(self) -> dict[str, str | int]:
        asked = self._assignment
        return {
            "trajectory_id": asked.trajectory_id,
            "group_id": asked.group_id,
            "lease": self.lease,
            "turn": self._turn,
        }

    def _report(self, result: TrajectoryResult, duration_s: float) -> None:
        """One line per outcome; what failed is in the words of whoever failed."""
        why = result.failure or result.stop_reason
        report = log.warning if result.failure else log.info
        report(
            "trajectory.finished",
            **self._ids(),
            reason=why.value if why else "",
            detail=result.detail,
            reward=result.reward,
            tokens=self._progress().sampled_tokens,
            duration_s=round(duration_s, 3),
        )


async def _works(engine: Engine, context: Sequence[int]) -> bool:
    """Whether an engine that failed one request can still be used at all."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await engine.score((context[0], context[0]))
    except (EngineError, TimeoutError):
        return False
    return True


def _failed(kind: FailureKind, detail: str) -> TrajectoryResult:
    return TrajectoryResult(stop_reason=None, reward=None, failure=kind, detail=detail)
