"""The engine model against a reference that steps through every iteration."""

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.costs import EngineSpeed
from services.simulator.engine import EngineModel, Finished, Job
from services.simulator.engine_cache import KvCache
from services.simulator.engine_jobs import Request

SPEED = EngineSpeed(
    weights_s=0.0137,
    experts_s=0.0071,
    expert_share=0.11,
    decode_token_s=0.00031,
    prefill_token_s=0.00023,
    attend_s=1.7e-6,
    kv_token_s=2.3e-5,
    fixed_s=0.0041,
    token_s=1.3e-5,
    sequence_s=0.00017,
    chunk_tokens=48,
)
KV_TOKENS, SLOTS = 700, 5

Event = tuple[float, str, tuple[object, ...]]


class Reference:
    """The same engine, one iteration after the other, with nothing kept as a running sum."""

    def __init__(self) -> None:
        self.cache = KvCache(KV_TOKENS)
        self.waiting: deque[Request] = deque()
        self.batch: list[Request] = []
        self.leaving: list[Request] = []
        self.finished: list[Finished] = []
        self.version = self.iterations = self.preemptions = self.orders = 0
        self.decode_tokens = self.prefill_tokens = 0
        self.pause_s = self.busy_s = 0.0

    def run(self, events: list[Event]) -> None:
        left, now = deque(events), 0.0
        while left or self.waiting or self.batch:
            while (left and left[0][0] <= now) or self.pause_s:
                if left and left[0][0] <= now:
                    self.happen(*left.popleft())
                else:
                    now += self.pause_s
                    self.pause_s = 0.0
            chunks = self.plan()
            if not self.batch:
                assert not self.waiting
                now = max(now, left[0][0]) if left else now
                continue
            decoding = [r for r in self.batch if r.decoding_since >= 0]
            end = now + self.duration_s(decoding, chunks)
            while left and left[0][0] < end:
                self.happen(*left.popleft())
            self.busy_s += end - now
            now = end
            self.apply(decoding, chunks, now)

    def happen(self, now: float, what: str, arguments: tuple[object, ...]) -> None:
        if what == "submit":
            (job,) = arguments
            assert isinstance(job, Job)
            self.waiting.append(Request(job, now, job.context_tokens, job.new_tokens))
        elif what == "leave":
            self.cache.forget(str(arguments[0]))
            for request in list(self.waiting):
                if request.job.trajectory_id == arguments[0]:
                    self.waiting.remove(request)
            self.leaving += [r for r in self.batch if r.job.trajectory_id == arguments[0]]
        elif what == "new_version":
            self.version += 1
            self.cache.invalidate()
        elif what == "pause":
            self.pause_s += float(str(arguments[0]))
        else:
            trajectory_id, group_id, tokens = arguments
            self.cache.arrive(str(trajectory_id), str(group_id), int(str(tokens)))

    def plan(self) -> list[tuple[Request, int]]:
        for request in self.leaving:
            if request in self.batch:
                self.drop(request)
        self.leaving.clear()
        preempted = False
        while True:
            decoding = sum(r.decoding_since >= 0 for r in self.batch)
            chunks, budget = list[tuple[Request, int]](), SPEED.chunk_tokens - decoding
            for request in self.batch:
                chunk = min(budget, request.prefill_left)
                if chunk:
                    chunks.append((request, chunk))
                    budget -= chunk
            needed = decoding + sum(self.growth(*chunk) for chunk in chunks)
            if self.cache.used + needed <= KV_TOKENS:
                break
            self.preempt()
            preempted = True
        if not preempted:
            self.admit(chunks, budget, needed)
        return chunks

    def growth(self, request: Request, chunk: int) -> int:
        """Positions that it has no room for yet, one by one."""
        assert request.claim
        prompt = request.claim.prompt.tokens if request.claim.prompt else 0
        first = request.context_tokens - request.prefill_left
        room = range(prompt + request.claim.own_tokens)
        return sum(position not in room for position in range(first, first + chunk))

    def preempt(self) -> None:
        request = self.batch[-1]
        if request.decoding_since >= 0:
            sampled = 1 + self.iterations - request.decoding_since
            request.context_tokens += sampled
            request.new_tokens -= sampled
        self.drop(request)
        request.decoding_since = -1
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def admit(self, chunks: list[tuple[Request, int]], budget: int, needed: int) -> None:
        while self.waiting and budget > 0 and len(self.batch) < SLOTS:
            request, job = self.waiting[0], self.waiting[0].job
            context = request.context_tokens
            cached, taken = self.cache.offer(
                job.trajectory_id, job.group_id, context, job.prompt_tokens
            )
            chunk = min(budget, context - cached)
            if self.cache.used + needed + taken + chunk > KV_TOKENS:
                return
            self.waiting.popleft()
            request.claim = self.cache.claim(
                job.trajectory_id, job.group_id, context, job.prompt_tokens
            )
            assert request.claim.cached_tokens == cached
            request.prefill_left = context - cached
            request.version = self.version
            self.batch.append(request)
            chunks.append((request, chunk))
            budget -= chunk
            needed += self.growth(request, chunk)

    def held(self, request: Request) -> int:
        return request.context_tokens + self.iterations - request.decoding_since

    def duration_s(self, decoding: list[Request], chunks: list[tuple[Request, int]]) -> float:
        attended = 0.0
        for request, chunk in chunks:
            before = request.context_tokens - request.prefill_left
            attended += sum(before + token + 0.5 for token in range(chunk))
        return SPEED.iteration_s(
            len(decoding),
            sum(self.held(request) for request in decoding),
            sum(chunk for _, chunk in chunks),
            attended,
            len(chunks),
        )

    def apply(self, decoding: list[Request], chunks: list[tuple[Request, int]], now: float) -> None:
        self.iterations += 1
        self.cache.grow(len(decoding) + sum(self.growth(*chunk) for chunk in chunks))
        for request in decoding:
            assert request.claim
            request.claim.own_tokens += 1
        self.decode_tokens += len(decoding)
        for request, chunk in chunks:
            assert request.claim
            request.claim.own_tokens += self.growth(request, chunk)
            request.prefill_left -= chunk
            request.prefill_tokens += chunk
            self.prefill_tokens += chunk
            if not request.prefill_left:
                self.decode_tokens += 1
                request.decoding_since = self.iterations
                if request.first_token_s < 0:
                    request.first_token_s = now
        running, used = len(self.batch), self.cache.used
        for request in list(self.batch):
            sampled = 1 + self.iterations - request.decoding_since
            if request.decoding_since >= 0 and sampled == request.new_tokens:
                self.finish(request, now, running, used)

    def finish(self, request: Request, now: float, running: int, used: int) -> None:
        assert request.claim
        self.batch.remove(request)
        gone = request in self.leaving
        keep = request.job.trajectory_id if request.version == self.version and not gone else ""
        self.cache.release(request.claim, keep_for=keep)
        if not gone:
            job = request.job
            self.finished.append(
                Finished(
                    job.job_id,
                    job.trajectory_id,
                    request.submitted_s,
                    request.first_token_s,
                    now,
                    request.prefill_tokens,
                    request.preemptions,
                    running,
                    used,
                )
            )

    def drop(self, request: Request) -> None:
        assert request.claim
        self.batch.remove(request)
        self.cache.release(request.claim)


@st.composite
def scripts(draw: st.DrawFn) -> list[Event]:
    """Turns of a few trajectories with all that can happen to an engine in between."""
    events: list[Event] = []
    now, contexts = 0.0, dict[int, int]()
    for number in range(draw(st.integers(1, 25))):
        now += draw(st.sampled_from([0.00123, 0.0371, 0.417, 3.19])) * draw(st.floats(0.5, 1.5))
        what = draw(st.sampled_from(["submit"] * 6 + ["leave", "new_version", "pause", "arrive"]))
        trajectory = draw(st.integers(0, 11))
        name, group = f"t{trajectory}", f"g{trajectory // 3}"
        prompt = 20 + 10 * (trajectory // 3)
        if what == "submit" and trajectory not in contexts:
            context = prompt + draw(st.integers(0, 250))
            new = draw(st.integers(1, 300))
            contexts[trajectory] = context
            job = Job(f"j{number}", name, group, context, prompt, new)
            events.append((now, "submit", (job,)))
        elif what == "leave":
            contexts.pop(trajectory, None)
            events.append((now, "leave", (name,)))
        elif what == "pause":
            events.append((now, "pause", (draw(st.floats(0.001, 2.0)),)))
        elif what == "new_version":
            events.append((now, "new_version", ()))
        elif what == "arrive" and trajectory not in contexts:
            events.append((now, "arrive", (name, group, draw(st.integers(prompt, 600)))))
    return events


def run_model(model: EngineModel, events: list[Event], *, eager: bool) -> list[Finished]:
    """Drive the model as a world would: by its own events, or by those from outside alone."""
    finished: list[Finished] = []
    for now, what, arguments in events:
        while eager and model.next_event() < now:
            finished += model.advance(model.next_event())
        finished += model.advance(now)
        match what, arguments:
            case "submit", (Job() as job,):
                model.submit(job, now)
            case "leave", (str() as trajectory_id,):
                model.leave(trajectory_id, now)
            case "new_version", _:
                model.new_version(now)
            case "pause", (float() as seconds,):
                model.pause(now, seconds)
            case _, (str() as trajectory_id, str() as group_id, int() as tokens):
                model.arrive_kv(trajectory_id, group_id, tokens, now)
            case _:
                raise AssertionError(what)
    while model.next_event() < math.inf:
        finished += model.advance(model.next_event())
    return finished


@pytest.mark.slow
@given(scripts(), st.booleans())
def test_jumping_over_iterations_gives_what_stepping_through_them_gives(
    events: list[Event], eager: bool
) -> None:
    reference = Reference()
    reference.run(events)
    model = EngineModel(SPEED, kv_tokens=KV_TOKENS, slots=SLOTS)
    finished = run_model(model, events, eager=eager)
    assert [f.job_id for f in finished] == [f.job_id for f in reference.finished]
    for ours, theirs in zip(finished, reference.finished, strict=True):
        assert ours.first_token_s == pytest.approx(theirs.first_token_s, rel=1e-9)
        assert ours.finished_s == pytest.approx(theirs.finished_s, rel=1e-9)
        assert ours.submitted_s == theirs.submitted_s
        assert ours.prefill_tokens == theirs.prefill_tokens
        assert ours.preemptions == theirs.preemptions
        assert (ours.running, ours.kv_tokens_used) == (theirs.running, theirs.kv_tokens_used)
    assert model.iterations == reference.iterations
    assert model.preemptions == reference.preemptions
    assert model.decode_tokens == reference.decode_tokens
    assert model.prefill_tokens == reference.prefill_tokens
    assert model.busy_s == pytest.approx(reference.busy_s, rel=1e-9)
    assert (model.running, model.waiting, model.kv_tokens_used) == (0, 0, 0)
