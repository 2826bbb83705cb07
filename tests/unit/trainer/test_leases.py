from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.leases import Add, Decision, Done, Lease, Leases, Own, Wait

costs = st.lists(st.floats(1, 50), min_size=1, max_size=30)


def warmed(rate: float = 1.0) -> Leases:
    """Leases of a core that has measured itself: nothing is leased before that."""
    leases = Leases()
    leases.begin([rate])
    leases.ran([0], 1.0)
    leases.end()
    return leases


def opened(sizes: list[float]) -> Leases:
    leases = warmed()
    leases.begin(sizes)
    return leases


def granted(leases: Leases, slot: str = "a", now: float = 0.0) -> Lease:
    lease = leases.grant(slot, now)
    assert lease is not None
    return lease


class Story:
    """A step with replicas that do what they like; counts what is in the sum."""

    def __init__(self, sizes: list[float], ranks: int) -> None:
        self.leases = opened(sizes)
        self.sizes, self.ranks = sizes, ranks
        self.now = 0.0
        self.packs: dict[int, Lease] = {}
        self.counted: Counter[int] = Counter()
        self.own_s = self.waited_s = 0.0
        self.replica_numbers: list[int] = []

    def core(self, decision: Decision) -> None:
        match decision:
            case Own(packs):
                assert 1 <= len(packs) <= self.ranks
                seconds = sum(self.sizes[pack] for pack in packs)
                self.counted.update(packs)
                self.own_s += seconds
                self.now += seconds
                self.leases.ran(packs, seconds)
            case Add(number):
                self.counted.update(self.packs[number].packs)
            case Wait() | Done():
                pass

    def replica(self, slot: str, deed: str, which: int, after_s: float) -> None:
        self.now += after_s
        self.waited_s += after_s
        numbers = list(self.packs)
        number = numbers[which % len(numbers)] if numbers else 99
        match deed:
            case "ask":
                if (lease := self.leases.grant(slot, self.now)) is not None:
                    assert lease.number not in self.packs
                    self.packs[lease.number] = lease
            case "begin":
                if (lease := self.leases.find(number, slot)) is not None:
                    lease.returning = True
            case "return":
                self.leases.arrive(number, self.now)
            case "fail":
                self.leases.give_back(number)
            case "lie":
                self.leases.refuse(number)
            case _:
                self.leases.gone(slot)


deeds = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from(["ask", "begin", "return", "fail", "lie", "die"]),
    st.integers(0, 40),
    st.floats(0, 3),
)


@given(costs, st.integers(1, 3), st.lists(st.lists(deeds, max_size=4), max_size=60))
def test_every_micro_batch_counts_once_whatever_replicas_do(
    sizes: list[float], ranks: int, rounds: list[list[tuple[str, str, int, float]]]
) -> None:
    story = Story(sizes, ranks)
    for happening in rounds:
        for slot, deed, which, after_s in happening:
            story.replica(slot, deed, which, after_s)
        story.core(story.leases.next(story.now, ranks))
    while not isinstance(decision := story.leases.next(story.now, ranks), Done):
        if isinstance(decision, Wait):
            assert decision.until_s > story.now
            story.now = decision.until_s
        story.core(decision)
    assert story.counted == Counter(range(len(sizes)))


@given(costs, st.integers(1, 4))
def test_the_core_waits_once_and_no_longer_than_it_would_need_itself(
    sizes: list[float], holders: int
) -> None:
    """Replicas that take what they can and never answer."""
    leases = opened(sizes)
    now = waited = 0.0
    held = 0.0
    while not isinstance(decision := leases.next(now, 1), Done):
        for number in range(holders):
            if (lease := leases.grant(str(number), now)) is not None:
                held += lease.cost
                leases._held[lease.number].returning = True
        match decision:
            case Own(packs):
                now += sizes[packs[0]]
                leases.ran(packs, sizes[packs[0]])
            case Wait(until_s):
                waited += until_s - now
                now = until_s
            case _:
                pytest.fail("nothing was returned")
    assert waited <= held + 1e-6
    assert now <= 2 * sum(sizes) + 1e-6


def test_the_core_works_from_the_front_and_replicas_from_the_back() -> None:
    leases = opened([1.0] * 10)
    assert leases.next(0, 2) == Own((0, 1))
    assert granted(leases).packs[0] == 9
    assert leases.next(0, 2) == Own((2, 3))


def test_nothing_is_leased_before_the_core_has_measured_itself() -> None:
    leases = Leases()
    leases.begin([1.0] * 10)
    assert leases.grant("a", 0) is None
    assert leases.next(0, 1) == Own((0,))
    leases.ran([0], 2.0)
    assert leases.grant("a", 0) is not None


def test_the_last_micro_batch_is_not_leased_to_a_slower_replica() -> None:
    leases = opened([1.0])
    assert leases.grant("a", 0) is None


def test_a_lost_answer_does_not_lose_micro_batches() -> None:
    """The replica asks again: what it was given and never heard of is given anew."""
    leases = opened([1.0] * 10)
    first = granted(leases)
    second = granted(leases)
    assert second.packs[0] == first.packs[0]
    assert not leases.arrive(first.number, 1.0)


def test_a_replica_that_returns_one_sum_may_compute_the_next() -> None:
    leases = opened([1.0] * 10)
    first = granted(leases)
    second = leases.grant("a", 0, keep=first.number)
    assert second is not None
    assert not set(first.packs) & set(second.packs)
    assert leases.arrive(first.number, 1.0)
    assert leases.next(1.0, 1) == Add(first.number)
    assert leases.counts(first.number)


def test_a_liar_gets_nothing_more_in_this_step() -> None:
    leases = opened([1.0] * 10)
    leases.refuse(granted(leases).number)
    assert leases.grant("a", 0) is None
    assert leases.grant("b", 0) is not None
    leases.end()
    leases.begin([1.0] * 10)
    assert leases.grant("a", 0) is not None


def test_after_the_deadline_the_core_does_all_and_leases_nothing() -> None:
    leases = opened([1.0, 1.0, 1.0, 1.0])
    late = granted(leases)
    while isinstance(due := leases.next(0, 1), Own):
        leases.ran(due.packs, 1.0)
    assert due == Wait(late.cost)
    assert leases.next(late.cost, 1) == Own(late.packs)
    assert leases.grant("b", 9) is None
    assert not leases.arrive(late.number, 9)
    assert leases.tally.again == len(late.packs)
    assert leases.next(9, 1) == Done()


def test_a_fast_replica_is_given_more_than_a_slow_one() -> None:
    leases = opened([1.0] * 64)
    for slot, seconds in (("fast", 0.05), ("slow", 50.0)):
        leases.arrive(granted(leases, slot).number, seconds)
    leases.end()
    leases.begin([1.0] * 64)
    fast, slow = granted(leases, "fast"), granted(leases, "slow")
    assert fast.cost > 4 * slow.cost


def test_who_always_fails_is_tried_seldom_but_not_never() -> None:
    leases = warmed()
    tried: list[int] = []
    for step in range(40):
        leases.begin([1.0] * 8)
        if leases.grant("a", 0) is not None:
            tried.append(step)
        leases.gone("a")
        leases.end()
    assert 3 <= sum(step >= 10 for step in tried) <= 6


def test_a_lease_of_an_ended_step_is_void() -> None:
    leases = opened([1.0] * 4)
    lease = granted(leases)
    leases.end()
    assert not leases.arrive(lease.number, 1.0)
    assert leases.grant("a", 0) is None
