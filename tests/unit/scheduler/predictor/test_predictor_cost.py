"""What learning costs while many trajectories live: counted in rows, not in seconds."""

import pytest

from common.trajectory import ToolStatus
from services.scheduler.predictor.residual import ResidualPredictor
from services.scheduler.predictor.rows import Rows
from services.scheduler.routing.outcomes import Payload, ToolOutcome
from services.scheduler.routing.route import Route

FIXED_ROWS = 700
"""Solving costs as much as guessing about so many rows, however few there are."""
ROWS_PER_POINT_MAX = 4.0
"""Guessing and solving take some 2.5 µs a row: 10 µs."""


class Counting(ResidualPredictor):
    """Counts what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.settled = 0
        self.guessed_most = self.work = 0

    def settle(self) -> None:
        self.settled += 1
        self.work += FIXED_ROWS
        super().settle()

    def _guess(self) -> Rows | None:
        guessed = super()._guess()
        if guessed is not None:
            self.work += len(guessed)
            self.guessed_most = max(self.guessed_most, len(guessed))
        return guessed


def fleet(predictor: ResidualPredictor, count: int) -> list[Route]:
    routes = [Route(f"t{n}", f"g{n // 8}", f"k{n // 8}", prompt_tokens=50) for n in range(count)]
    for route in routes:
        predictor.begin(route)
    return routes


def go_on(predictor: ResidualPredictor, routes: list[Route]) -> None:
    for number, route in enumerate(routes):
        outcome = ToolOutcome("search", ToolStatus.OK, Payload.SMALL, number % 90, 0.1)
        route.returned(outcome, action_tokens=40 + number % 60, observation_tokens=number % 90)
        predictor.returned(route)


@pytest.mark.slow
def test_a_return_costs_the_same_however_many_live_while_nothing_has_finished() -> None:
    predictor = Counting()
    routes = fleet(predictor, 16_000)
    for _ in range(2):
        go_on(predictor, routes)
    assert predictor.work <= ROWS_PER_POINT_MAX * 3 * len(routes)
    assert predictor.guessed_most <= 600


@pytest.mark.slow
def test_a_return_costs_the_same_however_many_live_beside_few_that_finished() -> None:
    predictor = Counting()
    routes = fleet(predictor, 16_000)
    go_on(predictor, routes)
    for route in routes[:200]:
        route.action_tokens += 30
        predictor.end(route, finished=True)
    before = predictor.work
    for _ in range(2):
        go_on(predictor, routes[200:])
    assert predictor.work - before <= ROWS_PER_POINT_MAX * 2 * len(routes)


def test_those_that_ended_are_not_counted_among_the_unfinished() -> None:
    predictor = ResidualPredictor()
    routes = fleet(predictor, 40)
    go_on(predictor, routes)
    for number, route in enumerate(routes):
        route.action_tokens += 10
        predictor.end(route, finished=number % 2 == 0)
    guessed = predictor._guess()
    assert guessed is None
    assert predictor._unfinished_rows == 0
    assert predictor._unfinished == []


def test_a_finished_trajectory_teaches_the_same_when_it_is_learned_again() -> None:
    first, again = ResidualPredictor(), ResidualPredictor()
    routes = fleet(first, 64)
    ended: list[Route] = []
    while routes:
        go_on(first, routes)
        ended += [route for route in routes if (route.turns * 7 + int(route.trajectory_id[1:])) % 3]
        for route in routes:
            if route in ended:
                route.action_tokens += 25
                first.end(route, finished=True)
        routes = [route for route in routes if route not in ended]
    for route in ended:
        again.end(route, finished=True)
    first.settle()
    again.settle()
    for route in ended:
        assert again.predict(route) == pytest.approx(first.predict(route), rel=1e-6)
