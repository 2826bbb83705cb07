"""One run in virtual time: the scheduler's book, simulated workers, tools and a trainer.

The decisions are those of production, made by the same code; the world only lets time pass between
the messages. Equal arguments give equal runs.
"""

import gc
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from common.errors import RunFailed
from common.weights import version_id
from services.scheduler.ledger import MemoryLedger
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.records import Row
from services.scheduler.routing.fleet import BucketShape
from services.scheduler.routing.policies import RoutingParams, make_policy
from services.scheduler.routing.policy import Policy
from services.scheduler.rules import Rules
from services.scheduler.tasks import TaskOrder
from services.simulator.cluster import Cluster
from services.simulator.desk import Desk
from services.simulator.engine import EngineModel
from services.simulator.measures import Measures, RunResult, percentile
from services.simulator.network import Network
from services.simulator.office import Office
from services.simulator.oracle import OraclePredictor
from services.simulator.scripts import Scripts, Workload
from services.simulator.timeline import Timeline
from services.simulator.trainer import SimTrainer
from services.simulator.worker import REPORT_S, SimWorker, Surroundings

ORACLE = "oracle"
"""Libra's policy with a predictor that knows the scripts."""
TOKENS_EXPECTED = 4096
"""Of a trajectory's context at its end, before any has ended."""
GONE_AFTER_S = 3.0
"""The coordinator's lease: so long nobody notices that a worker is dead."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a worker in the middle of a run."""

    at_s: float
    worker: str
    kind: Literal["kill", "drain"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that decides a run, but its workload."""

    cluster: Cluster
    policy: str
    seed: int
    steps: int
    groups_per_step: int
    max_staleness_steps: int = 1
    faults: tuple[Fault, ...] = ()


class World:
    """See the module. Attributes are for reading."""

    def __init__(
        self, scenario: Scenario, workload: Workload, ledger: MemoryLedger | None = None
    ) -> None:
        """Set everything up.

        Args:
            scenario: all that decides the run, but its workload.
            workload: where trajectories come from.
            ledger: keeps all rows, tokens included, at a fifth of the speed and the memory that
                they take. Without one they are checked and let go.
        """
        self.scenario = scenario
        self._ledger = ledger
        self.timeline = Timeline()
        self.network = Network()
        self.rules = rules = _rules(scenario, workload)
        self.order = order = TaskOrder(_task_ids(rules), seed=scenario.seed, epochs=1)
        self.scripts = Scripts(
            workload,
            order,
            groups_per_step=scenario.groups_per_step,
            context_tokens_max=scenario.cluster.context_tokens_max,
        )
        plans = scenario.cluster.workers()
        self.measures = Measures(
            self.timeline,
            self.scripts,
            scenario.cluster.bounds,
            {plan.peer: plan.bucket_index for plan in plans},
            scenario.max_staleness_steps,
        )
        self.desk = Desk(rules, order, self.make_policy(), self._keep)
        self.office = Office(self.timeline, self.network, self.desk, self.scripts, self.measures)
        model = scenario.cluster.model
        around = Surroundings(self.timeline, self.network, model, self.office, self.office.workers)
        for plan in plans:
            engine = EngineModel(plan.speed, kv_tokens=plan.kv_tokens, slots=plan.slots)
            self.office.workers[plan.peer] = SimWorker(plan, engine, around)
        self.trainer = SimTrainer(
            self.timeline, self.network, self.office, self.scripts, scenario.cluster.train_times
        )

    def _keep(self, rows: list[Row]) -> None:
        if self._ledger is not None:
            self._ledger.apply(rows)
        self.measures.rows(rows)

    def make_policy(self) -> Policy:
        """The scenario's policy, without experience."""
        scenario = self.scenario
        context = scenario.cluster.context_tokens_max
        params = RoutingParams(context_tokens_max=context, output_tokens_max=context)
        if scenario.policy == ORACLE:
            return make_policy("libra", params, OraclePredictor(self.scripts))
        return make_policy(scenario.policy, params, ResidualPredictor())

    @property
    def workers(self) -> list[SimWorker]:
        """In the order of the cluster."""
        return list(self.office.workers.values())

    def run(self, on_step: Callable[[int], None] | None = None) -> RunResult:
        """Play to the last step.

        Raises:
            RunFailed: the run hangs, which is a fault of the scheduler or of the world.
        """
        self.trainer.on_step = on_step
        started = time.process_time()
        self._start()
        with _no_collector():
            self.timeline.run()
        if not self.trainer.ended:
            raise RunFailed(f"step {self.trainer.step + 1} can never be complete in this world")
        return self._result(time.process_time() - started)

    def _start(self) -> None:
        for number, worker in enumerate(self.workers):
            worker.apply_version(version_id(0, 0), 0.0)
            self.timeline.at(REPORT_S * number / len(self.workers), worker.report_regularly)
        by_name = {worker.plan.name: worker for worker in self.workers}
        for fault in self.scenario.faults:
            worker = by_name[fault.worker]
            if fault.kind == "drain":
                self.timeline.at(fault.at_s, worker.drain)
            else:
                self.timeline.at(fault.at_s, worker.kill)
                self.timeline.at(fault.at_s + GONE_AFTER_S, self.office.worker_gone, worker)
        self.timeline.at(0.0, self.office.tick)
        self.trainer.ask()

    def _result(self, real_s: float) -> RunResult:
        measures, makespan = self.measures, self.timeline.now
        engines = [worker.engine for worker in self.workers]
        steps = self.trainer.step_ended_at
        durations = [b - a for a, b in zip([0.0, *steps], steps, strict=False)]
        staleness = measures.staleness
        return RunResult(
            policy=self.scenario.policy,
            seed=self.scenario.seed,
            makespan_s=makespan,
            tokens_per_s=sum(engine.decode_tokens for engine in engines) / makespan,
            trained_tokens_per_s=measures.trained_tokens / makespan,
            trajectory_p50_s=percentile(measures.trajectory_s, 0.5),
            trajectory_p99_s=percentile(measures.trajectory_s, 0.99),
            waiting_p50_s=percentile(measures.waiting_s, 0.5),
            waiting_p99_s=percentile(measures.waiting_s, 0.99),
            moved_share=measures.moved_tokens / max(1, measures.context_tokens),
            moved_share_of_generated=measures.moved_tokens / max(1, measures.output_tokens),
            moves=measures.moves,
            moves_kv=measures.paths["kv"],
            routing_accuracy=measures.returns_expected / max(1, measures.returns),
            placement_accuracy=measures.returns_placed / max(1, measures.returns),
            idle=self._idle(makespan),
            preemptions=sum(engine.preemptions for engine in engines),
            prefill_tokens=sum(engine.prefill_tokens for engine in engines),
            step_p50_s=percentile(durations, 0.5),
            step_max_s=max(durations, default=0.0),
            trainer_idle=1.0 - self.trainer.busy_s / makespan,
            staleness_mean=sum(k * n for k, n in staleness.items()) / max(1, staleness.total()),
            staleness_max=max(staleness, default=0),
            steps=self.trainer.step,
            trajectories=len(measures.trajectory_s),
            cut=self.scripts.cut,
            turns=measures.turns,
            iterations=sum(engine.iterations for engine in engines),
            events=self.timeline.events,
            real_s=real_s,
            trace=measures.trace,
        )

    def _idle(self, makespan: float) -> dict[str, float]:
        shares: dict[str, list[float]] = {}
        for worker in self.workers:
            shares.setdefault(worker.plan.bucket, []).append(1.0 - worker.engine.busy_s / makespan)
        return {bucket: max(0.0, sum(each) / len(each)) for bucket, each in shares.items()}


@contextmanager
def _no_collector() -> Generator[None]:
    """A run leaves no cycles; looking for them among all that lives takes 5 % of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _task_ids(rules: Rules) -> list[str]:
    """As many tasks as the steps take: every policy trains the same ones."""
    return [str(number) for number in range(rules.max_steps * rules.groups_per_step)]


def _rules(scenario: Scenario, workload: Workload) -> Rules:
    return Rules(
        seed=scenario.seed,
        max_steps=scenario.steps,
        failed_groups_max=8,
        groups_per_step=scenario.groups_per_step,
        group_size=workload.group_size,
        group_usable_min=1,
        filters_zero_variance=False,
        max_staleness_steps=scenario.max_staleness_steps,
        placements_max=5,
        attempts_max=3,
        lease_s=5.0,
        turn_timeout_s=1e9,
        tokens_expected=TOKENS_EXPECTED,
        buckets=tuple(
            BucketShape(
                bucket.name,
                bucket.tensor_parallel,
                bucket.context_tokens_max,
                scenario.cluster.kv_tokens(bucket),
            )
            for bucket in scenario.cluster.buckets
        ),
    )
