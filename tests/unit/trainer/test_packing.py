from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.batch import TrainingSequence
from services.trainer.packing import MICRO_BATCH_COST, Pack, cost, pack, plan
from tests.support.trainer import sequences, siblings

lengths = st.lists(st.integers(1, 50), max_size=40)


@given(lengths, st.integers(1, 200))
def test_every_sequence_is_in_exactly_one_micro_batch(sizes: list[int], limit: int) -> None:
    packed = pack(range(len(sizes)), sizes, limit)
    assert sorted(i for item in packed for i in item.members) == list(range(len(sizes)))


@given(lengths, st.integers(1, 200), st.integers(0, 30))
def test_a_micro_batch_exceeds_the_limit_only_with_one_long_sequence(
    sizes: list[int], limit: int, shared: int
) -> None:
    sizes = [size + shared for size in sizes]
    for item in pack(range(len(sizes)), sizes, limit, shared):
        width = max(sizes[i] for i in item.members) - shared
        assert shared + len(item.members) * width <= limit or len(item.members) == 1


@given(st.lists(st.integers(1, 2000), max_size=40))
def test_padding_never_costs_more_than_another_micro_batch(sizes: list[int]) -> None:
    for item in pack(range(len(sizes)), sizes, 100_000):
        width = max(sizes[i] for i in item.members)
        assert sum(width - sizes[i] for i in item.members) <= MICRO_BATCH_COST


def test_a_micro_batch_costs_its_padded_tokens_and_a_constant() -> None:
    assert cost(Pack((0, 1), shared=4), [10, 7]) == MICRO_BATCH_COST + 4 + 2 * 6
    assert cost(Pack(), [10, 7]) == MICRO_BATCH_COST


def common_prefix(batch: list[TrainingSequence], item: Pack) -> set[Any]:
    return {batch[i].tokens[: item.shared].tobytes() for i in item.members}


def test_groups_share_their_prompt_and_nothing_else() -> None:
    batch = siblings(8, prompt=90, seed=1) + siblings(8, prompt=70, seed=2)
    planned = plan(batch, 100_000, share=True)
    assert {item.shared for item in planned} == {89, 69}
    assert all(len(common_prefix(batch, item)) == 1 for item in planned)
    assert sorted(i for item in planned for i in item.members) == list(range(16))


@pytest.mark.parametrize("share", [True, False])
def test_short_prompts_are_not_worth_a_micro_batch(share: bool) -> None:
    planned = plan(sequences(20), 100_000, share=share)
    assert [item.shared for item in planned] == [0]
