import pytest

from services.scheduler.routing.published import bucket_of_both
from services.scheduler.routing.route import Residual
from services.scheduler.routing.tree import PrefixTree, residuals_of, state_of
from tests.support.routing import LONG, SHORT, ToolStatus, outcome, route, turn

SEARCH = state_of(outcome("search", 100))
CODE = state_of(outcome("code", 6000))


def test_every_prefix_of_an_inserted_history_is_found() -> None:
    tree = PrefixTree()
    tree.insert("p", [SEARCH, CODE], [8000, 3000], 9000)
    depths = [tree.find("p", states) for states in ([], [SEARCH], [SEARCH, CODE])]
    assert [found and found.depth for found in depths] == [0, 1, 2]


def test_an_exact_look_up_of_an_unknown_prompt_finds_nothing() -> None:
    tree = PrefixTree()
    tree.insert("p", [SEARCH], [8000], 9000)
    assert tree.find("q", [SEARCH]) is None


def test_an_unseen_prompt_is_estimated_by_what_was_seen_elsewhere() -> None:
    tree = PrefixTree()
    tree.insert("p", [SEARCH], [8000], 9000)
    found = tree.estimate("q", [SEARCH])
    assert found is not None
    assert (found.depth, found.everywhere) == (1, True)
    assert found.node.residual().mean == 8000


def test_an_unseen_state_is_estimated_by_its_parent() -> None:
    tree = PrefixTree()
    tree.insert("p", [SEARCH, CODE], [8000, 3000], 9000)
    found = tree.estimate("p", [SEARCH, SEARCH])
    assert found is not None
    assert (found.depth, found.node.residual().mean) == (1, 8000)


def test_a_bucket_must_hold_mean_and_p90_alike() -> None:
    buckets = (SHORT, LONG)
    assert bucket_of_both(Residual(3000, 3000, 4000, 1), buckets) == 0
    assert bucket_of_both(Residual(3000, 3000, 8000, 1), buckets) is None


def test_ten_prompts_have_ten_roots_after_a_load() -> None:
    tree = PrefixTree()
    for number in range(10):
        tree.insert(f"p{number}", [SEARCH], [100], 200)
    loaded = PrefixTree()
    loaded.load(tree.dump())
    assert len(loaded.roots) == 10
    assert loaded.insertions == 10


def test_a_window_survives_dump_and_load_also_for_new_prompts() -> None:
    tree = PrefixTree()
    tree.insert("p", [SEARCH], [5000.0], 6000)
    loaded = PrefixTree()
    loaded.load(tree.dump())
    for prompt in ("p", "new"):
        found = loaded.estimate(prompt, [SEARCH])
        assert found is not None
        assert list(found.node.window) == [5000.0]


def test_merged_trees_know_what_both_knew() -> None:
    one, other = PrefixTree(), PrefixTree()
    one.insert("p", [], [], 1500)
    other.insert("p", [], [], 3500)
    one.merge(other)
    root = one.roots["p"]
    assert (root.visits, root.residual().mean, one.insertions) == (2, 2500, 2)


def test_states_and_residuals_must_be_of_one_length() -> None:
    with pytest.raises(ValueError, match="1 states"):
        PrefixTree().insert("p", [SEARCH], [], 100)


def test_residuals_count_from_each_tool_return_to_the_end() -> None:
    it = route("t")
    turn(it, 300, outcome(status=ToolStatus.ERROR))
    turn(it, 700, outcome())
    it.action_tokens += 200
    assert residuals_of(it) == [900, 200]
    assert state_of(it.outcomes[0]) == "search:small:error"


def test_the_trees_stay_within_their_bound() -> None:
    tree = PrefixTree(nodes_max=50)
    for number in range(200):
        tree.insert(f"p{number}", [SEARCH, CODE], [2, 1], 3)
    assert len(tree.roots) <= 17
    assert "p199" in tree.roots
    assert tree.find("p0", []) is None
    assert len(tree.everywhere.window) == 64
