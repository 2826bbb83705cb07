"""Which ready groups a step gets, so that none becomes too stale later.

Each group has a last step: the last one for which its oldest token is still young enough. Taking
whatever is ready first would let slow groups be overtaken until they must be thrown away, and
what is thrown away is mostly long: training would drift to short answers. So a batch is taken
by last step, and not before the groups left behind still fit into the steps that they have.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that is alive and not taken."""

    group_id: str
    last_step: float
    """inf while nothing of it has begun."""
    admission: int
    ready: bool
    blocked: bool = False
    """It cannot become ready before later steps are trained, so nobody may wait for it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch, or what it waits for."""

    chosen: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    """Groups that must be ready first; empty also when merely more groups are needed."""


def choose_batch(candidates: Sequence[Candidate], *, step: int, size: int) -> Choice:
    """Choose the groups of `step`, or say which groups it must wait for."""
    ready = sorted(
        (c for c in candidates if c.ready), key=lambda c: (c.last_step, c.admission, c.group_id)
    )
    if len(ready) < size:
        return Choice()
    batch = ready[:size]
    chosen = {c.group_id for c in batch}
    left = [c for c in candidates if c.group_id not in chosen]
    newest = batch[-1].last_step
    earlier = [c for c in left if not c.ready and not c.blocked and c.last_step < newest]
    if earlier and not _fits(left, after=step, size=size):
        earlier.sort(key=lambda c: (c.last_step, c.admission, c.group_id))
        return Choice(waits_for=tuple(c.group_id for c in earlier))
    return Choice(chosen=tuple(c.group_id for c in batch))


def _fits(left: Sequence[Candidate], *, after: int, size: int) -> bool:
    """Whether `size` groups in each step after `after` can train all before their last step."""
    last_steps = sorted(c.last_step for c in left)
    return all(
        number <= max(0.0, last_step - after) * size
        for number, last_step in enumerate(last_steps, start=1)
    )
