from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.scheduler import TrajectoryData
from services.trainer.batch import (
    TrajectoryMalformed,
    batch_sequences,
    group_sequences,
    token_weights,
    trajectory_sequence,
)
from tests.support.trainer import group, sequence, trainer_config, trajectory

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
turns = st.lists(st.tuples(ids, ids), max_size=4)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), turns)
def test_trained_positions_are_the_sampled_positions(
    prompt: list[int], script: list[tuple[list[int], list[int]]]
) -> None:
    sampled = [token for action, _ in script for token in action]
    laid_out = trajectory_sequence(trajectory("t", 1.0, prompt=prompt, turns=script), 1.0)
    if laid_out is None:
        assert not sampled
        return
    whole = prompt + [token for action, seen in script for token in [*action, *seen]]
    assert laid_out.tokens.tolist() == whole[: len(laid_out.tokens)]
    assert laid_out.tokens[laid_out.actions].tolist() == sampled
    assert laid_out.actions[-1] == len(laid_out.tokens) - 1
    assert len(laid_out.behaviour) == len(laid_out.versions) == len(sampled)


def test_failed_trajectories_are_not_trained() -> None:
    made = group_sequences(group("g", [1.0, None, 0.0]), trainer_config().training)
    assert [s.advantage > 0 for s in made] == [True, False]


def test_groups_with_equal_prompts_are_not_merged() -> None:
    groups = [group("a", [1.0, 0.0]), group("b", [10.0, 0.0])]
    made = batch_sequences(groups, trainer_config(normalise_std=False).training)
    assert [s.advantage for s in made] == pytest.approx([0.5, -0.5, 5.0, -5.0])


def test_a_trajectory_without_samples_is_left_out_of_numerator_and_denominator() -> None:
    assert trajectory_sequence(trajectory("t", 1.0, turns=[((), (3, 4))]), 1.0) is None


@pytest.mark.parametrize("field", ["action_logprobs", "action_versions"])
def test_arrays_of_unequal_length_are_refused(field: str) -> None:
    whole = trajectory("t", 1.0)
    turn = whole.turns[0].model_copy(update={field: b""})
    broken: TrajectoryData = whole.model_copy(update={"turns": [turn]})
    with pytest.raises(TrajectoryMalformed, match="turn 0 has 2 tokens"):
        trajectory_sequence(broken, 1.0)


@pytest.mark.parametrize(
    ("average", "expected"), [("token", [0.2, 0.2]), ("sequence", [0.5, 0.125])]
)
def test_weights_average_over_tokens_or_over_sequences(average: str, expected: Any) -> None:
    made = [sequence(0, turns=((1, 0),)), sequence(1, turns=((4, 0),))]
    assert token_weights(made, average) == pytest.approx(expected)
