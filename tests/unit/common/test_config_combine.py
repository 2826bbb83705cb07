"""Values that are each right and do not go together."""

from typing import Any

import pytest

from common.config import Config
from common.config_combine import BY_RANGE, combination_problems


def config(**sections: dict[str, Any] | list[dict[str, Any]]) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "r", "max_steps": 1},
        "model": {"path": "m", "context_tokens": 512},
        "tasks": {"path": "t"},
        "buckets": [{"name": "b"}],
        "tools": [{"name": "t", "target": "x"}],
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values if isinstance(values, dict) else values
    return Config.model_validate(base)


def test_the_defaults_go_together() -> None:
    assert combination_problems(config()) == []


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"training": {"group_size": 1, "group_usable_min": 1}}, "training.group_size", "baseline"),
        ({"training": {"group_usable_min": 9}}, "training.group_usable_min", "training.group_size"),
        ({"training": {"minibatches": 3}}, "training.minibatches", "64 trajectories"),
        ({"training": {"ranks": 3}}, "training.ranks", "training.groups_per_step"),
        ({"training": {"minibatches": 8, "ranks": 16}}, "training.ranks", "8 minibatches on 16"),
        (
            {
                "sampling": {"turn_tokens_max": 512, "trajectory_tokens_max": 512},
                "buckets": [{"name": "b", "slots": 8}],
            },
            "sampling.turn_tokens_max",
            "model.context_tokens",
        ),
        (
            {"sampling": {"trajectory_tokens_max": 63}},
            "sampling.turn_tokens_max",
            "sampling.trajectory_tokens_max",
        ),
        (
            {"training": {"micro_batch_tokens": 511}},
            "training.micro_batch_tokens",
            "model.context_tokens",
        ),
        ({"buckets": [{"name": "b", "kv_tokens": 511}]}, "buckets.0.kv_tokens", "model.context"),
        ({"buckets": [{"name": "b", "slots": 513}]}, "buckets.0.slots", "at most 512 slots"),
        (
            {"buckets": [{"name": "b", "cpus": [[0]], "workers": 2}]},
            "buckets.0.cpus",
            "workers = 2",
        ),
        (
            {"buckets": [{"name": "b", "engine": "torch", "tensor_parallel": 2}]},
            "buckets.0.tensor_parallel",
            'engine = "torch"',
        ),
        ({"buckets": [{"name": "b"}, {"name": "b"}]}, "buckets.1.name", "another entry"),
        ({"elastic": {"train_slots": 1}}, "elastic.train_slots", "0 workers are hybrid"),
        (
            {"elastic": {"train_slots": 1}, "buckets": [{"name": "b", "hybrid": True}]},
            "elastic.train_slots",
            "nobody would roll out",
        ),
        (
            {"training": {"minibatches": 2}, "buckets": [{"name": "b", "hybrid": True}]},
            "buckets.0.hybrid",
            "training.minibatches = 2",
        ),
        (
            {"buckets": [{"name": "b", "hybrid": True, "tensor_parallel": 2}]},
            "buckets.0.hybrid",
            "tensor_parallel = 1",
        ),
        (
            {
                "model": {"dtype": "bfloat16"},
                "buckets": [{"name": "a"}, {"name": "b", "hybrid": True}],
            },
            "buckets.1.hybrid",
            "compute_dtype",
        ),
        (
            {"buckets": [{"name": "b", "context_tokens_max": 511}]},
            "buckets.0.context_tokens_max",
            "model.context_tokens = 512",
        ),
        (
            {
                "buckets": [
                    {"name": "a", "context_tokens_max": 512},
                    {"name": "b", "context_tokens_max": 512},
                ]
            },
            "buckets.1.context_tokens_max",
            'the same as that of bucket "a"',
        ),
        (
            {"buckets": [{"name": "a"}, {"name": "b", "context_tokens_max": 99}]},
            "buckets.1.context_tokens_max",
            "below that of",
        ),
        (
            {"scheduler": {"payload_small_max": 5000}},
            "scheduler.payload_small_max",
            "scheduler.payload_medium_max = 5000",
        ),
        ({"scheduler": {"kv_low": 0.95}}, "scheduler.kv_low", "scheduler.kv_high = 0.95"),
        ({"scheduler": {"placement": "cmlfq"}}, "scheduler.placement", "add a second [[buckets]]"),
        (
            {
                "scheduler": {"placement": "mlfq"},
                "buckets": [{"name": "a", "context_tokens_max": 512}, {"name": "b"}],
            },
            "scheduler.placement",
            "set buckets.0.context_tokens_max to less (about 256)",
        ),
        (
            {"tools": [{"name": "t", "target": "x"}, {"name": "t", "target": "y"}]},
            "tools.1.name",
            "another entry",
        ),
        ({"coordinator": {"address": "tcp://host"}}, "coordinator.address", "tcp://HOST:PORT"),
        ({"coordinator": {"address": "tcp://h:99999"}}, "coordinator.address", "tcp://HOST:PORT"),
        (
            {"tools": [{"name": "t", "target": "x", "session_ttl_s": 10}]},
            "tools.0.session_ttl_s",
            "rollout.tool_timeout_s",
        ),
    ],
)
def test_an_impossible_combination_names_both_keys(
    sections: dict[str, Any], key: str, words: str
) -> None:
    (problem,) = combination_problems(config(**sections))
    assert ".".join(map(str, problem.keys[0])) == key
    assert words in problem.text
    assert "; " in problem.text


@pytest.mark.parametrize("placement", [*BY_RANGE, "libra", "least_load"])
@pytest.mark.parametrize("bounds", [(256, 0), (100, 512, 0, 0), (100, 200, 600)])
def test_rising_context_ranges_serve_every_placement(
    placement: str, bounds: tuple[int, ...]
) -> None:
    buckets = [{"name": f"b{n}", "context_tokens_max": n} for n in bounds if n]
    buckets += [{"name": f"open{n}"} for n in range(bounds.count(0))]
    assert not combination_problems(config(scheduler={"placement": placement}, buckets=buckets))


def test_buckets_need_no_ranges_where_nothing_reads_them() -> None:
    alike = [{"name": "a"}, {"name": "b", "engine": "vllm", "tensor_parallel": 2}]
    assert not combination_problems(config(scheduler={"placement": "libra"}, buckets=alike))


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:0", "tcp://coordinator:7070", "tcp://[::1]:1"]
)
def test_an_address_is_host_and_port(address: str) -> None:
    assert not combination_problems(config(coordinator={"address": address}))


def test_a_lone_trajectory_needs_no_group_when_nothing_is_subtracted() -> None:
    alone = {"group_size": 1, "group_usable_min": 1, "baseline": "none"}
    assert not combination_problems(config(training=alone))


@pytest.mark.parametrize("train_slots", [0, 1, 2])
def test_all_hybrid_workers_may_train_while_others_roll_out(train_slots: int) -> None:
    buckets = [{"name": "a"}, {"name": "b", "hybrid": True, "workers": 2}]
    elastic = {"train_slots": train_slots}
    assert combination_problems(config(buckets=buckets, elastic=elastic)) == []
