"""The cost formulas against published measurements."""

import math

import pytest

from services.simulator.costs import (
    LAYER_S,
    TrainLayout,
    engine_speed,
    kv_capacity_tokens,
    kv_transfer_s,
    train_step_s,
    weight_sync_s,
)
from services.simulator.devices import (
    A100,
    A800,
    MODELS,
    QWEN3_4B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    ModelShape,
)

LLAMA_8B = ModelShape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 0)
CODELLAMA_34B = ModelShape("CodeLlama-34B", 48, 8192, 64, 8, 128, 22016, 0)
QWEN_72B = ModelShape("Qwen-72B", 80, 8192, 64, 64, 128, 24576, 0)
"""Without head: the profiles are of the layers."""

VIDUR_MS = [
    (LLAMA_8B, 1, (9.7, 5.7, 3.4, 2.1)),
    (LLAMA_8B, 64, (11.2, 6.0, 3.6, 2.4)),
    (LLAMA_8B, 512, (34.6, 18.3, 12.0, 6.5)),
    (LLAMA_8B, 4096, (274, 142, 77, 43)),
    (CODELLAMA_34B, 1, (44.1, 22.3, 12.2, 7.3)),
    (CODELLAMA_34B, 512, (162, 84, 45, 25)),
    (QWEN_72B, 1, (91.7, 45.7, 24.9, 14.6)),
]
"""Linear operators of one forward pass on A100, at TP 1, 2, 4 and 8."""
FURTHER_OFF = {
    ("Llama-3-8B", 512, 4): 0.17,
    ("Llama-3-8B", 4096, 8): 0.11,
}
"""Smallest shards, whose profiles do not lie on one curve."""


@pytest.mark.parametrize(("model", "tokens", "measured_ms"), VIDUR_MS)
def test_linear_operators_take_what_was_profiled(
    model: ModelShape, tokens: int, measured_ms: tuple[float, ...]
) -> None:
    for degree, measured in zip((1, 2, 4, 8), measured_ms, strict=True):
        speed = engine_speed(model, A100, degree)
        modelled = 1e3 * (speed.linear_s(tokens) + model.layers * LAYER_S)
        tolerance = FURTHER_OFF.get((model.name, tokens, degree), 0.10)
        assert modelled == pytest.approx(measured, rel=tolerance), degree


def test_shapes_have_the_published_sizes() -> None:
    assert QWEN3_4B.parameters == pytest.approx(4.0e9, rel=0.02)
    assert QWEN3_14B.parameters == pytest.approx(14.8e9, rel=0.01)
    assert QWEN3_32B.parameters == pytest.approx(32.8e9, rel=0.01)
    assert QWEN3_30B_A3B.parameters == pytest.approx(30.5e9, rel=0.01)
    assert QWEN3_30B_A3B.active_parameters == pytest.approx(3.0e9, rel=0.1)
    kv_bytes = {name: model.kv_bytes_per_token for name, model in MODELS.items()}
    assert kv_bytes == {
        "Qwen3-4B": 147_456,
        "Qwen3-14B": 163_840,
        "Qwen3-32B": 262_144,
        "Qwen3-30B-A3B": 98_304,
    }


@pytest.mark.parametrize(
    ("degree", "at_8k", "at_32k"), [(1, 29, 7), (2, 81, 20), (4, 185, 46), (8, 392, 98)]
)
def test_so_many_sequences_fit(degree: int, at_8k: int, at_32k: int) -> None:
    capacity = kv_capacity_tokens(QWEN3_14B, A800, degree)
    assert (capacity // 8_192, capacity // 32_768) == (at_8k, at_32k)


def test_weights_that_do_not_fit_leave_no_cache() -> None:
    assert kv_capacity_tokens(QWEN3_32B, A800, 1) > 0
    assert kv_capacity_tokens(QWEN_72B, A800, 1) == 0


def test_a_busy_server_gives_its_tokens_as_late_as_measured() -> None:
    """256 requests of a chat benchmark on one A100: 106 ms between tokens, 114 ms in the mean."""
    speed = engine_speed(QWEN3_14B, A100)
    assert speed.iteration_s(256, 256 * 320, 276, 276 * 138.0, 2) == pytest.approx(0.110, rel=0.25)


def test_moves_of_a_long_context_take_what_was_published() -> None:
    assert kv_transfer_s(QWEN3_14B, 40_960, same_node=True) == pytest.approx(0.330, rel=0.05)
    assert kv_transfer_s(QWEN3_14B, 40_960, same_node=False) == pytest.approx(0.733, rel=0.05)


def test_computing_a_long_context_again_takes_seconds() -> None:
    seconds = [engine_speed(QWEN3_14B, A800, degree).prefill_s(40_960) for degree in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == pytest.approx(10, rel=0.1)


def test_what_is_cached_is_not_computed() -> None:
    speed = engine_speed(QWEN3_14B, A800)
    rest = speed.prefill_s(4_096, cached=28_672)
    assert speed.prefill_s(4_096) < rest < speed.prefill_s(32_768) / 4


def test_experts_are_read_as_tokens_touch_them() -> None:
    speed = engine_speed(QWEN3_30B_A3B, A800)
    one, many = speed.linear_s(1), speed.linear_s(256)
    dense = engine_speed(QWEN3_32B, A800)
    assert one < dense.linear_s(1) / 5
    assert many > 5 * one
    assert math.isclose(speed.experts_s + speed.weights_s, dense.weights_s, rel_tol=0.1)


def test_long_sequences_cost_a_train_step_more_than_their_tokens() -> None:
    def seconds(context: int) -> float:
        return train_step_s(QWEN3_14B, A800, TrainLayout(32), tokens=10**8, context_tokens=context)

    assert 1.2 < seconds(32_768) / seconds(1_024) < 1.6


def test_a_pipeline_has_a_bubble_and_a_forward_costs_a_third() -> None:
    def seconds(layout: TrainLayout) -> float:
        step = train_step_s(QWEN3_14B, A800, layout, tokens=10**9, context_tokens=1_024)
        return step - train_step_s(QWEN3_14B, A800, layout, tokens=0, context_tokens=1_024)

    plain = seconds(TrainLayout(32, recompute_logprobs=False))
    assert seconds(TrainLayout(32)) == pytest.approx(plain * 4 / 3)
    assert seconds(TrainLayout(32, 4, 6, recompute_logprobs=False)) == pytest.approx(plain * 1.5)


def test_more_ports_bring_weights_sooner() -> None:
    assert weight_sync_s(QWEN3_14B, A800, 1) == pytest.approx(2.18, rel=0.02)
    assert weight_sync_s(QWEN3_14B, A800, 4) < weight_sync_s(QWEN3_14B, A800, 1)
