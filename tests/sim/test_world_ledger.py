"""The simulated world with a ledger: what it keeps is the whole truth, at every step."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.scheduler.book import Book
from services.scheduler.ledger import MemoryLedger
from services.scheduler.records import TrajectoryState
from services.simulator.world import Fault, World
from tests.support.sim_world import play, world

FAULTS = (Fault(41.3, "medium-0", "kill"), Fault(60.0, "short-0", "drain"))


@pytest.fixture
def ledger() -> Iterator[MemoryLedger]:
    kept = MemoryLedger()
    yield kept
    kept.close()


def told(book: Book) -> dict[str, Any]:
    """What must survive a restart."""
    groups = sorted(book.groups.alive.values(), key=lambda group: group.row.admission)
    members = [member for group in groups for member in group.trajectories]
    return {
        "lineage": book.lineage,
        "step": book.step,
        "attempt": book.attempt,
        "tasks left": book.groups.tasks_left,
        "alive": [group.row for group in groups],
        "trajectories": [member.row for member in members],
        "waiting": {m.row.trajectory_id for m in members if m.row.state == TrajectoryState.WAITING},
        "needy": [group.row.group_id for group in book.groups.needy()],
        "contexts": [member.route.context_tokens for member in members if not member.row.ended],
        "turns": [member.route.turns for member in members if not member.row.ended],
        "moves": [member.route.moves for member in members if not member.row.ended],
        "decisions": [member.decisions for member in members if not member.row.ended],
        "groups ended": +book.groups.ended_groups,
        "trajectories ended": +book.groups.ended_trajectories,
    }


def rebuilt(small: World, ledger: MemoryLedger) -> Book:
    """A book that has seen nothing but the ledger."""
    now = small.timeline.now
    return Book(small.rules, small.order, ledger.snapshot(), small.make_policy(), now=now)


def comparing(small: World, ledger: MemoryLedger, seen: list[int]) -> Callable[[int], None]:
    def on_step(step: int) -> None:
        living = told(small.desk.book)
        assert told(rebuilt(small, ledger)) == living
        seen.append(len(living["alive"]))

    return on_step


@pytest.mark.parametrize("faults", [(), FAULTS], ids=["quiet", "faults"])
@pytest.mark.parametrize("policy", ["libra", "least_load", "mlfq"])
def test_a_book_rebuilt_from_the_ledger_agrees_with_the_living_one_after_every_step(
    policy: str, faults: tuple[Fault, ...], ledger: MemoryLedger
) -> None:
    small = world(policy, steps=6, faults=faults, ledger=ledger)
    alive: list[int] = []
    small.run(comparing(small, ledger, alive))
    assert len(alive) == 6
    assert max(alive) > 0
    assert alive[-1] == 0


def test_keeping_the_rows_changes_nothing_that_happens(ledger: MemoryLedger) -> None:
    assert world(ledger=ledger).run().trace == play().trace
