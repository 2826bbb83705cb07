"""The routing policies by the name that the configuration key `scheduler.placement` gives them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from services.scheduler.routing.baselines import LeastLoad, RoundRobin
from services.scheduler.routing.libra import Libra
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policy import Policy, Predictor
from services.scheduler.routing.published import Cmlfq, LaMlfq, LengthAware, Mlfq

__all__ = ["POLICIES", "RoutingParams", "make_policy"]

POLICIES: Mapping[str, Callable[[RoutingParams, Predictor], Policy]] = MappingProxyType(
    {
        "libra": Libra,
        "cmlfq": lambda params, predictor: Cmlfq(),
        "la_mlfq": lambda params, predictor: LaMlfq(),
        "length_aware": LengthAware,
        "mlfq": lambda params, predictor: Mlfq(),
        "least_load": lambda params, predictor: LeastLoad(),
        "round_robin": lambda params, predictor: RoundRobin(),
    }
)


def make_policy(name: str, params: RoutingParams, predictor: Predictor) -> Policy:
    """A policy that has learned nothing yet.

    Args:
        name: one of `POLICIES`.
        params: what the configuration decides.
        predictor: used by the policies that think about what is still to come.
    """
    return POLICIES[name](params, predictor)
