"""`libra bench migrate`: does the training loop notice what happens around it?

One run of real processes, three conditions in turn, again and again: nothing moves; the tenant of
a slot changes sides every few steps, so that a replica joins and leaves; and weights stream to
workers elsewhere without a pause. Every step trains the same prepared batch of 4,096 tokens.

The trainer has a core of its own and everything else shares the others, since two processes on
one core would measure the kernel. What is left is physical: cores share a memory bus and a cache,
so a neighbour that is busy at all slows a step. The limits are against the quiet condition all the
same; a fourth one, `beside`, shows how much of a miss is that: an unrelated process that exchanges
nothing with the run computes on the other cores.

A step is what the training thread does for it (time/train) and what the loop spends on publishing
before it goes on. While a replica helps, the step is shorter; so what replicas ran is put back at
the speed of the quiet steps, and what the core waited for replicas is taken out. Direct accounting
counts what the loop does *for* migration: publishing, dealing out leases, adding gradients.
"""

import asyncio
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Any

from common.errors import ConfigError
from common.logs import configure_logs
from services.cli.bench import BenchReport, Check, at_most
from services.cli.bench_migrate_run import Outcome, Program, Step, perform
from services.cli.bench_migrate_stage import (
    BESIDE,
    CONDITIONS,
    QUIET,
    STREAMING,
    SWITCHING,
    Stage,
    make_config,
    on_cores,
)
from services.cli.bench_onpolicy import memory_folder

MEDIAN_LIMIT = 0.01
P99_LIMIT = 0.05
LOOP_LIMIT = 0.005
"""Of a step, for the time that the loop spends on migration."""
CORES_MIN = 2


def bench_migrate(*, rounds: int, block_steps: int, switch_every: int) -> BenchReport:
    """Run all conditions `rounds` times.

    Raises:
        ConfigError: there is only one core.
        RunFailed: a process of the run ended, or something did not happen in time.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES_MIN:
        raise ConfigError("bench migrate: the trainer needs a core of its own; there is only one")
    configure_logs("bench", "migrate", level="WARNING")
    program = Program(rounds, block_steps, switch_every)
    with tempfile.TemporaryDirectory(prefix="libra-bench-", dir=memory_folder()) as name:
        folder = Path(name)
        config = make_config(folder, cores)
        stage = Stage(config, folder, cores)
        with on_cores(*cores[1:]):
            try:
                stage.start()
                outcome = asyncio.run(perform(config, stage, program))
            finally:
                stage.stop()
        outcome.received = stage.received
    return report(outcome, len(cores))


def report(outcome: Outcome, cores: int) -> BenchReport:
    """Distributions by condition, and what the limits say."""
    by_condition = {
        condition: [step for step in outcome.steps if step.condition == condition]
        for condition in CONDITIONS
    }
    pack_s = _pack_seconds(by_condition[QUIET], outcome.packs)
    figures: dict[str, Any] = {
        "cores": cores,
        "trainer_cores": 1,
        "steps": len(outcome.steps),
        "micro_batches": outcome.packs,
        "tokens": median(step.metrics["tokens/trained"] for step in outcome.steps),
    }
    for condition, steps in by_condition.items():
        figures[condition] = _distribution(steps, [alone_s(step, pack_s) for step in steps])
    checks: list[Check] = []
    for condition in (SWITCHING, STREAMING):
        figures[f"{condition} / {QUIET}"] = _compared(outcome.steps, condition, pack_s)
        checks += _checks(condition, figures, _loop_share(by_condition[condition]))
    figures[f"{BESIDE} / {QUIET}"] = _compared(outcome.steps, BESIDE, pack_s)
    figures["received"] = _received(outcome.received)
    figures["switch"] = _switch_figures(outcome, figures[QUIET]["step_s"])
    return BenchReport("migrate", figures, checks)


def _checks(condition: str, figures: dict[str, Any], loop_share: float) -> list[Check]:
    compared = figures[f"{condition} / {QUIET}"]
    return [
        at_most(f"{condition}: median", compared["median"] - 1, "longer", MEDIAN_LIMIT),
        at_most(f"{condition}: p99", compared["p99"] - 1, "longer", P99_LIMIT),
        at_most(f"{condition}: on the loop", loop_share, "of a step", LOOP_LIMIT),
    ]


def step_s(step: Step) -> float:
    """What the core spent on a step."""
    metrics = step.metrics
    return metrics["time/train"] + metrics["time/publish_loop"]


def alone_s(step: Step, pack_s: float) -> float:
    """The same, had the core run every micro-batch itself.

    Args:
        step: may have been helped by replicas.
        pack_s: seconds that the core needs for one micro-batch.
    """
    helped = step.metrics.get("replicas/micro_batches", 0.0) * pack_s
    return step_s(step) + helped - step.metrics.get("time/wait_replicas", 0.0)


def loop_s(step: Step) -> float:
    """What the loop did for migration: publish, deal out, add."""
    metrics = step.metrics
    return metrics["time/publish_loop"] + metrics.get("time/loop_replicas", 0.0)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _pack_seconds(quiet: Sequence[Step], packs: int) -> float:
    return median(step_s(step) for step in quiet) / packs


def _distribution(steps: Sequence[Step], alone: Sequence[float]) -> dict[str, float]:
    return {
        "step_s": median(step_s(step) for step in steps),
        "alone_s": median(alone),
        "alone_p99_s": quantile(alone, 0.99),
        "wait_replicas_s": mean(step.metrics.get("time/wait_replicas", 0.0) for step in steps),
        "replicas_micro_batches": mean(
            step.metrics.get("replicas/micro_batches", 0.0) for step in steps
        ),
        "loop_s": mean(map(loop_s, steps)),
        "loop_share": _loop_share(steps),
    }


def _loop_share(steps: Sequence[Step]) -> float:
    return mean(map(loop_s, steps)) / mean(map(step_s, steps))


def _compared(steps: Sequence[Step], condition: str, pack_s: float) -> dict[str, float]:
    """Against the quiet steps of the same round: the machine is not equally fast all the time."""
    by_round: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        by_round[step.round][step.condition].append(alone_s(step, pack_s))
    medians = [median(r[condition]) / median(r[QUIET]) for r in by_round.values()]
    tails = [
        quantile([value / median(r[QUIET]) for r in by_round.values() for value in r[name]], 0.99)
        for name in (condition, QUIET)
    ]
    return {"median": median(medians), "p99": tails[0] / tails[1]}


def _received(received: dict[str, float]) -> dict[str, float]:
    if not received.get("seconds"):
        return {}
    return {**received, "bytes_per_s": received["bytes"] / received["seconds"]}


def _switch_figures(outcome: Outcome, step: float) -> dict[str, Any]:
    """Seconds of a change of side by phase, and all of it as a share of a step."""
    figures: dict[str, Any] = {"completed": len(outcome.switches)}
    for side in ("train", "rollout"):
        seen = [slot for slot in outcome.switches if slot.side == side]
        if seen:
            phases = {
                phase: median(getattr(slot, phase) for slot in seen)
                for phase in ("drain_s", "release_s", "load_s")
            }
            figures[f"to_{side}"] = {**phases, "share_of_a_step": sum(phases.values()) / step}
    return figures
