"""The cache of a simulated engine, and what callers see of it."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.simulator.costs import engine_speed
from services.simulator.devices import A800, QWEN3_14B
from services.simulator.engine import EngineModel, Finished, Job
from services.simulator.engine_cache import Claim, KvCache


def engine(kv_tokens: int = 10_000) -> EngineModel:
    return EngineModel(engine_speed(QWEN3_14B, A800), kv_tokens=kv_tokens, slots=8)


def job(trajectory: str, context: int, new: int = 10, group: str = "g", prompt: int = 100) -> Job:
    return Job(f"{trajectory}/{context}", trajectory, group, context, prompt, new)


def drain(model: EngineModel) -> list[Finished]:
    finished: list[Finished] = []
    while model.next_event() < math.inf:
        finished += model.advance(model.next_event())
    return finished


def test_a_context_stays_cached_while_its_tool_runs() -> None:
    model = engine()
    model.submit(job("t0", 1_000), 0.0)
    drain(model)
    assert model.kept_tokens("t0") == 1_009
    model.submit(job("t0", 1_060), 5.0)
    (finished,) = drain(model)
    assert finished.prefill_tokens == 51


def test_siblings_share_the_prompt() -> None:
    model = engine()
    model.submit(job("t0", 1_000, prompt=1_000), 0.0)
    model.submit(job("t1", 1_000, prompt=1_000), 0.0)
    assert sorted(finished.prefill_tokens for finished in drain(model)) == [1, 1_000]


def test_new_weights_make_later_requests_compute_everything() -> None:
    model = engine()
    model.submit(job("t0", 1_000), 0.0)
    model.submit(job("t1", 500, new=4_000), 0.0)
    model.advance(1.0)
    model.new_version(1.0)
    assert model.kept_tokens("t0") == 0
    model.submit(job("t0", 1_060), 2.0)
    first, second = drain(model)
    assert (first.trajectory_id, first.prefill_tokens) == ("t0", 1_060)
    assert second.prefill_tokens == 400
    assert model.kept_tokens("t1") == 0


def test_what_came_by_transfer_is_not_computed() -> None:
    model = engine()
    model.arrive_kv("t0", "g", 4_000, 0.0)
    model.submit(job("t0", 4_050), 0.0)
    (finished,) = drain(model)
    assert finished.prefill_tokens == 50


def test_leftovers_give_way_least_recently_used_first() -> None:
    model = engine(kv_tokens=3_000)
    for number in range(3):
        model.submit(job(f"t{number}", 900, group=f"g{number}"), 10.0 * number)
        drain(model)
    model.submit(job("t3", 600, group="g3"), 50.0)
    drain(model)
    assert [model.kept_tokens(f"t{number}") > 0 for number in range(4)] == [0, 1, 1, 1]


def test_a_trajectory_that_leaves_is_forgotten() -> None:
    model = engine()
    model.submit(job("t0", 1_000, new=500), 0.0)
    model.submit(job("t1", 1_000, group="h"), 0.0)
    model.advance(1.0)
    model.leave("t0", 1.0)
    assert [finished.trajectory_id for finished in drain(model)] == []
    assert (model.running, model.kv_tokens_used, model.kept_tokens("t0")) == (0, 0, 0)
    model.leave("nobody", 99.0)


def test_a_pause_delays_what_runs() -> None:
    plain, paused = engine(), engine()
    for model in (plain, paused):
        model.submit(job("t0", 1_000, new=100), 0.0)
        model.advance(0.5)
    paused.pause(0.5, 2.0)
    (on_time,), (late,) = drain(plain), drain(paused)
    assert math.isclose(late.finished_s, on_time.finished_s + 2.0)


def test_an_engine_with_too_much_throws_contexts_away() -> None:
    model = engine(kv_tokens=4_000)
    for number in range(4):
        model.submit(job(f"t{number}", 900, new=2_000, group=f"g{number}"), 0.0)
    finished = drain(model)
    assert len(finished) == 4
    assert model.preemptions == sum(f.preemptions for f in finished) > 0
    assert sum(f.prefill_tokens for f in finished) > 4 * 900


steps = st.tuples(
    st.sampled_from(["claim", "grow", "keep", "drop", "arrive", "forget", "invalidate"]),
    st.integers(0, 8),
    st.integers(1, 300),
)


def take_step(cache: KvCache, running: dict[int, Claim], step: tuple[str, int, int]) -> None:
    what, number, tokens = step
    name, group, prompt = f"t{number}", f"g{number % 3}", 20 + number % 3
    if what == "claim" and number not in running:
        context = (name, group, prompt + tokens, prompt)
        cached, taken = cache.offer(*context)
        if cache.used + taken <= cache.kv_tokens:
            used = cache.used
            running[number] = cache.claim(*context)
            assert (running[number].cached_tokens, cache.used - used) == (cached, taken)
    elif what == "grow" and number in running and cache.used + tokens <= cache.kv_tokens:
        running[number].own_tokens += tokens
        cache.grow(tokens)
    elif what in {"keep", "drop"} and number in running:
        cache.release(running.pop(number), keep_for=name if what == "keep" else "")
    elif what == "arrive" and number not in running:
        cache.arrive(name, group, prompt + tokens)
    elif what == "forget":
        cache.forget(name)
    elif what == "invalidate":
        cache.invalidate()


@given(st.lists(steps, max_size=60))
def test_no_order_of_events_loses_or_overcommits_cache(script: list[tuple[str, int, int]]) -> None:
    cache = KvCache(700)
    running: dict[int, Claim] = {}
    for step in script:
        take_step(cache, running, step)
        prompts = {id(c.prompt): c.prompt.tokens for c in running.values() if c.prompt}
        own = sum(claim.own_tokens for claim in running.values())
        assert cache.used == own + sum(prompts.values())
        assert cache.kept >= 0
        assert cache.used + cache.kept <= cache.kv_tokens
    for claim in running.values():
        cache.release(claim)
    cache.invalidate()
    assert (cache.used, cache.kept) == (0, 0)
