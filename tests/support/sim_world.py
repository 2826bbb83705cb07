"""A small simulated cluster and trajectories to play on it."""

import random
from dataclasses import dataclass

from common.trajectory import ToolStatus
from services.scheduler.ledger import MemoryLedger
from services.simulator.cluster import Cluster, SimBucket
from services.simulator.measures import RunResult
from services.simulator.traces import TraceTrajectory, TraceTurn
from services.simulator.world import Fault, Scenario, World

SMALL = Cluster(
    "small",
    "two nodes, three buckets",
    (
        SimBucket("short", 1, 2_000, (1, 1), slots=24),
        SimBucket("medium", 2, 6_000, (1,), slots=24),
        SimBucket("long", 4, 40_960, (2,), slots=24),
    ),
    train_devices=8,
    trajectories_per_step=16,
)


@dataclass
class Rolls:
    """Trajectories by dice: the same for the same seed and place."""

    seed: int = 0
    group_size: int = 4
    mean_turns: float = 3.0

    def group(self, index: int, step: int) -> list[TraceTrajectory]:
        del step
        dice = random.Random(f"{self.seed}/{index}")
        prompt = dice.randint(50, 400)
        return [
            TraceTrajectory(f"{index}.{n}", str(index), prompt, self._turns(dice), dice.random())
            for n in range(self.group_size)
        ]

    def _turns(self, dice: random.Random) -> tuple[TraceTurn, ...]:
        count = 1 + int(dice.expovariate(1 / (self.mean_turns - 1)))
        turns = [
            TraceTurn(
                dice.randint(1, 900),
                "search",
                dice.choice([ToolStatus.OK, ToolStatus.OK, ToolStatus.ERROR]),
                dice.randint(1, 700),
                dice.expovariate(1.0),
            )
            for _ in range(count - 1)
        ]
        return (*turns, TraceTurn(dice.randint(1, 900), "", None, 0, None))


def play(
    policy: str = "libra", *, seed: int = 0, steps: int = 4, max_staleness_steps: int = 1
) -> RunResult:
    """One run of the small world."""
    small = world(policy, seed=seed, steps=steps, max_staleness_steps=max_staleness_steps)
    return small.run()


def world(
    policy: str = "libra",
    *,
    seed: int = 0,
    steps: int = 4,
    faults: tuple[Fault, ...] = (),
    max_staleness_steps: int = 1,
    cluster: Cluster = SMALL,
    ledger: MemoryLedger | None = None,
) -> World:
    """The small world before it runs."""
    scenario = Scenario(
        cluster=cluster,
        policy=policy,
        seed=seed,
        steps=steps,
        groups_per_step=4,
        max_staleness_steps=max_staleness_steps,
        faults=faults,
    )
    return World(scenario, Rolls(seed), ledger)
