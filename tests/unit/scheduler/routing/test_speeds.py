import random

import pytest

from services.scheduler.routing.policy import TurnMeasure
from services.scheduler.routing.speeds import Speeds, StepTime, guess
from services.simulator.costs import engine_speed
from services.simulator.devices import A800, H200, QWEN3_14B, Device
from tests.support.routing import LONG, SHORT

TRUE = StepTime(0.030, 0.0004, 4e-7, 3e-4)


def measure(
    running: int, kv: int, step_s: float, *, bucket: str = "short", peer: str = "w"
) -> TurnMeasure:
    return TurnMeasure(peer, bucket, 0, 101, 0.0, 100 * step_s, running, kv)


def speeds_after(
    turns: int, *, noise: float = 0.1, seed: int = 0, truth: StepTime = TRUE
) -> Speeds:
    speeds, rng = Speeds(), random.Random(seed)
    speeds.add((SHORT, LONG))
    for _ in range(turns):
        running = rng.randint(1, 40)
        kv = running * rng.randint(200, 4000)
        step_s = truth.step_s(running, kv) * rng.lognormvariate(0, noise)
        speeds.turn_measured(measure(running, kv, step_s))
    return speeds


@pytest.mark.parametrize("seed", range(3))
def test_step_times_are_found_within_a_few_percent(seed: int) -> None:
    found = speeds_after(600, seed=seed).of("short")
    for running, kv in ((1, 1000), (10, 10_000), (40, 100_000)):
        assert found.step_s(running, kv) == pytest.approx(TRUE.step_s(running, kv), rel=0.1)


@pytest.mark.parametrize("device", [A800, H200])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_an_engine_that_is_no_sum_of_three_parts_is_still_foreseen(
    device: Device, tensor_parallel: int
) -> None:
    """Its iterations are bound by memory in small batches and by compute in large ones."""
    engine = engine_speed(QWEN3_14B, device, tensor_parallel)
    speeds, rng, errors = Speeds(), random.Random(0), list[float]()
    speeds.add((SHORT,))
    for turn in range(700):
        running = rng.randint(1, 100)
        kv = running * rng.randint(500, 6000)
        step_s = engine.iteration_s(running, kv)
        if turn >= 200:
            errors.append(speeds.of("short").step_s(running, kv) / step_s - 1)
        speeds.turn_measured(measure(running, kv, step_s * rng.lognormvariate(0, 0.1)))
    assert abs(sum(errors)) / len(errors) < 0.02
    assert sum(abs(error) for error in errors) / len(errors) < 0.05


def test_a_larger_parallelism_is_faster_before_any_turn() -> None:
    one, four = guess(1), guess(4)
    assert four.step_s(10, 50_000) < one.step_s(10, 50_000)
    assert four.prefill_token_s < one.prefill_token_s


def test_a_bucket_without_turns_is_scaled_as_the_others_were() -> None:
    slow = StepTime(*(10 * part for part in guess(1)))
    speeds = speeds_after(200, truth=slow)
    assert speeds.of("long").step_s(10, 5000) == pytest.approx(
        10 * guess(4).step_s(10, 5000), rel=0.25
    )


def test_a_few_stuck_turns_hardly_change_anything() -> None:
    speeds = speeds_after(300)
    before = speeds.of("short").step_s(10, 20_000)
    for _ in range(3):
        speeds.turn_measured(measure(10, 20_000, 60.0))
    for _ in range(16):
        speeds.turn_measured(measure(10, 20_000, TRUE.step_s(10, 20_000)))
    assert speeds.of("short").step_s(10, 20_000) == pytest.approx(before, rel=0.15)


def test_a_lasting_change_is_followed() -> None:
    speeds = speeds_after(500)
    twice = StepTime(*(2 * part for part in TRUE))
    rng = random.Random(1)
    for _ in range(6000):
        running = rng.randint(1, 40)
        kv = running * rng.randint(200, 4000)
        speeds.turn_measured(measure(running, kv, twice.step_s(running, kv)))
    found = speeds.of("short").step_s(20, 40_000)
    assert found == pytest.approx(twice.step_s(20, 40_000), rel=0.15)


def test_a_slow_worker_is_told_from_its_bucket() -> None:
    speeds = speeds_after(300)
    for number in range(1200):
        peer, factor = ("slow", 1.7) if number % 8 == 0 else (f"w{number % 8}", 1.0)
        step_s = factor * TRUE.step_s(20, 40_000)
        speeds.turn_measured(measure(20, 40_000, step_s, peer=peer))
    assert speeds.slower["slow"] > 1.3 * speeds.slower["w1"]
    speeds.forget(["slow"])
    assert "slow" not in speeds.slower


@pytest.mark.parametrize(
    "bad",
    [
        TurnMeasure("w", "short", 0, 1, 0.0, 1.0, 1, 10),
        TurnMeasure("w", "short", 0, 10, 0.0, 0.0, 1, 10),
        TurnMeasure("w", "short", 0, 10, 0.0, 1.0, 0, 10),
        TurnMeasure("w", "unknown", 0, 10, 0.0, 1.0, 1, 10),
    ],
)
def test_turns_that_say_nothing_change_nothing(bad: TurnMeasure) -> None:
    speeds = Speeds()
    speeds.add((SHORT,))
    before = speeds.of("short")
    speeds.turn_measured(bad)
    assert speeds.of("short") == before


def test_prefill_is_learned_from_the_quickest_first_tokens() -> None:
    speeds, rng = Speeds(), random.Random(0)
    speeds.add((SHORT,))
    for _ in range(400):
        tokens = rng.randint(100, 4000)
        queue_s = tokens * 4e-4 + rng.expovariate(2.0)
        speeds.turn_measured(TurnMeasure("w", "short", tokens, 101, queue_s, 2.0, 4, 8000))
    assert 3e-4 < speeds.of("short").prefill_token_s < 1e-3


def test_speeds_survive_dump_and_load() -> None:
    speeds, loaded = speeds_after(200), Speeds()
    loaded.load(speeds.dump())
    loaded.add((SHORT, LONG))
    for bucket in ("short", "long"):
        assert loaded.of(bucket).step_s(10, 9000) == pytest.approx(
            speeds.of(bucket).step_s(10, 9000), rel=0.05
        )
