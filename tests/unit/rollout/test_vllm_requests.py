"""What the ranks of one vLLM engine say after an update."""

import pytest

from services.rollout.vllm_requests import rank_problem

DIGEST = "a" * 64


@pytest.mark.parametrize("ranks", [[(7, DIGEST)], [[7, DIGEST], [7, DIGEST]]])
def test_ranks_that_all_hold_the_version_are_no_problem(ranks: list[list[object]]) -> None:
    assert rank_problem(7, DIGEST, ranks) == ""


@pytest.mark.parametrize("other", [(6, DIGEST), (7, "b" * 64), (-1, "")])
def test_a_rank_with_another_version_or_content_is_named(other: tuple[int, str]) -> None:
    problem = rank_problem(7, DIGEST, [(7, DIGEST), other])
    assert f"rank 1 holds {other[0]} ({other[1][:12]})" in problem
    assert "rank 0" not in problem
