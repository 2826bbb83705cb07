"""Experiments that hold the simulator to published shapes, by id."""

from services.simulator.experiments import (
    a0_tensor_parallel,
    a1_growth,
    a2_long_tail,
    a8_routing,
)
from services.simulator.experiments.result import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "A0": a0_tensor_parallel.run,
    "A1": a1_growth.run,
    "A2": a2_long_tail.run,
    "A8": a8_routing.run,
}
