from itertools import pairwise

import pytest

from services.scheduler.routing.fleet import BucketShape
from services.scheduler.routing.policies import POLICIES, RoutingParams, make_policy
from services.scheduler.routing.policy import Policy
from services.scheduler.routing.published import Cmlfq
from tests.support.routing import (
    LONG,
    SHORT,
    ToldPredictor,
    fleet_of,
    follow,
    learn,
    outcome,
    placed,
    report_in,
    route,
    terms,
    turn,
)

TP2 = BucketShape("short2", 2, 10_000, 100_000)
FOUR = (
    BucketShape("short", 1, 5000, 50_000),
    BucketShape("medium", 1, 10_000, 50_000),
    BucketShape("long", 2, 15_000, 50_000),
    BucketShape("extra_long", 4, 0, 50_000),
)


def policy_of(name: str, predictor: ToldPredictor | None = None) -> Policy:
    return make_policy(name, RoutingParams(), predictor or ToldPredictor())


def test_all_configurable_policies_exist() -> None:
    assert set(POLICIES) == {
        *("libra", "cmlfq", "la_mlfq", "length_aware", "mlfq", "least_load", "round_robin"),
    }


# ── C-MLFQ ───────────────────────────────────────────────────────────────────────────────────


def test_cmlfq_starts_in_the_shortest_bucket() -> None:
    assert placed(policy_of("cmlfq"), fleet_of(), "t").worker == "short-0"


@pytest.mark.parametrize("task", ["known", "new"])
def test_cmlfq_moves_where_trajectories_with_this_history_were_long(task: str) -> None:
    policy, fleet = policy_of("cmlfq"), fleet_of()
    learn(policy, "known", [(100, outcome("search", 6000))], last=30_000)
    it = placed(policy, fleet, "t", task_id=task)
    turn(it, 100, outcome("search", 6000), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert (decision.peer, decision.reason) == ("long-0", "bucket")
    follow(it, decision, fleet)
    assert it.trajectory_id == "t"
    assert not fleet.workers["short-0"].routes


def test_cmlfq_stays_where_trajectories_with_this_history_were_short() -> None:
    policy, fleet = policy_of("cmlfq"), fleet_of()
    learn(policy, "p", [(100, outcome("search", 10))], last=3000)
    it = placed(policy, fleet, "t", task_id="p")
    turn(it, 100, outcome("search", 10), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert (decision.peer, decision.reason) == ("short-0", "stay")


def test_cmlfq_stays_without_any_history() -> None:
    policy, fleet = policy_of("cmlfq"), fleet_of()
    it = placed(policy, fleet, "t")
    turn(it, 100, outcome(), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert (decision.peer, decision.reason) == ("short-0", "unseen")


def test_cmlfq_learns_each_tool_return_of_a_finished_trajectory() -> None:
    policy = Cmlfq()
    learn(policy, "p", [(120, outcome()), (580, outcome("code"))], last=300)
    root = policy.tree.roots["p"]
    child = next(iter(root.children.values()))
    grandchild = next(iter(child.children.values()))
    assert [list(node.window) for node in (root, child, grandchild)] == [[1000], [880], [300]]


def test_cmlfq_learns_nothing_from_one_that_failed() -> None:
    policy = Cmlfq()
    policy.end(route("t"), finished=False)
    assert policy.tree.insertions == 0


def test_every_finished_trajectory_is_learned_at_once() -> None:
    policy = Cmlfq()
    for number in range(9):
        learn(policy, f"p{number}", [(10, outcome())], last=10)
    assert policy.tree.insertions == 9


def test_a_full_bucket_overflows_into_another_and_says_so() -> None:
    policy = policy_of("cmlfq")
    fleet = fleet_of({"short": 1, "short2": 1}, buckets=(SHORT, TP2), slots=1)
    placed(policy, fleet, "t0")
    decision = policy.place(route("t1"), fleet, terms())
    assert decision is not None
    assert (decision.peer, decision.reason) == ("short2-0", "overflow")


def test_trajectories_spread_over_the_workers_of_a_bucket() -> None:
    policy = policy_of("cmlfq")
    fleet = fleet_of({"short": 2, "long": 1}, slots=1)
    assert [placed(policy, fleet, f"t{n}").worker for n in range(2)] == ["short-0", "short-1"]


def test_a_move_into_a_full_bucket_does_not_happen() -> None:
    policy, fleet = policy_of("cmlfq"), fleet_of(slots=1)
    learn(policy, "p", [(100, outcome("search", 6000))], last=30_000)
    it = placed(policy, fleet, "t", task_id="p")
    fleet.put(route("other"), "long-0")
    turn(it, 100, outcome("search", 6000), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert (decision.peer, decision.reason) == ("short-0", "full")


def test_cmlfq_remembers_over_a_restart() -> None:
    policy, after = policy_of("cmlfq"), policy_of("cmlfq")
    learn(policy, "p", [(100, outcome("search", 6000))], last=30_000)
    after.load(policy.dump())
    fleet = fleet_of()
    it = placed(after, fleet, "t", task_id="q")
    turn(it, 100, outcome("search", 6000), fleet)
    decision = after.returned(it, fleet, terms())
    assert decision is not None
    assert decision.peer == "long-0"


def test_memory_of_another_kind_is_refused() -> None:
    for name in ("cmlfq", "libra", "least_load"):
        with pytest.raises(ValueError, match="memory"):
            policy_of(name).load(b"something else")


# ── the others ───────────────────────────────────────────────────────────────────────────────


def test_la_mlfq_starts_in_the_bucket_of_the_expected_length() -> None:
    policy, fleet = policy_of("la_mlfq"), fleet_of()
    assert placed(policy, fleet, "t0", task_id="p").worker == "short-0"
    learn(policy, "p", [(100, outcome())], last=30_000)
    assert placed(policy, fleet, "t1", task_id="p").worker == "long-0"


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(5000, "short"), (5001, "medium"), (10_001, "long"), (15_001, "extra_long")],
)
def test_length_aware_takes_the_bucket_that_holds_the_expected_length(
    tokens: int, bucket: str
) -> None:
    policy = policy_of("length_aware", ToldPredictor({"t": tokens}))
    fleet = fleet_of(buckets=FOUR)
    it = placed(policy, fleet, "t")
    assert it.worker == f"{bucket}-0"
    turn(it, 20_000, outcome(), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert decision.peer == it.worker


def test_mlfq_goes_down_the_buckets_as_the_trajectory_grows() -> None:
    policy, fleet = policy_of("mlfq"), fleet_of(buckets=FOUR)
    it = placed(policy, fleet, "t")
    visited = [it.worker]
    for _ in range(4):
        turn(it, 4500, outcome(), fleet)
        decision = policy.returned(it, fleet, terms())
        assert decision is not None
        follow(it, decision, fleet)
        visited.append(it.worker)
    assert visited == ["short-0", "short-0", "medium-0", "long-0", "extra_long-0"]


def test_round_robin_takes_equal_workers_in_turn() -> None:
    policy, fleet = policy_of("round_robin"), fleet_of({"short": 8})
    peers: list[str] = []
    for number in range(16):
        it = placed(policy, fleet, f"t{number}")
        peers.append(it.worker)
        fleet.take(it)
    assert peers == [f"short-{n}" for n in range(8)] * 2


def test_waves_of_four_use_eight_workers_in_turn() -> None:
    policy, fleet = policy_of("round_robin"), fleet_of({"short": 8})
    waves: list[list[str]] = []
    for wave in range(2):
        held = [placed(policy, fleet, f"t{wave}{n}") for n in range(4)]
        waves.append([it.worker for it in held])
        for it in held:
            fleet.take(it)
    assert waves == [[f"short-{n}" for n in range(4)], [f"short-{n}" for n in range(4, 8)]]


def test_least_load_counts_what_trajectories_will_come_to_need() -> None:
    policy, fleet = policy_of("least_load"), fleet_of({"short": 3}, tokens_expected=2000)
    assert [placed(policy, fleet, f"t{n}").worker for n in range(4)] == [
        *("short-0", "short-1", "short-2", "short-0"),
    ]


def test_the_end_of_a_short_one_does_not_retire_the_tokens_of_a_long_one() -> None:
    policy, fleet = policy_of("least_load"), fleet_of({"short": 1})
    long_one, short_one = placed(policy, fleet, "long"), placed(policy, fleet, "short")
    turn(long_one, 9000, outcome(tokens=1000), fleet)
    turn(short_one, 10, outcome(tokens=5), fleet)
    fleet.take(short_one)
    worker = fleet.workers["short-0"]
    assert (worker.context_tokens, worker.kv_expected) == (10_000, 10_000)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_draining_worker_is_left_at_the_next_return(name: str) -> None:
    policy, fleet = policy_of(name), fleet_of({"short": 2, "long": 1})
    it = placed(policy, fleet, "t")
    worker = fleet.workers[it.worker]
    worker.draining = True
    fleet.changed[worker.peer] = worker
    turn(it, 100, outcome(), fleet)
    decision = policy.returned(it, fleet, terms())
    assert decision is not None
    assert decision.peer != it.worker
    assert decision.reason == "draining"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_that_must_leave_waits_when_nobody_takes_it(name: str) -> None:
    policy, fleet = policy_of(name), fleet_of({"short": 1})
    it = placed(policy, fleet, "t")
    fleet.workers["short-0"].draining = True
    fleet.changed["short-0"] = fleet.workers["short-0"]
    turn(it, 100, outcome(), fleet)
    assert policy.returned(it, fleet, terms()) is None
    assert policy.place(route("new"), fleet, terms()) is None


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_inputs_give_equal_decisions(name: str) -> None:
    def run() -> list[str]:
        policy, fleet = policy_of(name), fleet_of({"short": 3, "long": 2})
        routes = [placed(policy, fleet, f"t{n}", group_id=f"g{n // 4}") for n in range(20)]
        for it, later in pairwise(routes):
            turn(it, 50, outcome(tokens=200), fleet)
            decision = policy.returned(it, fleet, terms())
            assert decision is not None
            follow(it, decision, fleet)
            policy.end(later, finished=False)
        return [it.worker for it in routes]

    assert run() == run()


def test_a_worker_that_came_late_is_used() -> None:
    for name in sorted(POLICIES):
        policy, fleet = policy_of(name), fleet_of({"short": 1}, slots=1)
        placed(policy, fleet, "t0")
        assert policy.place(route("t1"), fleet, terms()) is None
        report_in(fleet, LONG, 0)
        decision = policy.place(route("t1"), fleet, terms())
        assert decision is not None
        assert decision.peer == "long-0"
