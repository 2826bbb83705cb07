"""Whether this machine and the model directory can do what a configuration asks for.

Reads files and asks the operating system, imports no torch and starts nothing. The tasks file
and the tool servers are checked by the services that own them.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from common.config import INT_MAX, BucketConfig, Config
from common.config_combine import Problem
from common.config_load import config_error
from common.config_source import read_source
from common.toml_lines import KeyPath

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MEMORY_SHARE_MAX = 0.9
"""The rest of the machine needs some; past this share it would swap or kill."""
_VOCABULARY_BLOCK = 64
"""vLLM pads the vocabulary to a multiple of it, and splits that evenly."""
_DEGREES_SHOWN_MAX = 8
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_PATH: KeyPath = ("model", "path")


@dataclass(frozen=True)
class Machine:
    """What this machine offers to the rollout workers."""

    cores: frozenset[int]
    gpus: int
    memory_bytes: int
    packages: frozenset[str]
    """Which of `torch` and `vllm` can be imported."""


def this_machine() -> Machine:
    """Ask the operating system, without importing what is asked about."""
    found = (name for name in ("torch", "vllm") if importlib.util.find_spec(name))
    return Machine(
        cores=frozenset(os.sched_getaffinity(0)),
        gpus=sum(bool(re.fullmatch(r"nvidia\d+", p.name)) for p in Path("/dev").iterdir()),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        packages=frozenset(found),
    )


def check_config(
    config: Config,
    source: Path,
    overrides: Sequence[str] = (),
    *,
    machine: Machine | None = None,
) -> None:
    """Refuse what this machine cannot run, before any process starts.

    Args:
        config: As `load_config(source, overrides)` returned it.
        source: The file, for the line numbers of the problems.
        overrides: Those that were given to `load_config`.
        machine: Asked from the operating system unless given.

    Raises:
        ConfigError: one line for each problem.
    """
    machine = machine or this_machine()
    model = _ModelDirectory(config)
    problems = [
        *model.problems(),
        *_engines(config, machine),
        *_devices(config, machine),
        *_memory(config, machine, model),
    ]
    if problems:
        raise config_error(read_source(source, overrides), problems)


class _ModelDirectory:
    """A Hugging Face model directory, judged by its JSON files alone."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = Path(config.model.path)
        self.description = _read_json(self.path / "config.json")
        """Content of config.json; empty when there is none."""

    def problems(self) -> Iterator[Problem]:
        if not self.path.is_dir():
            yield Problem(
                (_PATH,),
                f"{self.path} is no directory (relative paths start at {Path.cwd()}); "
                "name a directory that transformers can load",
            )
            return
        if not self.description:
            yield Problem(
                (_PATH,),
                f"{self.path / 'config.json'} is missing or no JSON object; "
                "name a directory as save_pretrained writes it",
            )
            return
        yield from self._architecture()
        yield from self._files()
        yield from self._context()
        yield from self._split()

    def _architecture(self) -> Iterator[Problem]:
        names = _list(self.description.get("architectures"))
        if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names):
            shown = ", ".join(map(str, names)) or "no architecture"
            yield Problem(
                (_PATH,),
                f"{self.path} is not a causal LM: its config.json names {shown}; "
                "use a model whose architecture ends with ForCausalLM",
            )
        if not isinstance(self.description.get("model_type"), str):
            yield Problem(
                (_PATH,),
                f"{self.path / 'config.json'} has no model_type, so transformers cannot load it; "
                "save the model again with save_pretrained",
            )

    def _files(self) -> Iterator[Problem]:
        if not self._has(_WEIGHT_FILES):
            yield Problem(
                (_PATH,),
                f"{self.path} has no model.safetensors (pickled weights are not loaded); "
                "save the model again with save_pretrained",
            )
        for shard in self._missing_shards():
            yield Problem(
                (_PATH,),
                f"{self.path / shard} is named by the index but missing; fetch the model again",
            )
        if not self._has(_TOKENIZER_FILES):
            yield Problem(
                (_PATH,),
                f"{self.path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); "
                "copy the tokenizer's files there",
            )
        elif not self._has_chat_template():
            yield Problem(
                (_PATH,),
                f"the tokenizer in {self.path} has no chat template; use an instruct model, or "
                "add a chat_template.jinja",
            )

    def _context(self) -> Iterator[Problem]:
        limit = self._number("max_position_embeddings", "n_positions")
        if limit is not None and self.config.model.context_tokens > limit:
            yield Problem(
                (("model", "context_tokens"), _PATH),
                f"{self.config.model.context_tokens} tokens are more than the model's "
                f"max_position_embeddings = {limit}; use {limit} or less",
            )

    def _split(self) -> Iterator[Problem]:
        """Find buckets whose ranks cannot have equal shares of every layer."""
        for index, bucket in enumerate(self.config.buckets):
            if reason := self._indivisible(bucket.tensor_parallel):
                yield Problem(
                    (("buckets", index, "tensor_parallel"), _PATH),
                    f"{self.path} cannot be split over {bucket.tensor_parallel} devices: {reason}; "
                    f"{self._degrees()}",
                )

    def _indivisible(self, ranks: int) -> str:
        """Why so many ranks do not work, or nothing. Few key heads are copied, not split."""
        heads = self._number("num_attention_heads", "n_head")
        kv_heads = self._number("num_key_value_heads") or heads
        width = self._number("intermediate_size", "n_inner")
        vocabulary = self._number("vocab_size")
        if heads and heads % ranks:
            return f"it has {heads} attention heads"
        if kv_heads and kv_heads % ranks and ranks % kv_heads:
            return f"it has {kv_heads} key-value heads"
        if width and width % ranks:
            return f"its feed-forward layers are {width} wide (intermediate_size)"
        if vocabulary and -(-vocabulary // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK % ranks:
            return f"vLLM fills its vocabulary up to a multiple of {_VOCABULARY_BLOCK}"
        return ""

    def _degrees(self) -> str:
        """Say what would work."""
        possible = [n for n in range(1, _DEGREES_SHOWN_MAX + 1) if not self._indivisible(n)]
        return f"use tensor_parallel = {' or '.join(map(str, possible))}"

    def _has(self, names: Sequence[str]) -> bool:
        return any((self.path / name).is_file() for name in names)

    def _missing_shards(self) -> list[str]:
        index = _read_json(self.path / "model.safetensors.index.json")
        named = {name for name in _table(index.get("weight_map")).values() if isinstance(name, str)}
        return sorted(name for name in named if not self._has((name,)))

    def _has_chat_template(self) -> bool:
        if self._has(("chat_template.jinja", "chat_template.json")):
            return True
        return bool(_read_json(self.path / "tokenizer_config.json").get("chat_template"))

    def kv_bytes_per_token(self, ranks: int) -> int | None:
        """Keys and values of all layers for one token on all ranks together.

        None when config.json does not tell.
        """
        layers = self._number("num_hidden_layers", "n_layer")
        heads = self._number("num_attention_heads", "n_head")
        width = self._number("hidden_size", "n_embd")
        if not (layers and heads and width):
            return None
        kv_heads = self._number("num_key_value_heads") or heads
        head_dim = self._number("head_dim") or width // heads
        copied = max(kv_heads, ranks)  # A rank has one head at least.
        return 2 * layers * copied * head_dim * _DTYPE_BYTES[self.config.model.dtype]

    def _number(self, *names: str) -> int | None:
        """Read the first of these that is a count: models differ in what they call it."""
        values = (self.description.get(name) for name in names)
        return next((value for value in values if _is_count(value)), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _table(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _is_count(value: object) -> TypeGuard[int]:
    """Whether it is a number that something can have so many of; JSON's `true` is an int too."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= INT_MAX


def _engines(config: Config, machine: Machine) -> Iterator[Problem]:
    """Find buckets that nobody would serve."""
    for index, bucket in enumerate(config.buckets):
        wanted = _engines_for(bucket)
        if wanted and not wanted & machine.packages:
            names = " nor ".join(sorted(wanted))
            split = " for tensor_parallel > 1" if bucket.tensor_parallel > 1 else ""
            other = '"torch"' if not split else '"auto" and tensor_parallel = 1'
            remedy = f", or choose engine = {other}" if "torch" in machine.packages else ""
            yield Problem(
                (("buckets", index, "engine"),),
                f'nobody can serve bucket "{bucket.name}": {names} is not installed here{split}; '
                f"run scripts/setup{remedy}",
            )


def _engines_for(bucket: BucketConfig) -> frozenset[str]:
    """Packages of which one must be there."""
    match bucket.engine:
        case "fake":
            return frozenset()
        case "auto":
            every = frozenset({"vllm", "torch"})
            return frozenset({"vllm"}) if bucket.tensor_parallel > 1 else every
        case _:
            return frozenset({bucket.engine})


def _devices(config: Config, machine: Machine) -> Iterator[Problem]:
    count, kind = (machine.gpus, "GPUs") if machine.gpus else (len(machine.cores), "cores")
    for index, bucket in enumerate(config.buckets):
        if bucket.tensor_parallel > count:
            yield Problem(
                (("buckets", index, "tensor_parallel"),),
                f"one worker would need {bucket.tensor_parallel} {kind}, this machine has "
                f"{count}; use {count} or less",
            )
        absent = {core for cores in bucket.cpus for core in cores} - machine.cores
        if absent:
            yield Problem(
                (("buckets", index, "cpus"),),
                f"there is no core {', '.join(map(str, sorted(absent)))} for this process; choose "
                f"from {', '.join(map(str, sorted(machine.cores)))}",
            )
    yield from _gpus_together(config, machine)


def _gpus_together(config: Config, machine: Machine) -> Iterator[Problem]:
    """Count the GPUs of split workers, which share none; workers share cores.

    Only where the coordinator is reached from this machine alone, so that all workers are here.
    """
    split = {n: b for n, b in enumerate(config.buckets) if b.tensor_parallel > 1}
    needed = sum(bucket.workers * bucket.tensor_parallel for bucket in split.values())
    here = "//127." in config.coordinator.address or "//localhost:" in config.coordinator.address
    if not here or not machine.gpus or needed <= machine.gpus:
        return
    largest = max(split, key=lambda n: split[n].workers * split[n].tensor_parallel)
    if split[largest].tensor_parallel <= machine.gpus:
        yield Problem(
            (("buckets", largest, "workers"), ("buckets", largest, "tensor_parallel")),
            f"all workers that are split over several devices need {needed} GPUs together, this "
            f"machine has {machine.gpus}; use fewer workers or a smaller tensor_parallel",
        )


def _memory(config: Config, machine: Machine, model: _ModelDirectory) -> Iterator[Problem]:
    """Compare the KV caches of all workers with the machine's memory, where no GPU has its own."""
    token_bytes = {
        index: model.kv_bytes_per_token(bucket.tensor_parallel) or 0
        for index, bucket in enumerate(config.buckets)
        if bucket.engine != "fake"
    }
    needed = {
        index: size * config.buckets[index].kv_tokens * config.buckets[index].workers
        for index, size in token_bytes.items()
    }
    total, limit = sum(needed.values()), int(machine.memory_bytes * _MEMORY_SHARE_MAX)
    if not machine.gpus and total > limit:
        largest = max(needed, key=needed.__getitem__)
        yield Problem(
            (("buckets", largest, "kv_tokens"), ("buckets", largest, "workers")),
            f"the KV caches of all workers need {_gib(total)} ({token_bytes[largest]} bytes per "
            f"token), this machine has {_gib(machine.memory_bytes)}; "
            f"use at most {limit // token_bytes[largest]} kv_tokens over all workers",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
