"""`libra bench scheduler`: routing decisions per second and core, over whole trajectories.

A decision is a placement or a tool return. What is timed around them is all that routing does in a
trajectory's life: begin, place, count on the fleet, returns with their predictions, moves, measured
turns and moves, workers' reports, the end, what is learned from it, its record in the log, and
the durable copies of all that was learned, as in a run. Trajectories are made beforehand. The
figures are CPU time of this process with its writing thread, because the wall clock belongs to
whoever else uses the machine.

Each fleet lives through 100,000 trajectories; the speed is measured after 1,000, 10,000 and all of
them. For comparison: the public implementation of arXiv 2606.03077, measured, makes 6,000 to 7,600
decisions per second without persistence and 1 to 13 with it.
"""

import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.messages.scheduler import ReportWorker
from common.trajectory import ToolStatus
from common.weights import version_id
from services.cli.bench import BenchReport, Check, at_least, at_most
from services.scheduler.learning import Memory, Remembering
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.routing.fleet import BucketShape, Fleet, Terms
from services.scheduler.routing.outcomes import PayloadSizes, ToolOutcome
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policies import make_policy
from services.scheduler.routing.policy import Decision, MoveMeasure, TurnMeasure
from services.scheduler.routing.route import Route

HISTORY = (1_000, 10_000, 100_000)
"""Trajectories that were finished before the speed is measured."""
FLEETS = (8, 64)
"""Workers."""
LIVE_PER_WORKER = 24
GROUP_SIZE = 16
MEASURED = 40_000
"""Decisions of one measurement; some 0.6 s."""
REPORT_EVERY = 64
"""Decisions between two reports of workers, in turn."""
SCRIPTS = 4_000
"""Different trajectories; each begins as often as needed, under new ids."""
DECISIONS_MIN = 50_000
"""Per second and core, with persistence."""
FLATNESS_MIN = 0.8
"""Slowest by fastest over the history."""
GROWTH_MAX = 1.25
"""Memory after the longest history by that after a tenth of it."""
PAGE_BYTES = 4096
SIZES = PayloadSizes()
TOOLS = ("search", "python", "shell")
STATUSES = (ToolStatus.OK, ToolStatus.OK, ToolStatus.OK, ToolStatus.ERROR, ToolStatus.EMPTY)


@dataclass(frozen=True, slots=True)
class Script:
    """What one trajectory does."""

    prompt_tokens: int
    turns: tuple[tuple[int, ToolOutcome], ...]
    """Tokens sampled, and what came back."""
    last_tokens: int


@dataclass(slots=True, eq=False)
class Life:
    """A trajectory that runs."""

    route: Route
    script: Script


def bench_scheduler(*, history: tuple[int, ...] = HISTORY) -> BenchReport:
    """Measure both fleets, each in its own policy and log."""
    figures: dict[str, dict[str, float]] = {}
    checks: list[Check] = []
    for workers in FLEETS:
        with tempfile.TemporaryDirectory(prefix="libra-scheduler-") as directory:
            found = _measure(workers, history, Path(directory))
        figures[f"workers_{workers}"] = found
        speeds = [found[f"decisions_per_s.{count}"] for count in history]
        for count, speed in zip(history, speeds, strict=True):
            name = f"decisions per second, {workers} workers, {count:,} past trajectories"
            checks.append(at_least(name, speed, "1/s", DECISIONS_MIN))
        flat = min(speeds) / max(speeds)
        checks.append(at_least(f"slowest / fastest, {workers} workers", flat, "", FLATNESS_MIN))
        grown = found[f"rss_mb.{history[-1]}"] / found[f"rss_mb.{history[-2]}"]
        name = f"memory after {history[-1]:,} / after {history[-2]:,}, {workers} workers"
        checks.append(at_most(name, grown, "", GROWTH_MAX))
    return BenchReport("scheduler", dict(figures), checks)


def _measure(workers: int, history: tuple[int, ...], directory: Path) -> dict[str, float]:
    with Memory(directory) as memory:
        return _measure_world(World(workers, memory), history)


def _measure_world(world: "World", history: tuple[int, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for count in history:
        while world.finished < count:
            world.run(1_000)
        made, moved, began = world.decisions, world.moved, time.process_time()
        world.run(MEASURED)
        seconds = time.process_time() - began
        made = world.decisions - made
        found[f"decisions_per_s.{count}"] = made / seconds
        found[f"us_per_decision.{count}"] = seconds / made * 1e6
        found[f"moves_per_decision.{count}"] = (world.moved - moved) / made
        found[f"rss_mb.{count}"] = _rss_mb()
    return found


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * PAGE_BYTES / 1e6


class World:
    """A fleet that is kept full: whatever ends, the next one begins."""

    def __init__(self, workers: int, memory: Memory, *, seed: int = 0) -> None:
        self.decisions = 0
        self.moved = 0
        self.finished = 0
        policy = make_policy("libra", RoutingParams(), ResidualPredictor())
        self._policy = Remembering(policy, memory)
        self._fleet = Fleet(_buckets(), 4096)
        self._peers = _peers(workers)
        self._reported = 0
        self._begun = 0
        self._now = 0.0
        self._report_at = 0
        self._scripts = list(_scripts(random.Random(seed)))
        self._lives: deque[Life] = deque()
        self._waiting: deque[Life] = deque()
        for _ in self._peers:
            self._report()
        for _ in range(workers * LIVE_PER_WORKER):
            self._begin()

    def run(self, decisions: int) -> None:
        """Let so many decisions be made."""
        until = self.decisions + decisions
        while self.decisions < until:
            self._turn()
            if self.decisions >= self._report_at:
                self._report_at += REPORT_EVERY
                self._report()

    def _terms(self) -> Terms:
        return Terms(self._now, 0.0, 0, 0)

    def _report(self) -> None:
        peer, bucket = self._peers[self._reported % len(self._peers)]
        self._reported += 1
        self._now += 1 / len(self._peers)
        worker = self._fleet.workers.get(peer)
        running = len(worker.routes) if worker else 0
        used = worker.context_tokens if worker else 0
        report = ReportWorker(
            bucket=bucket.name,
            version=version_id(0, 0),
            kv_tokens_used=min(used, bucket.kv_tokens),
            kv_tokens_free=max(0, bucket.kv_tokens - used),
            slots=256,
            holding=[],
            decode_tokens=0,
            running=running,
        )
        self._fleet.report(peer, peer, report, self._now)

    def _begin(self) -> None:
        number = self._begun
        self._begun += 1
        group = number // GROUP_SIZE
        route = Route(f"t{number}", f"g{group}", f"k{group}", waiting_since=self._now)
        self._policy.begin(route)
        self._place(Life(route, self._scripts[number % SCRIPTS]))

    def _place(self, life: Life) -> None:
        decision = self._policy.place(life.route, self._fleet, self._terms())
        self.decisions += 1
        if decision is None:
            self._waiting.append(life)
            return
        _expect(life.route, decision)
        self._fleet.put(life.route, decision.peer)
        self._lives.append(life)

    def _turn(self) -> None:
        life = self._lives.popleft()
        route, script = life.route, life.script
        turn = route.turns
        if not turn:
            route.prompt_tokens = script.prompt_tokens
        if turn == len(script.turns):
            self._end(life)
            return
        action, outcome = script.turns[turn]
        self._policy.turn_measured(self._turn_measure(route, action))
        route.returned(outcome, action_tokens=action, observation_tokens=outcome.payload_tokens)
        self._fleet.recount(route)
        decision = self._policy.returned(route, self._fleet, self._terms())
        self.decisions += 1
        assert decision is not None
        _expect(route, decision)
        if decision.peer == route.worker:
            self._fleet.recount(route)
        else:
            self._move(route, decision)
        self._lives.append(life)

    def _turn_measure(self, route: Route, action: int) -> TurnMeasure:
        worker = self._fleet.workers[route.worker]
        running = max(1, len(worker.routes))
        step_s = 0.02 + 0.0002 * running + 1e-7 * worker.context_tokens
        return TurnMeasure(
            peer=worker.peer,
            bucket=worker.bucket,
            prefill_tokens=100,
            action_tokens=action,
            queue_s=0.05,
            decode_s=action * step_s,
            running=running,
            kv_tokens_used=worker.context_tokens,
        )

    def _move(self, route: Route, decision: Decision) -> None:
        source = self._fleet.workers[route.worker].bucket
        self._fleet.take(route)
        self._fleet.put(route, decision.peer)
        route.moves += 1
        self.moved += 1
        target = self._fleet.workers[decision.peer].bucket
        tokens = route.context_tokens
        self._policy.move_measured(MoveMeasure(source, target, "kv", tokens, 0.05 + tokens * 1e-5))

    def _end(self, life: Life) -> None:
        life.route.action_tokens += life.script.last_tokens
        self._fleet.take(life.route)
        self._policy.end(life.route, finished=True)
        self.finished += 1
        self._begin()
        if self._waiting:
            self._place(self._waiting.popleft())


def _expect(route: Route, decision: Decision) -> None:
    """What the book writes to the route."""
    route.residual = decision.residual
    route.kv_expected = max(decision.kv_expected, route.context_tokens)


def _buckets() -> tuple[BucketShape, ...]:
    return (
        BucketShape("short", 1, 4_000, 250_000),
        BucketShape("medium", 2, 12_000, 660_000),
        BucketShape("long", 4, 0, 1_500_000),
    )


def _peers(workers: int) -> list[tuple[str, BucketShape]]:
    """Half of the workers short ones, a quarter each of the others."""
    short, medium, long = _buckets()
    pattern = (short, medium, short, long)
    return [(f"{pattern[n % 4].name}-{n}", pattern[n % 4]) for n in range(workers)]


def _scripts(rng: random.Random) -> Iterator[Script]:
    """Trajectories of 1 to 12 turns, whose errors make them longer."""
    for _ in range(SCRIPTS):
        turns: list[tuple[int, ToolOutcome]] = []
        for _ in range(rng.randint(1, 6)):
            turns.append(_turn(rng))
            while turns[-1][1].status is ToolStatus.ERROR and len(turns) < 12:
                turns.append(_turn(rng))
        yield Script(int(rng.lognormvariate(5, 0.5)), tuple(turns), rng.randint(20, 400))


def _turn(rng: random.Random) -> tuple[int, ToolOutcome]:
    payload = int(rng.lognormvariate(5, 1.5))
    outcome = ToolOutcome(
        rng.choice(TOOLS), rng.choice(STATUSES), SIZES.class_of(payload), payload, rng.random()
    )
    return int(rng.lognormvariate(5, 0.8)) + 2, outcome
