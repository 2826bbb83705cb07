"""The routing policy of a run: made as configured, with what it has learned before."""

from common.config import Config
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policies import make_policy
from services.scheduler.routing.policy import Policy
from services.scheduler.routing.route import Residual, Route


class Blind:
    """Expects of every trajectory what the configuration allows, until there is a predictor."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens_max = tokens_max

    def begin(self, route: Route) -> None:
        """Nothing to note."""

    def predict(self, route: Route, *, tokens_since_return: int = 0) -> Residual:
        left = max(1.0, self._tokens_max - route.action_tokens - tokens_since_return)
        return Residual(mean=left / 2, p50=left / 2, p90=left, evidence=0.0)

    def returned(self, route: Route) -> None:
        """Nothing to learn."""

    def end(self, route: Route, *, finished: bool) -> None:
        """Nothing to learn."""

    def dump(self) -> bytes:
        return b""

    def load(self, dumped: bytes) -> None:
        """Nothing was kept."""


def policy_of(config: Config) -> Policy:
    """The policy that `scheduler.placement` names."""
    predictor = Blind(config.sampling.trajectory_tokens_max)
    return make_policy(config.scheduler.placement, RoutingParams.of(config), predictor)
