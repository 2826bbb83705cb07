"""Which values of a configuration go together. Pure; what lies on disk is `config_check`'s."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from common.config import Config
from common.toml_lines import KeyPath

BY_RANGE = ("cmlfq", "la_mlfq", "length_aware", "mlfq")
"""Placements that tell buckets apart by their context range alone."""
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Problem:
    """Something that cannot be used as it is, and where it was said."""

    keys: tuple[KeyPath, ...]
    """The keys that contradict each other; the first is the one to look at."""
    text: str
    """What is wrong, then `; `, then what to do."""


def combination_problems(config: Config) -> list[Problem]:
    """Find every impossible combination of values that are each valid on their own."""
    return [
        *_groups(config),
        *_lengths(config),
        *_buckets(config),
        *_ranges(config),
        *_routing(config),
        *_slots(config),
        *_names(config),
        *_addresses(config),
    ]


def _groups(config: Config) -> Iterator[Problem]:
    training = config.training
    size = training.group_size
    size_key: KeyPath = ("training", "group_size")
    if size == 1 and training.baseline == "group":
        yield Problem(
            (size_key, ("training", "baseline")),
            'a group of 1 minus the mean of its group (training.baseline = "group") never has a '
            'gradient; use group_size = 2 or more, or baseline = "none"',
        )
    if training.group_usable_min > size:
        yield Problem(
            (("training", "group_usable_min"), size_key),
            f"{training.group_usable_min} usable trajectories are more than training.group_size "
            f"= {size}, so every group would be dropped; use {size} or less",
        )
    yield from _division(config)


def _division(config: Config) -> Iterator[Problem]:
    training = config.training
    batch = training.groups_per_step * training.group_size
    shares = training.minibatches * training.ranks
    if batch % shares == 0:
        return
    culprit = "minibatches" if batch % training.minibatches else "ranks"
    yield Problem(
        (
            ("training", culprit),
            ("training", "groups_per_step"),
            ("training", "group_size"),
        ),
        f"{batch} trajectories per step (training.groups_per_step * group_size) do not divide "
        f"into {training.minibatches} minibatches on {training.ranks} ranks; choose numbers whose "
        f"product divides {batch}",
    )


def _lengths(config: Config) -> Iterator[Problem]:
    sampling, context = config.sampling, config.model.context_tokens
    turn_key: KeyPath = ("sampling", "turn_tokens_max")
    context_key: KeyPath = ("model", "context_tokens")
    if sampling.turn_tokens_max >= context:
        yield Problem(
            (turn_key, context_key),
            f"a turn of {sampling.turn_tokens_max} tokens leaves no room for a prompt in "
            f"model.context_tokens = {context}; shorten the turn or enlarge the context",
        )
    if sampling.turn_tokens_max > sampling.trajectory_tokens_max:
        yield Problem(
            (turn_key, ("sampling", "trajectory_tokens_max")),
            f"a turn may take {sampling.turn_tokens_max} tokens, but all turns together only "
            f"sampling.trajectory_tokens_max = {sampling.trajectory_tokens_max}; raise the latter",
        )
    if config.training.micro_batch_tokens < context:
        yield Problem(
            (("training", "micro_batch_tokens"), context_key),
            f"a trajectory of model.context_tokens = {context} does not fit into a forward pass "
            f"of {config.training.micro_batch_tokens} tokens; use {context} or more",
        )


def _buckets(config: Config) -> Iterator[Problem]:
    context, turn = config.model.context_tokens, config.sampling.turn_tokens_max
    for index, bucket in enumerate(config.buckets):

        def key(name: str, index: int = index) -> KeyPath:
            return ("buckets", index, name)

        if bucket.kv_tokens < context:
            yield Problem(
                (key("kv_tokens"), ("model", "context_tokens")),
                f"a trajectory of model.context_tokens = {context} could never fit into a KV "
                f"cache of {bucket.kv_tokens} tokens; use {context} or more",
            )
        elif bucket.slots * turn > bucket.kv_tokens:
            yield Problem(
                (key("slots"), key("kv_tokens")),
                f"{bucket.slots} trajectories that sample a turn of sampling.turn_tokens_max = "
                f"{turn} at once need more than kv_tokens = {bucket.kv_tokens}; use at most "
                f"{max(1, bucket.kv_tokens // turn)} slots",
            )
        if bucket.cpus and len(bucket.cpus) != bucket.workers:
            yield Problem(
                (key("cpus"), key("workers")),
                f"lists the cores of {len(bucket.cpus)} workers, but workers = {bucket.workers}; "
                "give one list of cores per worker, or none at all",
            )
        if bucket.tensor_parallel > 1 and bucket.engine in ("torch", "fake"):
            yield Problem(
                (key("tensor_parallel"), key("engine")),
                f'engine = "{bucket.engine}" cannot split a model over '
                f'{bucket.tensor_parallel} devices; use engine = "vllm" or tensor_parallel = 1',
            )


def _ranges(config: Config) -> Iterator[Problem]:
    """Context ranges: those of longer ones follow, and one bucket takes the longest."""
    context_key: KeyPath = ("model", "context_tokens")
    bounds = [bucket.context_tokens_max or inf for bucket in config.buckets]
    for index, (shorter, longer) in enumerate(pairwise(bounds), start=1):
        if longer < shorter or longer == shorter < inf:
            relation = "the same as that of" if longer == shorter else "below that of"
            yield Problem(
                (_bound(index), _bound(index - 1)),
                f'{int(longer)} is {relation} bucket "{config.buckets[index - 1].name}" before it; '
                "list the buckets by rising context_tokens_max, 0 (no bound) last",
            )
    if max(bounds) < config.model.context_tokens:
        last = bounds.index(max(bounds))
        yield Problem(
            (_bound(last), context_key),
            f"no bucket is meant for trajectories of model.context_tokens = "
            f'{config.model.context_tokens}; set context_tokens_max of "'
            f'{config.buckets[last].name}" to 0 (no bound) or to that',
        )


def _bound(index: int) -> KeyPath:
    return ("buckets", index, "context_tokens_max")


def _routing(config: Config) -> Iterator[Problem]:
    scheduler = config.scheduler

    def key(name: str) -> KeyPath:
        return ("scheduler", name)

    if scheduler.payload_small_max >= scheduler.payload_medium_max:
        yield Problem(
            (key("payload_small_max"), key("payload_medium_max")),
            f"no tool return would be medium between {scheduler.payload_small_max} and "
            f"scheduler.payload_medium_max = {scheduler.payload_medium_max} tokens; lower the "
            "former or raise the latter",
        )
    if scheduler.kv_low >= scheduler.kv_high:
        yield Problem(
            (key("kv_low"), key("kv_high")),
            f"a worker that is full at scheduler.kv_high = {scheduler.kv_high:g} must be refilled "
            f"below that, not at {scheduler.kv_low:g}; use less than {scheduler.kv_high:g}",
        )
    yield from _ranges_for_placement(config)


def _ranges_for_placement(config: Config) -> Iterator[Problem]:
    placement, context = config.scheduler.placement, config.model.context_tokens
    reached = {min(bucket.context_tokens_max or context, context) for bucket in config.buckets}
    if placement not in BY_RANGE or len(reached) > 1:
        return
    more = "" if len(config.buckets) > 1 else "add a second [[buckets]], "
    yield Problem(
        (("scheduler", "placement"), _bound(0)),
        f'"{placement}" tells buckets apart by their context range, and here all would take '
        f"{context} tokens; {more}set buckets.0.context_tokens_max to less (about "
        f'{max(1, context // 2)}), or use placement = "libra"',
    )


def _slots(config: Config) -> Iterator[Problem]:
    """Hybrid slots: how many there are to train, and what their replicas can do."""
    hybrid = [index for index, bucket in enumerate(config.buckets) if bucket.hybrid]
    slots = sum(config.buckets[index].workers for index in hybrid)
    workers = sum(bucket.workers for bucket in config.buckets)
    wanted, key = config.elastic.train_slots, ("elastic", "train_slots")
    if wanted > slots:
        yield Problem(
            (key,),
            f"{wanted} slots cannot train where {slots} workers are hybrid; use at most {slots}, "
            "or set hybrid = true in more buckets",
        )
    elif wanted == workers:
        yield Problem(
            (key,),
            f"with all {workers} workers training nobody would roll out; use at most {workers - 1}",
        )
    for index in hybrid:
        yield from _replicas(config, index)


def _replicas(config: Config, index: int) -> Iterator[Problem]:
    training, key = config.training, ("buckets", index, "hybrid")
    if training.minibatches > 1:
        yield Problem(
            (key, ("training", "minibatches")),
            "replicas share the gradient of a whole step, which training.minibatches = "
            f"{training.minibatches} updates in between; use minibatches = 1 or hybrid = false",
        )
    if config.buckets[index].tensor_parallel > 1:
        yield Problem(
            (key, ("buckets", index, "tensor_parallel")),
            "a replica computes on one device and cannot share a slot with a model split over "
            f"{config.buckets[index].tensor_parallel}; use tensor_parallel = 1 or hybrid = false",
        )
    if config.model.dtype == "bfloat16" and training.compute_dtype == "float32":
        yield Problem(
            (key, ("model", "dtype"), ("training", "compute_dtype")),
            'replicas compute with the published weights: with model.dtype = "bfloat16" their '
            "gradients would differ from the trainer's in float32; use training.compute_dtype = "
            '"bfloat16", model.dtype = "float32" or hybrid = false',
        )


def _names(config: Config) -> Iterator[Problem]:
    yield from _repeated("buckets", [bucket.name for bucket in config.buckets])
    yield from _repeated("tools", [server.name for server in config.tools])


def _repeated(table: str, names: Iterable[str]) -> Iterator[Problem]:
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            yield Problem(
                ((table, index, "name"),),
                f"{name!r} is the name of another entry of {table} too; give each its own",
            )


def _addresses(config: Config) -> Iterator[Problem]:
    address = config.coordinator.address
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        yield Problem(
            (("coordinator", "address"),),
            f'{address!r} is no address; write it as "tcp://HOST:PORT", port 0 for a free one',
        )
    for index, server in enumerate(config.tools):
        if server.session_ttl_s <= config.rollout.tool_timeout_s:
            yield Problem(
                (("tools", index, "session_ttl_s"), ("rollout", "tool_timeout_s")),
                f"a session would be closed in the middle of a call that may take "
                f"rollout.tool_timeout_s = {config.rollout.tool_timeout_s:g} s; use more than that",
            )
