"""Simulated clusters: which workers there are, what they can hold, and how long training takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from services.simulator.costs import (
    EngineSpeed,
    TrainLayout,
    engine_speed,
    kv_capacity_tokens,
    train_step_s,
    weight_sync_s,
)
from services.simulator.devices import A800, QWEN3_14B, Device, ModelShape

APPLY_S = 0.5
"""Between two iterations, to swap weights that have arrived."""


@dataclass(frozen=True, slots=True)
class SimBucket:
    """A bucket of a simulated cluster."""

    name: str
    tensor_parallel: int
    context_tokens_max: int
    """It is meant for trajectories that end with at most so long a context."""
    nodes: tuple[int, ...]
    """Node of each of its workers."""
    slots: int = 256
    """Trajectories that one worker holds at once, and the most its engine batches."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One simulated worker."""

    peer: str
    name: str
    bucket: str
    bucket_index: int
    node: int
    slots: int
    kv_tokens: int
    speed: EngineSpeed


@dataclass(frozen=True, slots=True)
class TrainTimes:
    """How long the trainer's side of a step takes."""

    model: ModelShape
    device: Device
    layout: TrainLayout
    publish_s: float
    """From a step's end until workers can swap its weights in."""

    def train_s(self, contexts: Sequence[int]) -> float:
        """One step over trajectories of these lengths."""
        tokens = sum(contexts)
        # Attention is quadratic: the mean that counts is the one over tokens.
        mean = sum(context * context for context in contexts) / max(1, tokens)
        return train_step_s(
            self.model, self.device, self.layout, tokens=tokens, context_tokens=mean
        )


@dataclass(frozen=True)
class Cluster:
    """A cluster and what it trains."""

    name: str
    about: str
    buckets: tuple[SimBucket, ...]
    """Shortest context range first."""
    train_devices: int
    trajectories_per_step: int
    """So many that the caches of TP 1 workers fill up where a policy starts everything on them,
    and that the last few of a step still decide when it ends."""
    model: ModelShape = QWEN3_14B
    device: Device = A800

    def groups_per_step(self, group_size: int) -> int:
        """Groups of that size that make a step."""
        return max(1, round(self.trajectories_per_step / group_size))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Longest context of each bucket but the last."""
        return tuple(bucket.context_tokens_max for bucket in self.buckets[:-1])

    @property
    def context_tokens_max(self) -> int:
        """Longest context of all."""
        return self.buckets[-1].context_tokens_max

    def with_bounds(self, bounds: Sequence[int]) -> "Cluster":
        """The same with other context ranges for all buckets but the last."""
        changed = [
            replace(bucket, context_tokens_max=bound)
            for bucket, bound in zip(self.buckets, bounds, strict=False)
        ]
        return replace(self, buckets=(*changed, *self.buckets[len(changed) :]))

    def kv_tokens(self, bucket: SimBucket) -> int:
        """KV cache of one worker of the bucket."""
        return kv_capacity_tokens(self.model, self.device, bucket.tensor_parallel)

    def workers(self) -> list[WorkerPlan]:
        """All workers, bucket by bucket."""
        return [
            self._worker(index, bucket, number, node)
            for index, bucket in enumerate(self.buckets)
            for number, node in enumerate(bucket.nodes)
        ]

    def _worker(self, index: int, bucket: SimBucket, number: int, node: int) -> WorkerPlan:
        name = f"{bucket.name}-{number}"
        return WorkerPlan(
            peer=f"sim/rollout/{name}/0001",
            name=name,
            bucket=bucket.name,
            bucket_index=index,
            node=node,
            slots=bucket.slots,
            kv_tokens=self.kv_tokens(bucket),
            speed=engine_speed(self.model, self.device, bucket.tensor_parallel),
        )

    @cached_property
    def train_times(self) -> TrainTimes:
        """What the training side costs."""
        return TrainTimes(
            self.model,
            self.device,
            TrainLayout(devices=self.train_devices),
            publish_s=weight_sync_s(self.model, self.device),
        )


def _pattern(nodes: int) -> tuple[SimBucket, ...]:
    """TP 1, 1, 2, 4 on each node: the published pattern."""
    each = tuple(range(1, nodes + 1))
    return (
        SimBucket("short", 1, 4_000, tuple(node for node in each for _ in range(2))),
        SimBucket("medium", 2, 12_000, each),
        SimBucket("long", 4, 40_960, each),
    )


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster(
            "paper",
            "48 A800, Qwen3-14B: 16 for rollout in two nodes of TP 1, 1, 2, 4; 32 train",
            _pattern(2),
            train_devices=32,
            trajectories_per_step=512,
        ),
        Cluster(
            "node",
            "24 A800, Qwen3-14B: one rollout node of TP 1, 1, 2, 4; 16 train",
            _pattern(1),
            train_devices=16,
            trajectories_per_step=256,
        ),
    )
}
