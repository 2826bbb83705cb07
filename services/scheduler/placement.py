"""Which worker a trajectory goes to. Policies are plain functions; ties are decided by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from common.weights import lineage_of, step_of


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A rollout worker as a policy sees it."""

    peer: str
    name: str
    bucket: str
    version: int
    """Policy version that it decodes with, or -1."""
    slots_free: int
    kv_tokens: int
    """KV cache in all."""
    kv_tokens_used: int
    kv_tokens_expected: int
    """What the trajectories placed there will come to use beyond that."""
    draining: bool = False
    """It refused work, or said that it takes none."""

    @property
    def load(self) -> float:
        """Share of its KV cache that is used or spoken for."""
        return (self.kv_tokens_used + self.kv_tokens_expected) / max(1, self.kv_tokens)


@dataclass(frozen=True, slots=True)
class Need:
    """What a trajectory asks of a worker."""

    kv_tokens: int
    """Expected at its end."""
    lineage: int
    oldest_step: int
    """The worker's weights must have seen so many optimizer steps of this lineage."""


class Policy(Protocol):
    """Chooses among workers that may all be chosen; there is at least one."""

    def __call__(self, need: Need, fitting: Sequence[WorkerView]) -> WorkerView:
        """The worker."""
        ...


def least_load(need: Need, fitting: Sequence[WorkerView]) -> WorkerView:
    """The worker that will have the smallest share of its KV cache in use."""

    def load_after(worker: WorkerView) -> float:
        return worker.load + need.kv_tokens / max(1, worker.kv_tokens)

    return min(fitting, key=lambda worker: (load_after(worker), worker.name, worker.peer))


POLICIES: Mapping[str, Policy] = MappingProxyType({"least_load": least_load})
"""By the configuration key `scheduler.placement`."""


def may_take(need: Need, worker: WorkerView) -> bool:
    """Whether the worker is open and its weights are of the right history and young enough."""
    return (
        not worker.draining
        and worker.slots_free > 0
        and worker.version >= 0
        and lineage_of(worker.version) == need.lineage
        and step_of(worker.version) >= need.oldest_step
    )


def place(policy: Policy, need: Need, workers: Sequence[WorkerView]) -> WorkerView | None:
    """Choose a worker, or None if the trajectory must wait."""
    fitting = [worker for worker in workers if may_take(need, worker)]
    return policy(need, fitting) if fitting else None
