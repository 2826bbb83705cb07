"""Where the run stands and what it waits for, in words and counts."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from common.messages.coordinator import SlotStatus
from common.messages.scheduler import RunStatus
from common.weights import NO_VERSION, lineage_of, step_of
from services.scheduler.groups import Groups
from services.scheduler.leases import Leases
from services.scheduler.records import GroupState, TrajectoryState
from services.scheduler.rules import Rules
from services.scheduler.state import Group, Trajectory

NAMED_MAX = 3
"""Trajectories that are named; enough to start looking."""


class Standing(Protocol):
    """What is told about a book; the book itself, without an import in a circle."""

    rules: Rules
    leases: Leases
    groups: Groups

    @property
    def step(self) -> int: ...

    @property
    def last_metrics(self) -> dict[str, float]: ...

    @property
    def finished(self) -> bool: ...

    @property
    def lineage_number(self) -> int: ...


def waiting_for(book: Standing, now: float, first: Sequence[str] = ()) -> str:
    """What the next step waits for. `first` are groups that it must wait for in particular."""
    if book.groups.failure or book.finished:
        return book.groups.failure
    if book.lineage_number < 0:
        return "the trainer, to load its state"
    if book.groups.count(GroupState.TAKEN):
        return f"the trainer, at step {book.step + 1}"
    ready = book.groups.count(GroupState.READY)
    text = f"step {book.step + 1}: {ready} of {book.rules.groups_per_step} groups are ready"
    line = book.groups.in_line()
    groups = [book.groups.alive[group_id] for group_id in first] or list(line)
    named = list(islice((t for g in groups for t in g.trajectories if t.running), NAMED_MAX))
    waiting = sum(group.waiting for group in groups)
    if named:
        more = _running(book, groups) - len(named)
        names = ", ".join(_name(book, trajectory, now) for trajectory in named)
        return f"{text}; {names}{f' and {more} more' if more > 0 else ''}"
    if waiting:
        return f"{text}; {waiting} trajectories wait: {_why_unplaced(book)}"
    return text


def _running(book: Standing, groups: Sequence[Group]) -> int:
    """How many of these groups' trajectories are on a worker."""
    if len(groups) == len(book.groups.alive):
        return sum(len(worker.routes) for worker in book.leases.fleet.workers.values())
    return sum(t.running for group in groups for t in group.trajectories)


def _name(book: Standing, trajectory: Trajectory, now: float) -> str:
    worker = book.leases.fleet.workers.get(trajectory.row.worker)
    where = worker.name if worker is not None else trajectory.row.worker
    age_s = max(0.0, now - trajectory.since)
    return f"{trajectory.row.trajectory_id} on {where} for {age_s:.0f} s"


def _why_unplaced(book: Standing) -> str:
    workers = [worker for worker in book.leases.fleet.workers.values() if worker.heard]
    if not workers:
        return "no rollout worker has reported"
    if all(len(worker.routes) >= worker.slots for worker in workers):
        return "all slots are taken"
    usable = [
        worker
        for worker in workers
        if worker.version != NO_VERSION and lineage_of(worker.version) == book.lineage_number
    ]
    if not usable:
        return f"no worker has weights of lineage {book.lineage_number} yet"
    newest = max(step_of(worker.version) for worker in usable)
    return f"workers have weights of step {newest}, the trainer has done {book.step}"


def run_status(book: Standing, now: float, slots: Sequence[SlotStatus] = ()) -> RunStatus:
    """Everything that people are shown. `slots` are the hybrid ones, by the coordinator's word."""
    trajectories = Counter(book.groups.ended_trajectories)
    trajectories.update(t.row.state for t in book.groups.trajectories.values())
    groups = Counter(book.groups.ended_groups)
    groups.update(group.row.state for group in book.groups.alive.values())
    workers = book.leases.fleet.statuses()
    return RunStatus(
        step=book.step,
        steps_max=book.rules.max_steps,
        lineage=book.lineage_number,
        version=max((worker.version for worker in workers), default=NO_VERSION),
        trajectories={state.value: trajectories[state.value] for state in TrajectoryState},
        groups={state.value: groups[state.value] for state in GroupState},
        workers=workers,
        last_metrics=book.last_metrics,
        waiting_for=waiting_for(book, now),
        slots=list(slots),
    )
