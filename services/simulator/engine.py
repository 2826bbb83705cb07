"""One simulated engine: continuous batching, iteration by iteration, without paying for each.

Every iteration each decoding request samples a token, and what is left of the iteration's token
budget computes contexts, first come first served. While the batch does not change, iteration
times rise linearly (with the KV tokens), so any number of them has a closed form; the model jumps
from one change of the batch to the next: a finish, the end of a context, a full cache, an arrival.
Its results are those of stepping through the iterations one by one.

Cache is given as contexts are computed and tokens sampled, and a request is admitted when its next
chunk fits. When running requests outgrow the cache, the newest is preempted: it goes to the head of
the queue and its context is computed again. So an engine that is given more than it can hold keeps
computing contexts that it then throws away. Source: vLLM's scheduler, without full reservation.
"""

import heapq
import math
from collections import deque

from services.simulator.costs import EngineSpeed
from services.simulator.engine_cache import KvCache
from services.simulator.engine_jobs import Finished, Job, Request, Segment


class EngineModel:
    """One engine. Times are the caller's; they must not go back."""

    def __init__(self, speed: EngineSpeed, *, kv_tokens: int, slots: int) -> None:
        assert slots < speed.chunk_tokens, "every request in the batch must be able to sample"
        self.speed = speed
        self.kv_tokens = kv_tokens
        self.slots = slots
        self.decode_tokens = 0
        """Sampled so far."""
        self.prefill_tokens = 0
        """Context tokens computed so far."""
        self.preemptions = 0
        self.iterations = 0
        self.busy_s = 0.0
        self._cache = KvCache(kv_tokens)
        self._now = 0.0
        """Start of the next iteration, or of the one that runs."""
        self._segment: Segment | None = None
        self._pause_s = 0.0
        self._version = 0
        self._admitted = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        """By order of admission."""
        self._prefilling: deque[Request] = deque()
        self._decoding = 0
        self._context_sum = 0
        """KV tokens of the decoding requests."""
        self._ends: list[tuple[int, int, Request]] = []
        """Heap of (iteration count at its end, order, request); stale when the order differs."""
        self._requests: dict[str, Request] = {}
        """By trajectory, which has one at a time."""
        self._leaving: list[Request] = []
        self._finished: list[Finished] = []

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are not in the batch yet, or not any more."""
        return len(self._waiting)

    @property
    def kv_tokens_used(self) -> int:
        """By requests in the batch; what is only kept in case it is wanted does not count."""
        return self._cache.used

    def kept_tokens(self, trajectory_id: str) -> int:
        """Context that is cached for a trajectory whose tool runs, its prompt included."""
        return self._cache.kept_for(trajectory_id)

    def next_event(self) -> float:
        """When to advance to next: nothing finishes before. Infinite when idle."""
        return self._segment.end_s if self._segment else math.inf

    def advance(self, now: float) -> list[Finished]:
        """Run until `now`; everything that finished since the last call, in order of time."""
        self._run(now)
        finished, self._finished = self._finished, []
        return finished

    def submit(self, job: Job, now: float) -> None:
        """Queue a job; it joins the first iteration that starts at `now` or later and has room.

        Its context and output together must fit into an empty cache.
        """
        assert 1 <= job.context_tokens <= self.kv_tokens - job.new_tokens, job
        assert job.new_tokens >= 1
        self._run(now)
        request = Request(job, now, job.context_tokens, job.new_tokens)
        assert job.trajectory_id not in self._requests, job
        self._requests[job.trajectory_id] = request
        self._waiting.append(request)
        if len(self._waiting) == 1 and len(self._running) < self.slots:
            self._interrupt(now)

    def arrive_kv(self, trajectory_id: str, group_id: str, context_tokens: int, now: float) -> None:
        """A trajectory's KV cache came by transfer: it is cached here now."""
        self._run(now)
        self._cache.arrive(trajectory_id, group_id, context_tokens)

    def leave(self, trajectory_id: str, now: float) -> None:
        """Forget a trajectory: what runs ends with the present iteration, what is kept is freed."""
        self._run(now)
        self._cache.forget(trajectory_id)
        request = self._requests.pop(trajectory_id, None)
        if request is None:
            return
        if request.order < 0:
            self._waiting.remove(request)
        else:
            self._leaving.append(request)
        self._interrupt(now)

    def new_version(self, now: float) -> None:
        """New weights: nothing is cached for later requests; running ones keep what they have."""
        self._run(now)
        self._version += 1
        self._cache.invalidate()

    def pause(self, now: float, seconds: float) -> None:
        """No iteration starts for so long, counted from the end of the present one."""
        self._run(now)
        self._pause_s += seconds
        self._interrupt(now)

    # -- the loop over segments -------------------------------------------------------------

    def _run(self, now: float) -> None:
        segment = self._segment
        while segment is not None and segment.end_s <= now:
            self._apply(segment, segment.iterations)
            self._now = segment.end_s
            segment = self._plan()
        if segment is None:
            self._now = max(self._now, now)
            return
        if segment.iterations > 1 and now > self._now:
            done = segment.whole_iterations(now - self._now)
            if done:
                self._now += self._apply(segment, done)

    def _interrupt(self, now: float) -> None:
        """Something changed: plan anew, after the iteration that runs if one does."""
        segment = self._segment
        if segment is not None and not segment.iterations:
            segment.end_s += self._pause_s
            self._pause_s = 0.0
            return
        if segment is None or self._now >= now:
            self._plan()
            return
        segment.iterations = 1
        segment.end_s = self._now + segment.first_s

    def _apply(self, segment: Segment, count: int) -> float:
        """Do `count` iterations of a segment. Returns their duration."""
        duration = segment.duration_s(count)
        segment.iterations -= count
        segment.first_s += segment.growth_s * count
        self.busy_s += duration
        self.iterations += count
        grown = self._decoding * count
        self.decode_tokens += grown
        self._context_sum += grown
        for request, chunk in segment.chunks:
            grown += request.compute(chunk * count)
            self.prefill_tokens += chunk * count
        self._cache.grow(grown)
        if not segment.iterations:
            if segment.chunks:
                self._end_prefills(segment)
            self._end_requests(segment.end_s)
        return duration

    def _end_prefills(self, segment: Segment) -> None:
        """Contexts that are complete have sampled their first token in the same iteration."""
        for request, _ in segment.chunks:
            if request.prefill_left:
                continue
            self._prefilling.popleft()
            if request.first_token_s < 0:
                request.first_token_s = segment.end_s
            request.decoding_since = self.iterations
            self.decode_tokens += 1
            self._decoding += 1
            self._context_sum += request.context_tokens
            end = self.iterations + request.new_tokens - 1
            heapq.heappush(self._ends, (end, request.order, request))

    def _end_requests(self, now: float) -> None:
        running, used = len(self._running), self._cache.used
        while self._next_end() == self.iterations:
            _, _, request = heapq.heappop(self._ends)
            self._stop_decoding(request)
            assert request.claim is not None
            if self._leaving and request in self._leaving:
                self._cache.release(request.claim)
                continue
            job = request.job
            del self._requests[job.trajectory_id]
            current = request.version == self._version
            self._cache.release(request.claim, keep_for=job.trajectory_id if current else "")
            self._finished.append(
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

    def _next_end(self) -> int | None:
        """Iteration count at which the next request finishes."""
        ends = self._ends
        while ends:
            end, order, request = ends[0]
            if order == request.order:
                return end
            heapq.heappop(ends)
        return None

    # -- what the next iterations do ----------------------------------------------------------

    def _plan(self) -> Segment | None:
        """Admit and preempt for the iteration that starts now, and see how long it stays so."""
        if self._pause_s:
            self._segment = Segment(self._now + self._pause_s, 0, 0.0, 0.0, [])
            self._pause_s = 0.0
            return self._segment
        for request in self._leaving:
            if request.order >= 0:
                self._remove(request)
        self._leaving.clear()
        preempted = False
        while True:
            chunks, budget = self._chunks()
            needed = self._decoding
            for request, chunk in chunks:
                needed += request.growth(chunk)
            if self._cache.used + needed <= self.kv_tokens:
                break
            self._preempt()
            preempted = True
        if self._waiting and not preempted:
            self._admit(chunks, budget, needed)
        self._segment = self._schedule(chunks, once=preempted) if self._running else None
        return self._segment

    def _chunks(self) -> tuple[list[tuple[Request, int]], int]:
        """How much each request in prefill computes in the next iteration, and what is left."""
        budget = self.speed.chunk_tokens - self._decoding
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            chunk = min(budget, request.prefill_left)
            chunks.append((request, chunk))
            budget -= chunk
            if not budget:
                break
        return chunks, budget

    def _admit(self, chunks: list[tuple[Request, int]], budget: int, needed: int) -> None:
        """Take in who waits, in order, while tokens of this iteration and cache are left."""
        cache = self._cache
        while self._waiting and budget > 0 and len(self._running) < self.slots:
            request = self._waiting[0]
            job, context = request.job, request.context_tokens
            offer = (job.trajectory_id, job.group_id, context, job.prompt_tokens)
            cached, taken = cache.offer(*offer)
            chunk = min(budget, context - cached)
            room = self.kv_tokens - cache.used - needed - taken
            if chunk > room:
                return
            self._waiting.popleft()
            request.admit(cache.claim(*offer), self._admitted, self._version)
            self._running[request.order] = request
            self._admitted += 1
            self._prefilling.append(request)
            chunks.append((request, chunk))
            budget -= chunk
            needed += request.growth(chunk)

    def _schedule(self, chunks: list[tuple[Request, int]], *, once: bool) -> Segment:
        """The longest segment that begins now; after a preemption the next iteration may admit."""
        decoding = self._decoding
        attended, prefilled = 0.0, 0
        for request, chunk in chunks:
            attended += chunk * (request.computed + chunk / 2)
            prefilled += chunk
        first_s = self.speed.iteration_s(
            decoding, self._context_sum, prefilled, attended, len(chunks)
        )
        growth_s = self.speed.kv_token_s * decoding
        iterations = 1
        if not once and (not chunks or (len(chunks) == 1 and chunks[0][0].steady(chunks[0][1]))):
            iterations = (self.kv_tokens - self._cache.used) // (decoding + prefilled)
            end = self._next_end()
            if end is not None:
                iterations = min(iterations, end - self.iterations)
            if chunks:
                request, chunk = chunks[0]
                iterations = min(iterations, (request.prefill_left - 1) // chunk)
                growth_s += self.speed.attend_s * chunk * chunk
        segment = Segment(0.0, iterations, first_s, growth_s, chunks)
        segment.end_s = self._now + segment.duration_s(iterations)
        return segment

    # -- leaving the batch ----------------------------------------------------------------------

    def _preempt(self) -> None:
        """The newest request goes back to the head of the queue; its context is lost."""
        request = self._running[next(reversed(self._running))]
        since = request.decoding_since
        self._remove(request)
        if since >= 0:
            sampled = 1 + self.iterations - since
            request.context_tokens += sampled
            request.new_tokens -= sampled
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(request)

    def _remove(self, request: Request) -> None:
        """Take a request out of the batch; nothing of it is kept but a prompt that is shared."""
        if request.decoding_since >= 0:
            self._stop_decoding(request)
        else:
            self._prefilling.remove(request)
            del self._running[request.order]
            request.order = -1
        assert request.claim is not None
        self._cache.release(request.claim)

    def _stop_decoding(self, request: Request) -> None:
        """Take a request that decodes out of the sums; its claim then has all that it holds."""
        assert request.claim is not None
        grown = self.iterations - request.decoding_since
        request.claim.own_tokens += grown
        self._decoding -= 1
        self._context_sum -= request.context_tokens + grown
        del self._running[request.order]
        request.order = -1
        request.decoding_since = -1
