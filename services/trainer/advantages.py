"""Advantages of one group: how much better than its siblings each trajectory did.

A failed trajectory has no reward; it takes part in nothing: not in the mean, not in the standard
deviation, not in the loss. Groups are never mixed, so the group is the only scale there is.
"""

import math
from collections.abc import Sequence
from typing import Literal

STD_FLOOR = 1e-4
"""Added to the standard deviation. Rewards that differ by rounding only (1e-9) get advantages of
about 1e-5 instead of 1; where rewards differ by 0.1 it changes less than 1 %."""


def group_advantages(
    rewards: Sequence[float | None],
    *,
    baseline: Literal["group", "none"] = "group",
    normalise_std: bool = True,
    usable_min: int = 1,
) -> list[float | None]:
    """Advantage of each trajectory of one group; None where the reward is None (failed).

    With `baseline="group"` it is (reward - mean) / (std + STD_FLOOR) with the population standard
    deviation of the usable rewards, so that no advantage exceeds sqrt(n - 1); without
    `normalise_std` it is reward - mean. With `baseline="none"` it is the reward. A group with
    fewer than `usable_min` rewards has advantages of 0.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; without std: Dr. GRPO, arXiv 2503.20783.
    """
    usable = [reward for reward in rewards if reward is not None]
    if len(usable) < usable_min:
        return [None if reward is None else 0.0 for reward in rewards]
    if baseline == "none":
        return list(rewards)
    if not usable or min(usable) == max(usable):  # Exactly 0, whatever the mean rounds to.
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(usable) / len(usable)
    scale = 1.0
    if normalise_std:
        variance = math.fsum((reward - mean) ** 2 for reward in usable) / len(usable)
        scale = math.sqrt(variance) + STD_FLOOR
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
