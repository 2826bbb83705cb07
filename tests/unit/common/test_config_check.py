"""What this machine and the model directory refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config_check import Machine, check_config, this_machine
from common.config_load import load_config
from common.errors import ConfigError

MACHINE = Machine(
    cores=frozenset({0, 1}),
    gpus=0,
    memory_bytes=8 * 2**30,
    packages=frozenset({"torch", "vllm"}),
)
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "max_position_embeddings": 2048,
}
JOB = """\
[run]
name = "demo"
max_steps = 4
[model]
path = "{model}"
context_tokens = 512
[tasks]
path = "tasks.jsonl"
[[buckets]]
name = "short"
engine = "vllm"
[[tools]]
name = "calculator"
target = "x"
"""


def model(tmp_path: Path, **changes: Any) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA | changes))
    (directory / "model.safetensors").touch()
    (directory / "tokenizer.json").touch()
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return directory


def check(directory: Path, *overrides: str, machine: Machine = MACHINE) -> list[str]:
    """Check the job; return the problems without the file's name."""
    path = directory.parent / "job.toml"
    path.write_text(JOB.format(model=directory))
    config = load_config(path, overrides)
    try:
        check_config(config, path, overrides, machine=machine)
    except ConfigError as error:
        return [problem.removeprefix(f"{path}:") for problem in error.problems]
    return []


def test_a_complete_model_on_a_fitting_machine_passes(tmp_path: Path) -> None:
    assert check(model(tmp_path)) == []


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    (problem,) = check(tmp_path / "absent")
    assert problem.startswith(f"5: model.path: {tmp_path / 'absent'} is no directory")


@pytest.mark.parametrize("content", [None, "[]", "{", "{}"])
def test_a_directory_without_a_model_is_named(content: str | None, tmp_path: Path) -> None:
    directory = model(tmp_path)
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_text(content)
    (problem,) = check(directory)
    assert "config.json is missing or no JSON object" in problem


@pytest.mark.parametrize("names", [["BertForMaskedLM"], [], None])
def test_only_a_causal_lm_is_accepted(names: list[str] | None, tmp_path: Path) -> None:
    (problem,) = check(model(tmp_path, architectures=names))
    assert "is not a causal LM" in problem
    assert "ForCausalLM" in problem


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("model.safetensors", "has no model.safetensors"),
        ("tokenizer.json", "has no tokenizer"),
        ("tokenizer_config.json", "has no chat template"),
    ],
)
def test_every_needed_file_is_missed(absent: str, words: str, tmp_path: Path) -> None:
    directory = model(tmp_path)
    (directory / absent).unlink()
    (problem,) = check(directory)
    assert words in problem


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = model(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = check(directory)
    assert "model-1.safetensors is named by the index but missing" in problem


def test_a_template_file_counts(tmp_path: Path) -> None:
    directory = model(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    (directory / "chat_template.jinja").touch()
    assert check(directory) == []


def test_a_model_without_type_is_refused(tmp_path: Path) -> None:
    (problem,) = check(model(tmp_path, model_type=None))
    assert "has no model_type" in problem


def test_the_context_is_bounded_by_the_model(tmp_path: Path) -> None:
    (problem,) = check(model(tmp_path, max_position_embeddings=511))
    assert problem.startswith("6: model.context_tokens: 512 tokens are more than")


def test_more_kv_cache_than_memory_is_refused(tmp_path: Path) -> None:
    # 2 × 4 layers × 2 heads × 32 × 4 bytes = 2 KiB a token; 7.2 of 8 GiB may be used.
    directory = model(tmp_path)
    assert check(directory, "buckets.0.kv_tokens=3700000") == []
    (problem,) = check(directory, "buckets.0.kv_tokens=1900000", "buckets.0.workers=2")
    assert problem.startswith("override 'buckets.0.kv_tokens=1900000': buckets.0.kv_tokens: ")
    assert "need 7.2 GiB (2048 bytes per token), this machine has 8.0 GiB" in problem


@pytest.mark.parametrize(
    ("override", "machine"),
    [
        ("model.dtype=bfloat16", MACHINE),
        ("buckets.0.engine=fake", MACHINE),
        ("run.seed=1", Machine(MACHINE.cores, 1, 2**30, MACHINE.packages)),
    ],
)
def test_kv_cache_elsewhere_or_smaller_fits(
    override: str, machine: Machine, tmp_path: Path
) -> None:
    big = "buckets.0.kv_tokens=4000000"
    assert check(model(tmp_path), big, override, machine=machine) == []


def test_unknown_shapes_are_not_guessed(tmp_path: Path) -> None:
    assert check(model(tmp_path, hidden_size=None), "buckets.0.kv_tokens=2000000000") == []


@pytest.mark.parametrize(
    ("engine", "packages", "served"),
    [
        ("vllm", {"torch"}, False),
        ("torch", {"vllm"}, False),
        ("auto", {"torch"}, True),
        ("auto", set[str](), False),
        ("fake", set[str](), True),
    ],
)
def test_a_bucket_that_nobody_serves_is_refused(
    engine: str, packages: set[str], served: bool, tmp_path: Path
) -> None:
    machine = Machine(MACHINE.cores, 0, MACHINE.memory_bytes, frozenset(packages))
    problems = check(model(tmp_path), f"buckets.0.engine={engine}", machine=machine)
    assert served == (problems == [])
    assert served or 'nobody can serve bucket "short"' in problems[0]


def test_devices_that_are_not_there_are_named(tmp_path: Path) -> None:
    directory = model(tmp_path)
    (problem,) = check(directory, "buckets.0.cpus=[[1, 7]]")
    assert "there is no core 7" in problem
    (problem,) = check(directory, "buckets.0.tensor_parallel=4")
    assert "one worker would need 4 cores, this machine has 2" in problem
    gpus = Machine(MACHINE.cores, 1, MACHINE.memory_bytes, MACHINE.packages)
    (problem,) = check(directory, "buckets.0.tensor_parallel=2", machine=gpus)
    assert "one worker would need 2 GPUs, this machine has 1" in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": {"LlamaForCausalLM": 1}},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [None, [1]]},
        {"model_type": ["llama"]},
    ],
)
def test_a_description_of_the_wrong_shape_is_a_problem_and_no_crash(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (problem,) = check(model(tmp_path, **changes))
    assert problem.startswith("5: model.path: ")


@pytest.mark.parametrize("number", [True, 0, -3, 2**40, 1.5, "8", [8], None])
def test_a_number_that_counts_nothing_is_not_calculated_with(number: Any, tmp_path: Path) -> None:
    names = [name for name, value in LLAMA.items() if isinstance(value, int)]
    directory = model(tmp_path, **dict.fromkeys(names, number))
    assert check(directory, "buckets.0.kv_tokens=2000000000", "buckets.0.tensor_parallel=2") == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "\ud800", "\0"])
def test_a_file_that_no_parser_takes_counts_as_empty(
    name: str, content: str, tmp_path: Path
) -> None:
    directory = model(tmp_path)
    (directory / name).write_text(content, errors="surrogatepass")
    (problem,) = check(directory)
    assert "config.json is missing or no JSON object" in problem or "chat template" in problem


@pytest.mark.parametrize("files", [5, ["a"], {"a": 5, "b": ["c"]}, {"a": "\0"}, None])
def test_an_index_of_the_wrong_shape_is_no_crash(files: Any, tmp_path: Path) -> None:
    directory = model(tmp_path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert len(check(directory)) <= 1


SPLIT = ("buckets.0.tensor_parallel=2",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 9}, "it has 9 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, "it has 3 key-value heads"),
        ({"intermediate_size": 513}, "its feed-forward layers are 513 wide"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (problem,) = check(model(tmp_path, **changes), *SPLIT)
    assert problem.startswith(f"override '{SPLIT[0]}': buckets.0.tensor_parallel: ")
    assert f"cannot be split over 2 devices: {reason}" in problem
    assert "use tensor_parallel = 1" in problem


@pytest.mark.parametrize(("kv_heads", "vocabulary"), [(1, 257), (2, 300), (8, 64)])
def test_few_key_heads_and_an_odd_vocabulary_can_be_split(
    kv_heads: int, vocabulary: int, tmp_path: Path
) -> None:
    directory = model(tmp_path, num_key_value_heads=kv_heads, vocab_size=vocabulary)
    assert check(directory, *SPLIT) == []


def test_a_vocabulary_splits_in_blocks(tmp_path: Path) -> None:
    directory = model(
        tmp_path, num_attention_heads=6, num_key_value_heads=6, hidden_size=192, vocab_size=257
    )
    three = Machine(frozenset({0, 1, 2}), 0, MACHINE.memory_bytes, MACHINE.packages)
    (problem,) = check(directory, "buckets.0.tensor_parallel=3", machine=three)
    assert "fills its vocabulary up to a multiple of 64; use tensor_parallel = 1 or 2" in problem


def test_copied_key_heads_need_memory_on_every_rank(tmp_path: Path) -> None:
    directory = model(tmp_path, num_key_value_heads=1)
    big = "buckets.0.kv_tokens=5000000"
    assert check(directory, big) == []
    (problem,) = check(directory, big, *SPLIT)
    assert "2048 bytes per token" in problem


def test_only_vllm_serves_a_split_bucket(tmp_path: Path) -> None:
    torch_alone = Machine(MACHINE.cores, 0, MACHINE.memory_bytes, frozenset({"torch"}))
    (problem,) = check(model(tmp_path), "buckets.0.engine=auto", *SPLIT, machine=torch_alone)
    assert "vllm is not installed here for tensor_parallel > 1" in problem


def test_split_workers_on_one_machine_share_no_gpu(tmp_path: Path) -> None:
    gpus = Machine(MACHINE.cores, 2, MACHINE.memory_bytes, MACHINE.packages)
    two = (*SPLIT, "buckets.0.workers=2")
    directory = model(tmp_path)
    (problem,) = check(directory, *two, machine=gpus)
    assert "need 4 GPUs together, this machine has 2" in problem
    assert check(directory, *SPLIT, machine=gpus) == []
    assert check(directory, *two, "coordinator.address=tcp://node-0:7070", machine=gpus) == []


def test_this_machine_has_a_core_and_memory() -> None:
    machine = this_machine()
    assert machine.cores
    assert machine.memory_bytes > 2**28
