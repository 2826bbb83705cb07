"""What the ranks of the core do next, all the same: run micro-batches, or add a replica's sum."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from services.trainer.batch import TrainingSequence
from services.trainer.leases import Own
from services.trainer.packing import Pack


@dataclass(frozen=True, slots=True)
class Work:
    """All micro-batches of one update."""

    sequences: Sequence[TrainingSequence]
    weights: Sequence[float]
    """Of each action token, by sequence; the true totals are in it."""
    packs: Sequence[Pack]


@dataclass(frozen=True, slots=True)
class Sum:
    """A gradient sum of some micro-batches, checked."""

    path: str
    """Where every rank can open it until the next round."""
    dtype: str
    """`F32` or `BF16`."""
    sums: tuple[float, ...] = ()
    """As `pieces.Totals.report`; only rank 0 needs them."""


Round: TypeAlias = Own | Sum


class Sharing(Protocol):
    """Deals the micro-batches of one update; called by the training thread only."""

    def begin(self, work: Work) -> None:
        """Open an update."""
        ...

    def next(self, between: Callable[[], None]) -> Round | None:
        """The next round, when the one before it is done; None when all is in the sum.

        Args:
            between: called now and then while waiting; may raise.
        """
        ...

    def end(self) -> None:
        """Close the update, however it went."""
        ...


class Alone:
    """Nobody helps: micro-batches in their order, one for each rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._left: list[tuple[int, ...]] = []

    def begin(self, work: Work) -> None:
        """See `Sharing`."""
        self._left = in_rounds(len(work.packs), self._ranks)

    def next(self, between: Callable[[], None]) -> Own | None:
        """See `Sharing`."""
        return Own(self._left.pop(0)) if self._left else None

    def end(self) -> None:
        """See `Sharing`."""
        self._left = []


class Relay:
    """What rank 0 does with several ranks: the others are told each round."""

    def __init__(self, sharing: Sharing, tell: Callable[[dict[str, Any]], None]) -> None:
        self._sharing, self._tell = sharing, tell

    def begin(self, work: Work) -> None:
        """See `Sharing`."""
        self._sharing.begin(work)

    def next(self, between: Callable[[], None]) -> Round | None:
        """See `Sharing`."""
        match due := self._sharing.next(between):
            case Own(packs):
                self._tell({"round": "own", "packs": list(packs)})
            case Sum(path, dtype):
                self._tell({"round": "sum", "path": path, "dtype": dtype})
            case None:
                self._tell({"round": "end"})
        return due

    def end(self) -> None:
        """See `Sharing`."""
        self._sharing.end()


class Followed:
    """What the other ranks do: the rounds of rank 0, as it tells them."""

    def __init__(self, hear: Callable[[], Mapping[str, Any] | None]) -> None:
        self._hear = hear

    def begin(self, work: Work) -> None:
        """See `Sharing`."""

    def next(self, between: Callable[[], None]) -> Round | None:
        """See `Sharing`.

        Raises:
            EOFError: rank 0 is gone.
        """
        match self._hear():
            case {"round": "own", "packs": packs}:
                return Own(tuple(packs))
            case {"round": "sum", "path": path, "dtype": dtype}:
                return Sum(path, dtype)
            case {"round": "end"}:
                return None
            case _:
                raise EOFError("rank 0 ended within a step")

    def end(self) -> None:
        """See `Sharing`."""


def in_rounds(packs: int, ranks: int) -> list[tuple[int, ...]]:
    """Numbers of micro-batches, one for each rank a round; the last round may be short."""
    return [tuple(range(first, min(first + ranks, packs))) for first in range(0, packs, ranks)]
