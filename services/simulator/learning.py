"""The predictor that simulated policies learn with."""

from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policy import Predictor
from services.scheduler.routing.route import Residual, Route

TURNS_TOLD_APART = 6
FIRST_GUESS = 500.0


class MeanByTurn:
    """Means of what trajectories still sampled after so many turns."""

    def __init__(self) -> None:
        self._sums = [(1, FIRST_GUESS)] * (TURNS_TOLD_APART + 1)

    def begin(self, route: Route) -> None:
        """Nothing to note."""

    def predict(self, route: Route, *, tokens_since_return: int = 0) -> Residual:
        """The mean, and twice that as the 90th percentile."""
        count, total = self._sums[min(route.turns, TURNS_TOLD_APART)]
        mean = total / count
        return Residual(mean, mean, 2 * mean, float(count))

    def returned(self, route: Route) -> None:
        """Nothing to note."""

    def end(self, route: Route, *, finished: bool) -> None:
        """Learn from it."""
        for turn in range(route.turns + 1 if finished else 0):
            at = route.action_tokens_at[turn - 1] if turn else 0
            place = min(turn, TURNS_TOLD_APART)
            count, total = self._sums[place]
            self._sums[place] = (count + 1, total + route.action_tokens - at)

    def dump(self) -> bytes:
        """Not kept."""
        return b""

    def load(self, dumped: bytes) -> None:
        """Not kept."""


def make_predictor(params: RoutingParams) -> Predictor:
    """One that has learned nothing yet."""
    del params
    return MeanByTurn()
