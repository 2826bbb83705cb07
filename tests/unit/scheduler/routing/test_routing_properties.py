"""Whatever happens in whatever order: sums are right, nothing unusable is chosen, limits hold."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.weights import version_id
from services.scheduler.routing.fleet import BucketShape, Fleet, Terms
from services.scheduler.routing.params import RoutingParams
from services.scheduler.routing.policies import POLICIES, make_policy
from services.scheduler.routing.policy import Decision, MoveMeasure, TurnMeasure
from services.scheduler.routing.route import Route
from tests.support.routing import ToldPredictor, follow, outcome, report_in, route, terms, turn

BUCKETS = (
    BucketShape("short", 1, 2000, 4000),
    BucketShape("middle", 2, 8000, 9000),
    BucketShape("long", 4, 0, 40_000),
)
PARAMS = RoutingParams(moves_max=2, context_tokens_max=20_000)
NUMBERS = st.integers(0, 30)
EVENTS = st.tuples(
    st.sampled_from(
        [
            *("begin", "begin", "place", "place", "returned", "returned", "returned", "end"),
            *("drain", "report", "gone", "refuse", "measure", "moved", "new_version"),
        ]
    ),
    NUMBERS,
    st.integers(1, 3000),
)


class Run:
    """A policy and its fleet under a script of events."""

    def __init__(self, name: str) -> None:
        self.predictor = ToldPredictor()
        self.policy = make_policy(name, PARAMS, self.predictor)
        self.limited = name == "libra"
        self.fleet = Fleet(BUCKETS, 1000)
        self.step = 0
        for bucket in BUCKETS:
            for number in range(2):
                report_in(self.fleet, bucket, number, slots=3)
        self.alive: dict[str, Route] = {}
        self.begun = 0
        self.decisions: list[Decision | None] = []

    def play(self, events: list[tuple[str, int, int]]) -> list[Decision | None]:
        for what, which, size in events:
            getattr(self, what)(which, size)
            self.check_sums()
        return self.decisions

    def terms(self) -> Terms:
        return _terms(self.step)

    def pick(self, which: int, *, placed: bool) -> Route | None:
        fitting = [it for it in self.alive.values() if bool(it.worker) == placed]
        return fitting[which % len(fitting)] if fitting else None

    def begin(self, which: int, size: int) -> None:
        it = route(f"t{self.begun}", f"g{self.begun // 3}")
        self.begun += 1
        self.predictor.residuals[it.trajectory_id] = size
        self.alive[it.trajectory_id] = it
        self.policy.begin(it)
        self.place(self.begun, size)

    def place(self, which: int, size: int) -> None:
        it = self.pick(which, placed=False)
        if it is not None:
            self.obey(it, self.policy.place(it, self.fleet, self.terms()))

    def returned(self, which: int, size: int) -> None:
        it = self.pick(which, placed=True)
        if it is None:
            return
        self.predictor.residuals[it.trajectory_id] = size
        it.prompt_tokens = it.prompt_tokens or 100
        turn(it, size // 10 + 1, outcome(tokens=size % 500), self.fleet)
        decision = self.policy.returned(it, self.fleet, self.terms())
        if decision is None:
            self.fleet.take(it)
        else:
            self.obey(it, decision)

    def obey(self, it: Route, decision: Decision | None) -> None:
        self.decisions.append(decision)
        if decision is None:
            return
        worker = self.fleet.workers[decision.peer]
        if decision.peer == it.worker:
            assert not worker.draining
        else:
            assert worker.takes(self.terms())
        follow(it, decision, self.fleet)
        if self.limited:
            assert it.moves <= PARAMS.moves_max

    def end(self, which: int, size: int) -> None:
        it = self.pick(which, placed=True)
        if it is not None:
            self.fleet.take(it)
            del self.alive[it.trajectory_id]
            self.policy.end(it, finished=size % 3 > 0)

    def _worker(self, which: int) -> tuple[BucketShape, int]:
        return BUCKETS[which % 3], which // 3 % 2

    def drain(self, which: int, size: int) -> None:
        bucket, number = self._worker(which)
        report_in(self.fleet, bucket, number, slots=0)

    def report(self, which: int, size: int) -> None:
        bucket, number = self._worker(which)
        report_in(self.fleet, bucket, number, slots=3)
        worker = self.fleet.workers[f"{bucket.name}-{number}"]
        worker.version = version_id(0, self.step)

    def new_version(self, which: int, size: int) -> None:
        self.step += which % 4 == 0

    def gone(self, which: int, size: int) -> None:
        bucket, number = self._worker(which)
        for it in self.fleet.remove(f"{bucket.name}-{number}"):
            assert not it.worker

    def refuse(self, which: int, size: int) -> None:
        bucket, number = self._worker(which)
        self.fleet.refuse(f"{bucket.name}-{number}")

    def measure(self, which: int, size: int) -> None:
        bucket, number = self._worker(which)
        peer = f"{bucket.name}-{number}"
        self.policy.turn_measured(
            TurnMeasure(peer, bucket.name, size, size, 0.1, size / 50, which, size)
        )

    def moved(self, which: int, size: int) -> None:
        source, target = self._worker(which)[0], self._worker(which + 1)[0]
        path = "kv" if size % 2 else "recompute"
        self.policy.move_measured(MoveMeasure(source.name, target.name, path, size, size / 1000))

    def check_sums(self) -> None:
        held = {it.trajectory_id for it in self.alive.values() if it.worker}
        assert held == {one for w in self.fleet.workers.values() for one in w.routes}
        for worker in self.fleet.workers.values():
            routes = list(worker.routes.values())
            assert worker.context_tokens == sum(it.context_tokens for it in routes)
            assert worker.kv_expected == sum(it.kv_expected for it in routes)
            assert all(it.worker == worker.peer for it in routes)
            assert worker.groups.total() == len(routes)
            assert all(it.kv_expected >= it.context_tokens for it in routes)


def _terms(step: int) -> Terms:
    return replace(terms(), oldest_step=step)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(events=st.lists(EVENTS, max_size=80))
@settings(max_examples=40)
def test_no_order_of_events_breaks_sums_or_limits(
    name: str, events: list[tuple[str, int, int]]
) -> None:
    first = Run(name).play(events)
    assert Run(name).play(events) == first


@given(events=st.lists(EVENTS, max_size=80))
@settings(max_examples=40)
def test_libra_places_everything_once_there_is_room(events: list[tuple[str, int, int]]) -> None:
    run = Run("libra")
    run.play(events)
    for it in list(run.alive.values()):
        if it.worker:
            run.fleet.take(it)
    for bucket in BUCKETS:
        for number in range(2):
            report_in(run.fleet, bucket, number, slots=3)
            run.fleet.workers[f"{bucket.name}-{number}"].version = version_id(0, run.step)
    waiting = [it for it in run.alive.values() if not it.worker]
    for it in waiting:
        decision = run.policy.place(it, run.fleet, run.terms())
        assert decision is not None
        follow(it, decision, run.fleet)
        run.fleet.take(it)
