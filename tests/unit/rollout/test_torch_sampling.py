import math

import torch

from services.rollout.torch_sampling import completes_stop, sample
from tests.support.models import char_tokenizer


def one(probabilities: list[float], temperature: float, draw: float) -> tuple[int, float]:
    tokens, logprobs = sample(
        torch.tensor([probabilities]).log(),
        torch.tensor([temperature]),
        torch.tensor([draw], dtype=torch.float64),
    )
    return int(tokens[0]), float(logprobs[0])


def test_a_draw_picks_the_token_whose_share_it_falls_into() -> None:
    shares = [0.25, 0.5, 0.25]
    assert [one(shares, 1.0, draw)[0] for draw in (0.0, 0.24, 0.26, 0.74, 0.76)] == [0, 0, 1, 1, 2]


def test_an_impossible_token_is_never_picked() -> None:
    shares = [0.0, 1.0, 0.0]
    assert {one(shares, 1.0, draw)[0] for draw in (0.0, 0.5, 1 - 2**-53)} == {1}


def test_the_logprob_is_of_the_distribution_with_temperature() -> None:
    squared = [0.2**2, 0.8**2]
    token, logprob = one([0.2, 0.8], 0.5, 0.99)
    assert token == 1
    assert math.isclose(logprob, math.log(squared[1] / sum(squared)), abs_tol=1e-6)


def test_temperature_zero_takes_the_most_probable_token_unscaled() -> None:
    token, logprob = one([0.2, 0.8], 0.0, 0.0)
    assert token == 1
    assert math.isclose(logprob, math.log(0.8), abs_tol=1e-6)


def test_shares_of_many_draws_are_the_probabilities() -> None:
    count = 4000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().expand(count, 3)
    tokens, _ = sample(logits, torch.ones(count), draws)
    assert torch.bincount(tokens).tolist() == [400, 800, 2800]


def test_a_stop_string_is_found_over_token_boundaries_and_in_the_tail_only() -> None:
    tokenizer = char_tokenizer()
    tokens = tokenizer("some words <stop> more words, and then some")["input_ids"]
    end = len(tokenizer("some words <stop>")["input_ids"])
    assert completes_stop(tokenizer, tokens[:end], ("</a>", "<stop>"))
    assert not completes_stop(tokenizer, tokens[: end - 1], ("<stop>",))
    assert not completes_stop(tokenizer, tokens, ())
