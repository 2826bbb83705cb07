from types import SimpleNamespace

import pytest

from services.rollout.vllm_settings import environment, kv_bytes, thread_binding


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"),
    [
        ([0], 1, "0"),
        ([0, 1], 1, "0,1"),
        ([0, 1], 2, "0|1"),
        ([4, 5, 6, 7], 2, "4,6|5,7"),
        ([3], 2, "3|3"),
    ],
)
def test_cores_are_dealt_to_ranks(cpus: list[int], ranks: int, expected: str) -> None:
    assert thread_binding(cpus, ranks) == expected


def test_one_rank_uses_exactly_the_cores_of_its_worker() -> None:
    assert environment([3], 1, on_cpu=True)["OMP_NUM_THREADS"] == "1"
    two = environment([2, 3], 1, on_cpu=True)
    assert (two["OMP_NUM_THREADS"], two["OMP_PLACES"]) == ("2", "{2},{3}")
    assert "OMP_NUM_THREADS" not in environment([2, 3], 2, on_cpu=True)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_children_do_not_phone_home(*, on_cpu: bool) -> None:
    variables = environment([0], 1, on_cpu=on_cpu)
    assert variables["VLLM_NO_USAGE_STATS"] == variables["HF_HUB_OFFLINE"] == "1"


def test_only_a_cpu_goes_without_compiling() -> None:
    assert environment([0], 1, on_cpu=True)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in environment([0], 1, on_cpu=False)


def test_the_cache_has_room_for_the_tokens_in_whole_blocks_and_the_null_block() -> None:
    model = SimpleNamespace(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
    )
    per_token = 2 * 2 * 2 * 8 * 4
    assert kv_bytes(model, "float32", 64, ranks=1) == (64 + 32) * per_token
    assert kv_bytes(model, "float32", 65, ranks=1) == (96 + 32) * per_token
    assert kv_bytes(model, "bfloat16", 64, ranks=1) == (64 + 32) * per_token // 2
    assert kv_bytes(model, "float32", 64, ranks=2) == (64 + 32) * per_token // 2
    assert kv_bytes(model, "float32", 64, ranks=4) == (64 + 32) * per_token // 2


def test_a_model_that_names_no_head_size_divides_its_width() -> None:
    model = SimpleNamespace(num_hidden_layers=1, num_attention_heads=4, hidden_size=32)
    assert kv_bytes(model, "float32", 32, ranks=1) == 64 * 2 * 4 * 8 * 4
