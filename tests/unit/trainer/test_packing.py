from hypothesis import given
from hypothesis import strategies as st

from services.trainer.packing import deal, pack

lengths = st.lists(st.integers(1, 50), max_size=40)


@given(lengths, st.integers(1, 200))
def test_every_sequence_is_in_exactly_one_micro_batch(sizes: list[int], limit: int) -> None:
    packed = pack(sizes, limit)
    assert sorted(i for batch in packed for i in batch) == list(range(len(sizes)))


@given(lengths, st.integers(1, 200))
def test_a_micro_batch_exceeds_the_limit_only_with_one_long_sequence(
    sizes: list[int], limit: int
) -> None:
    for batch in pack(sizes, limit):
        padded = len(batch) * max(sizes[i] for i in batch)
        assert padded <= limit or len(batch) == 1


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=3), max_size=9), st.integers(1, 4))
def test_every_rank_runs_equally_many_micro_batches(batches: list[list[int]], ranks: int) -> None:
    hands = deal(batches, ranks)
    assert len(hands) == ranks
    assert len({len(hand) for hand in hands}) == 1
    dealt = [batch for hand in hands for batch in hand if batch]
    assert sorted(dealt) == sorted(batches)
