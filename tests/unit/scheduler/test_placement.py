"""Placement: who may be chosen, who is, and that equal inputs give equal answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.weights import version_id
from services.scheduler.placement import POLICIES, Need, WorkerView, may_take, place

NEED = Need(kv_tokens=100, lineage=0, oldest_step=3)
FREE = WorkerView(
    peer="p0",
    name="w0",
    bucket="short",
    version=version_id(0, 5),
    slots_free=4,
    kv_tokens=1000,
    kv_tokens_used=0,
    kv_tokens_expected=0,
)

views = st.builds(
    WorkerView,
    peer=st.uuids().map(str),
    name=st.sampled_from(["w0", "w1", "w2"]),
    bucket=st.just("short"),
    version=st.sampled_from([-1, version_id(0, 2), version_id(0, 3), version_id(1, 3)]),
    slots_free=st.integers(0, 2),
    kv_tokens=st.integers(0, 1000),
    kv_tokens_used=st.integers(0, 1000),
    kv_tokens_expected=st.integers(0, 1000),
    draining=st.booleans(),
)
needs = st.builds(
    Need, kv_tokens=st.integers(1, 500), lineage=st.integers(0, 1), oldest_step=st.integers(0, 4)
)


@pytest.mark.parametrize(
    "worker",
    [
        replace(FREE, draining=True),
        replace(FREE, slots_free=0),
        replace(FREE, version=-1),
        replace(FREE, version=version_id(0, 2)),
        replace(FREE, version=version_id(1, 5)),
    ],
    ids=["draining", "full", "no version", "too old", "another lineage"],
)
def test_a_worker_that_must_not_be_chosen_is_not(worker: WorkerView) -> None:
    assert place(POLICIES["least_load"], NEED, [worker]) is None
    assert place(POLICIES["least_load"], NEED, [worker, FREE]) == FREE


def test_the_least_loaded_worker_is_chosen_by_what_is_used_and_expected() -> None:
    used = replace(FREE, peer="p1", name="w1", kv_tokens_used=300)
    expecting = replace(FREE, peer="p2", name="w2", kv_tokens_used=100, kv_tokens_expected=300)
    assert place(POLICIES["least_load"], NEED, [expecting, used]) == used


def test_a_larger_cache_counts_by_its_share() -> None:
    small = replace(FREE, kv_tokens_used=100)
    large = replace(FREE, peer="p1", name="w1", kv_tokens=4000, kv_tokens_used=200)
    assert place(POLICIES["least_load"], NEED, [small, large]) == large


def test_ties_go_by_name() -> None:
    other = replace(FREE, peer="p1", name="w1")
    assert place(POLICIES["least_load"], NEED, [other, FREE]) == FREE


@given(needs, st.lists(views, max_size=6), st.randoms(use_true_random=False))
def test_every_policy_chooses_a_fitting_worker_whatever_their_order(need, workers, shuffle) -> None:
    for policy in POLICIES.values():
        chosen = place(policy, need, workers)
        assert (chosen is None) == (not any(may_take(need, worker) for worker in workers))
        assert chosen is None or may_take(need, chosen)
        again = list(workers)
        shuffle.shuffle(again)
        assert place(policy, need, again) == chosen
