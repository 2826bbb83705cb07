"""Scripts: what each trajectory will do, whatever the policy."""

from hypothesis import given
from hypothesis import strategies as st

from common.trajectory import ToolStatus
from services.scheduler.routing.route import Route
from services.scheduler.tasks import TaskOrder
from services.simulator.oracle import OraclePredictor
from services.simulator.scripts import Script, Scripts, cut
from services.simulator.timeline import Timeline
from services.simulator.traces import TraceTrajectory, TraceTurn
from tests.support.sim_world import Rolls

CONTEXT_MAX = 4_096


def turn(output: int, observation: int) -> TraceTurn:
    return TraceTurn(output, "search", ToolStatus.OK, observation, 0.1)


def trace(prompt: int, *turns: TraceTurn) -> TraceTrajectory:
    return TraceTrajectory("t", "g", prompt, turns)


sizes = st.integers(1, 3_000)


@given(sizes, st.lists(st.tuples(sizes, sizes), min_size=1, max_size=8))
def test_a_cut_trajectory_fits_and_is_the_beginning_of_the_whole(
    prompt: int, turns: list[tuple[int, int]]
) -> None:
    whole = trace(prompt, *(turn(*each) for each in turns))
    fitted = cut(whole, CONTEXT_MAX)
    script = Script.of("t", "g", fitted)
    assert script.final_context_tokens <= CONTEXT_MAX
    assert all(each.output_tokens >= 1 for each in fitted.turns)
    assert fitted.turns[:-1] == whole.turns[: len(fitted.turns) - 1]
    if whole.context_tokens <= CONTEXT_MAX:
        assert fitted is whole


def test_a_script_knows_what_is_left_at_every_turn() -> None:
    script = Script.of("t", "g", trace(10, turn(5, 3), turn(7, 2), TraceTurn(4, "", None, 0, None)))
    assert script.output_left == (16, 11, 4, 0)
    assert script.context_at == (10, 18, 27, 31)
    assert script.final_context_tokens == 31


def test_the_place_in_the_order_decides_what_a_group_does() -> None:
    order = TaskOrder([str(n) for n in range(20)], seed=7, epochs=1)
    scripts = Scripts(Rolls(), order, groups_per_step=4, context_tokens_max=CONTEXT_MAX)
    for place in (0, 13):
        group = scripts.group(f"{order.at(place)[1]}.e0.a0")
        assert [s.trace for s in group] == [cut(t, CONTEXT_MAX) for t in Rolls().group(place, 0)]


def test_the_oracle_tells_what_the_script_says() -> None:
    order = TaskOrder(["0"], seed=0, epochs=1)
    scripts = Scripts(Rolls(), order, groups_per_step=4, context_tokens_max=CONTEXT_MAX)
    script = scripts.of("0.e0.a0.1")
    oracle = OraclePredictor(scripts)
    route = Route(script.trajectory_id, script.group_id, "0")
    assert oracle.predict(route).p50 == script.output_left[0]
    assert oracle.predict(route, tokens_since_return=5).mean == script.output_left[0] - 5


def test_what_is_set_for_one_moment_happens_in_the_order_of_setting() -> None:
    timeline, seen = Timeline(), list[int]()
    for number in range(5):
        timeline.at(1.0, seen.append, number)
    timeline.at(0.5, seen.append, 9)
    timeline.run()
    assert seen == [9, 0, 1, 2, 3, 4]
    assert timeline.events == 6
