"""What the configuration decides for the scheduler, as plain numbers."""

from dataclasses import dataclass
from typing import Self

from common.config import Config
from services.scheduler.routing.fleet import BucketShape
from services.scheduler.routing.outcomes import PayloadSizes

GATHER_S = 0.1
"""From a worker's report to placing: workers apply a version within moments of each other, and the
first one that says so must not get all that waits for it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits and sizes; each is a configuration key of the same name."""

    seed: int
    max_steps: int
    failed_groups_max: int
    groups_per_step: int
    group_size: int
    group_usable_min: int
    filters_zero_variance: bool
    max_staleness_steps: int
    placements_max: int
    attempts_max: int
    lease_s: float
    turn_timeout_s: float
    tokens_expected: int
    """Context at the end of a trajectory, before any has been seen."""
    buckets: tuple[BucketShape, ...] = ()
    """Shortest context range first."""
    payload_sizes: PayloadSizes = PayloadSizes()  # noqa: RUF009  (an immutable tuple)

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read them from the configuration."""
        training, scheduler = config.training, config.scheduler
        return cls(
            seed=config.run.seed,
            max_steps=config.run.max_steps,
            failed_groups_max=config.run.failed_groups_max,
            groups_per_step=training.groups_per_step,
            group_size=training.group_size,
            group_usable_min=training.group_usable_min,
            # Without a baseline equal rewards do have a gradient.
            filters_zero_variance=(
                training.zero_variance == "filter" and training.baseline == "group"
            ),
            max_staleness_steps=scheduler.max_staleness_steps,
            placements_max=scheduler.placements_max,
            attempts_max=scheduler.attempts_max,
            lease_s=scheduler.lease_s,
            turn_timeout_s=scheduler.turn_timeout_s,
            tokens_expected=min(
                config.model.context_tokens, 2 * config.sampling.trajectory_tokens_max
            ),
            buckets=bucket_shapes(config),
            payload_sizes=PayloadSizes(scheduler.payload_small_max, scheduler.payload_medium_max),
        )


def bucket_shapes(config: Config) -> tuple[BucketShape, ...]:
    """The buckets as the policies see them; one without a bound takes what the model does."""
    shapes = [
        BucketShape(
            bucket.name,
            bucket.tensor_parallel,
            bucket.context_tokens_max or config.model.context_tokens,
            bucket.kv_tokens,
        )
        for bucket in config.buckets
    ]
    return tuple(sorted(shapes, key=lambda shape: shape.context_tokens_max))
