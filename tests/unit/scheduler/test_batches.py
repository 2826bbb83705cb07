"""Which groups a step takes, so that slow ones are in time without being thrown away."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.batches import Candidate, choose_batch


def ready(name: str, last_step: float, admission: int = 0) -> Candidate:
    return Candidate(name, last_step, admission, ready=True)


def running(name: str, last_step: float, *, blocked: bool = False) -> Candidate:
    return Candidate(name, last_step, 0, ready=False, blocked=blocked)


def test_the_groups_that_must_go_first_go_first() -> None:
    groups = [ready("late", 9), ready("soon", 2), ready("b", 5, admission=2), ready("a", 5)]
    assert choose_batch(groups, step=1, size=3).chosen == ("soon", "a", "b")


def test_too_few_ready_groups_are_no_batch() -> None:
    assert choose_batch([ready("a", 5), running("b", 5)], step=1, size=2).chosen == ()


def test_a_running_group_is_waited_for_when_this_is_its_last_step() -> None:
    groups = [ready("a", 2), ready("b", 3), ready("c", 3), running("slow", 2)]
    choice = choose_batch(groups, step=2, size=2)
    assert (choice.chosen, choice.waits_for) == ((), ("slow",))


def test_a_running_group_with_time_left_is_overtaken() -> None:
    groups = [ready("a", 3), ready("b", 3), running("slow", 2)]
    assert choose_batch(groups, step=1, size=2).chosen == ("a", "b")


def test_slow_groups_are_not_overtaken_until_they_no_longer_fit_together() -> None:
    slow = [running(f"slow{n}", 3) for n in range(3)]
    fresh = [ready("a", 4), ready("b", 4)]
    assert choose_batch([*slow[:2], *fresh], step=2, size=2).chosen == ("a", "b")
    assert choose_batch([*slow, *fresh], step=2, size=2).waits_for == ("slow0", "slow1", "slow2")


def test_nobody_waits_for_a_group_that_cannot_begin_yet() -> None:
    groups = [ready("a", 9), ready("b", 9), running("blocked", 2, blocked=True)]
    assert choose_batch(groups, step=2, size=2).chosen == ("a", "b")


def test_a_group_that_has_not_begun_has_all_the_time() -> None:
    groups = [ready("a", 2), ready("b", 2), *(running(f"new{n}", inf) for n in range(9))]
    assert choose_batch(groups, step=2, size=2).chosen == ("a", "b")


candidates = st.lists(
    st.builds(
        Candidate,
        group_id=st.uuids().map(str),
        last_step=st.integers(3, 8) | st.just(inf),
        admission=st.integers(0, 50),
        ready=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.group_id,
)


@given(candidates, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_batch_is_of_ready_groups_and_leaves_no_avoidable_lateness(groups, size, shuffle) -> None:
    choice = choose_batch(groups, step=3, size=size)
    by_id = {group.group_id: group for group in groups}
    assert all(by_id[group_id].ready for group_id in choice.chosen)
    assert len(set(choice.chosen)) in (0, size)
    if choice.chosen:
        newest = max(by_id[group_id].last_step for group_id in choice.chosen)
        left = [g for g in groups if g.group_id not in choice.chosen]
        passed_over = [g for g in left if not g.ready and g.last_step < newest]
        late = [t for t in range(3, 9) if sum(g.last_step <= t for g in left) > (t - 3) * size]
        assert not (passed_over and late)
    shuffle.shuffle(groups)
    assert choose_batch(groups, step=3, size=size) == choice
