"""The staleness bound as a count of groups."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.admission import (
    groups_admissible,
    groups_allowed,
    groups_counted,
    oldest_step_allowed,
)
from tests.support.scheduling import with_rules

rule_sets = st.builds(
    with_rules,
    groups_per_step=st.integers(1, 8),
    max_staleness_steps=st.integers(0, 4),
    max_steps=st.integers(1, 20),
)
steps = st.integers(0, 20)
alive_groups = st.integers(0, 60)


@given(rule_sets, steps, alive_groups, st.integers(0, 60))
def test_what_is_admitted_never_passes_the_bound_nor_the_tasks(rules, step, alive, tasks) -> None:
    admitted = groups_admissible(rules, step=step, alive=alive, tasks_left=tasks)
    assert 0 <= admitted <= tasks
    counted = groups_counted(rules, step=step, alive=alive + admitted)
    bound = (step + rules.max_staleness_steps + 1) * rules.groups_per_step
    assert admitted == 0 or counted <= min(bound, rules.max_steps * rules.groups_per_step)


@given(rule_sets, steps, alive_groups)
def test_nothing_is_held_back_that_the_bound_allows(rules, step, alive) -> None:
    admitted = groups_admissible(rules, step=step, alive=alive, tasks_left=10_000)
    counted = groups_counted(rules, step=step, alive=alive + admitted)
    assert counted >= groups_allowed(rules, step=step)


def test_a_dropped_group_gives_its_place_back_and_a_trained_one_does_not() -> None:
    rules = with_rules(groups_per_step=4, max_staleness_steps=1)
    assert groups_admissible(rules, step=0, alive=8, tasks_left=99) == 0
    assert groups_admissible(rules, step=0, alive=7, tasks_left=99) == 1  # One was dropped.
    assert groups_admissible(rules, step=1, alive=4, tasks_left=99) == 4  # Four were trained.


def test_near_the_end_no_more_is_admitted_than_can_be_trained() -> None:
    rules = with_rules(groups_per_step=4, max_staleness_steps=3, max_steps=10)
    assert groups_admissible(rules, step=9, alive=0, tasks_left=99) == 4
    assert groups_admissible(rules, step=10, alive=0, tasks_left=99) == 0


@given(rule_sets, steps, st.integers(1, 60))
def test_a_group_begun_with_the_oldest_weights_allowed_is_in_time_at_its_rank(
    rules, step, rank
) -> None:
    oldest = oldest_step_allowed(rules, step=step, rank=rank)
    trained_in = step + -(-rank // rules.groups_per_step)
    assert trained_in - 1 - oldest <= rules.max_staleness_steps


@given(rule_sets, steps)
def test_whoever_is_within_the_bound_may_begin_with_the_newest_weights(rules, step) -> None:
    last = (rules.max_staleness_steps + 1) * rules.groups_per_step
    assert oldest_step_allowed(rules, step=step, rank=last) <= step
