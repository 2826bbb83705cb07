"""Rollouts without a scheduler: engines that are given their share and left alone with it."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from services.simulator.costs import engine_speed, kv_capacity_tokens
from services.simulator.devices import A800, QWEN3_14B
from services.simulator.engine import EngineModel, Job
from services.simulator.traces import TraceTrajectory

PROMPT_TOKENS = 150
"""Where only total lengths are given."""
SLOTS = 1_024
"""No limit of the batch but the cache."""
WARM_UP = 0.25
"""Of a batch, finished before a sustained rate is measured."""


def engine_of(tensor_parallel: int) -> EngineModel:
    """Qwen3-14B on so many A800 of one node."""
    return EngineModel(
        engine_speed(QWEN3_14B, A800, tensor_parallel),
        kv_tokens=kv_capacity_tokens(QWEN3_14B, A800, tensor_parallel),
        slots=SLOTS,
    )


def lengths_job(name: str, sampled: int, left: int) -> Job:
    """A request with a short prompt of its own that has sampled some of its output already."""
    return Job(name, name, name, PROMPT_TOKENS + sampled, PROMPT_TOKENS, left)


def batch_s(lengths: Sequence[int], tensor_parallel: int) -> float:
    """Seconds until one engine has finished requests of these total lengths, all there at once."""
    engine = engine_of(tensor_parallel)
    for number, length in enumerate(lengths):
        engine.submit(lengths_job(str(number), 0, length - PROMPT_TOKENS), 0.0)
    end_s = 0.0
    while engine.next_event() < math.inf:
        end_s = engine.next_event()
        engine.advance(end_s)
    return end_s


@dataclass(frozen=True, slots=True)
class Sustained:
    """What an engine keeps up with a batch that is filled up again and again."""

    tokens_per_s: float
    preemptions: int


def sustained(
    tensor_parallel: int, batch: int, shortest: int, longest: int, random: Random
) -> Sustained:
    """Keep `batch` requests in one engine, their total lengths uniform in a range.

    The first ones are somewhere on their way, so that they do not end together; the rate is
    measured from a quarter of a batch finished to a whole one.
    """
    engine = engine_of(tensor_parallel)
    submitted = finished = tokens = 0
    since_s = now = 0.0
    while finished < batch:
        while submitted - finished < batch:
            new = random.randint(shortest, longest) - PROMPT_TOKENS
            sampled = int(random.random() * new) if submitted < batch else 0
            engine.submit(lengths_job(str(submitted), sampled, new - sampled), now)
            submitted += 1
        now = engine.next_event()
        for done in engine.advance(now):
            engine.leave(done.trajectory_id, now)
            finished += 1
            if finished == int(WARM_UP * batch):
                tokens, since_s = engine.decode_tokens, now
    return Sustained((engine.decode_tokens - tokens) / (now - since_s), engine.preemptions)


def trajectories_s(trajectories: Sequence[TraceTrajectory], tensor_parallel: int) -> list[float]:
    """Seconds that each trajectory takes, turns and tools, when one engine gets all at once."""
    engine = engine_of(tensor_parallel)
    by_id = {trajectory.trajectory_id: trajectory for trajectory in trajectories}
    turns, contexts = dict.fromkeys(by_id, 0), {t: by_id[t].prompt_tokens for t in by_id}
    returning = [(0.0, name) for name in by_id]
    ends: list[float] = []
    while len(ends) < len(by_id):
        now = engine.next_event()
        if returning and returning[0][0] < now:
            now, name = heapq.heappop(returning)
            done = engine.advance(now)
            engine.submit(_turn(by_id[name], turns[name], contexts[name]), now)
        else:
            done = engine.advance(now)
        for finished in done:
            name = finished.trajectory_id
            turn = by_id[name].turns[turns[name]]
            turns[name] += 1
            contexts[name] += turn.output_tokens + turn.observation_tokens
            if turns[name] == len(by_id[name].turns):
                ends.append(now)
                engine.leave(name, now)
            else:
                heapq.heappush(returning, (now + (turn.latency_s or 0.0), name))
    return ends


def _turn(trajectory: TraceTrajectory, turn: int, context_tokens: int) -> Job:
    return Job(
        trajectory.trajectory_id,
        trajectory.trajectory_id,
        trajectory.group_id,
        context_tokens,
        trajectory.prompt_tokens,
        trajectory.turns[turn].output_tokens,
    )
