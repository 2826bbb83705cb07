"""The routing policy of a run: made as configured, with what it has learned before."""

from common.config import Config
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policies import make_policy
from services.scheduler.routing.policy import Policy


def policy_of(config: Config) -> Policy:
    """The policy that `scheduler.placement` names."""
    return make_policy(config.scheduler.placement, RoutingParams.of(config), ResidualPredictor())
