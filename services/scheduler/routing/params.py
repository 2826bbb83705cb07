"""What the configuration decides for the routing policies, as plain numbers."""

from dataclasses import dataclass
from typing import Self

from common.config import Config
from services.scheduler.routing.outcomes import PayloadSizes
from services.scheduler.routing.route import Residual, Route


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """Limits and margins; each is a configuration key of the same name, or made of one."""

    moves_max: int = 4
    move_saving_min: float = 0.15
    kv_high: float = 0.95
    kv_low: float = 0.85
    payload_sizes: PayloadSizes = PayloadSizes()  # noqa: RUF009  (an immutable tuple)
    context_tokens_max: int = 32768
    """Of the model: prompt plus everything after it."""
    output_tokens_max: int = 32768
    """Sampled in all turns of a trajectory."""
    turns_max: int = 64
    """Turns of a trajectory."""

    def possible(self, residual: Residual, route: Route) -> Residual:
        """What of a prediction can still come: limits end a trajectory that would go on."""
        left = min(
            self.output_tokens_max - route.action_tokens,
            self.context_tokens_max - route.context_tokens,
        )
        mean, p50, p90, evidence = residual
        if mean <= left and p90 <= left:  # Then the median is, too.
            return residual
        most = float(max(0, left))
        return Residual(min(mean, most), min(p50, most), min(p90, most), evidence)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read them from the configuration."""
        scheduler, sampling = config.scheduler, config.sampling
        return cls(
            moves_max=scheduler.moves_max,
            move_saving_min=scheduler.move_saving_min,
            kv_high=scheduler.kv_high,
            kv_low=scheduler.kv_low,
            payload_sizes=PayloadSizes(scheduler.payload_small_max, scheduler.payload_medium_max),
            context_tokens_max=config.model.context_tokens,
            output_tokens_max=sampling.trajectory_tokens_max,
            turns_max=sampling.turns_max,
        )
