"""A predictor that knows the scripts: the upper bound of what any predictor could give a policy."""

from services.scheduler.routing.route import Residual, Route
from services.simulator.scripts import Scripts

EVIDENCE = 1e9
"""Nothing is surer."""


class OraclePredictor:
    """Tells the truth."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def begin(self, route: Route) -> None:
        """Knows already."""

    def predict(self, route: Route, *, tokens_since_return: int = 0) -> Residual:
        """What is left by the script."""
        left = self._scripts.of(route.trajectory_id).output_left
        tokens = float(max(0, left[min(route.turns, len(left) - 1)] - tokens_since_return))
        return Residual(mean=tokens, p50=tokens, p90=tokens, evidence=EVIDENCE)

    def returned(self, route: Route) -> None:
        """Knows already."""

    def end(self, route: Route, *, finished: bool) -> None:
        """Knows already."""

    def dump(self) -> bytes:
        """Nothing was learned."""
        return b""

    def load(self, dumped: bytes) -> None:
        """Nothing to take over."""
