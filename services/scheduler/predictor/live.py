"""A trajectory that the predictor follows while it lives."""

from services.scheduler.predictor.features import START, Point, Progress
from services.scheduler.predictor.siblings import Siblings


class Live:
    """A trajectory that has not ended."""

    __slots__ = (
        "locations",
        "log_sampled",
        "place",
        "point",
        "progress",
        "rows",
        "seen",
        "siblings",
        "version",
    )

    def __init__(self, progress: Progress, siblings: Siblings) -> None:
        self.place = -1
        """Among those that have had a turn, or -1."""
        self.progress = progress
        self.siblings = siblings
        self.point: Point = START
        """The last one."""
        self.rows = bytearray()
        """Of all points, packed."""
        self.seen: list[float] = []
        """What was known of siblings at each point (`SEEN`), one after the other."""
        self.log_sampled = 0.0
        self.locations: list[float] = []
        """By the regression alone, as of when each point came, or later."""
        self.version = -1
        """Of the weights behind the last location."""
