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
from typing import Any, cast

from common.config import Config
from common.config_combine import Problem
from common.config_load import config_error
from common.config_source import read_source
from common.toml_lines import KeyPath

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MEMORY_SHARE_MAX = 0.9
"""The rest of the machine needs some; past this share it would swap or kill."""
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
        *_memory(config, machine, model.kv_bytes_per_token()),
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

    def _architecture(self) -> Iterator[Problem]:
        names = cast("list[object]", self.description.get("architectures") or [])
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

    def _has(self, names: Sequence[str]) -> bool:
        return any((self.path / name).is_file() for name in names)

    def _missing_shards(self) -> list[str]:
        index = _read_json(self.path / "model.safetensors.index.json")
        files = cast("dict[str, str]", index.get("weight_map", {}))
        return sorted(name for name in set(files.values()) if not self._has((name,)))

    def _has_chat_template(self) -> bool:
        if self._has(("chat_template.jinja", "chat_template.json")):
            return True
        return bool(_read_json(self.path / "tokenizer_config.json").get("chat_template"))

    def kv_bytes_per_token(self) -> int | None:
        """Keys and values of all layers for one token, or None when config.json does not tell."""
        layers = self._number("num_hidden_layers", "n_layer")
        heads = self._number("num_attention_heads", "n_head")
        width = self._number("hidden_size", "n_embd")
        if not (layers and heads and width):
            return None
        kv_heads = self._number("num_key_value_heads") or heads
        head_dim = self._number("head_dim") or width // heads
        return 2 * layers * kv_heads * head_dim * _DTYPE_BYTES[self.config.model.dtype]

    def _number(self, *names: str) -> int | None:
        """Read the first of these that is an integer: models differ in what they call it."""
        values = (self.description.get(name) for name in names)
        return next((value for value in values if isinstance(value, int)), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _engines(config: Config, machine: Machine) -> Iterator[Problem]:
    """Find buckets that nobody would serve."""
    needs: dict[str, frozenset[str]] = {
        "vllm": frozenset({"vllm"}),
        "torch": frozenset({"torch"}),
        "auto": frozenset({"vllm", "torch"}),
        "fake": frozenset(),
    }
    for index, bucket in enumerate(config.buckets):
        wanted = needs[bucket.engine]
        if wanted and not wanted & machine.packages:
            names = " nor ".join(sorted(wanted))
            remedy = ', or choose engine = "torch"' if "torch" in machine.packages else ""
            yield Problem(
                (("buckets", index, "engine"),),
                f'nobody can serve bucket "{bucket.name}": {names} is not installed here; '
                f"run scripts/setup{remedy}",
            )


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


def _memory(config: Config, machine: Machine, token_bytes: int | None) -> Iterator[Problem]:
    """Compare the KV caches of all workers with the machine's memory, where no GPU has its own."""
    if machine.gpus or token_bytes is None:
        return
    needed = {
        index: bucket.kv_tokens * bucket.workers * token_bytes
        for index, bucket in enumerate(config.buckets)
        if bucket.engine != "fake"
    }
    total, limit = sum(needed.values()), int(machine.memory_bytes * _MEMORY_SHARE_MAX)
    if total > limit:
        largest = max(needed, key=needed.__getitem__)
        yield Problem(
            (("buckets", largest, "kv_tokens"), ("buckets", largest, "workers")),
            f"the KV caches of all workers need {_gib(total)} ({token_bytes} bytes per token), "
            f"this machine has {_gib(machine.memory_bytes)}; "
            f"use at most {limit // token_bytes} kv_tokens over all workers",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
