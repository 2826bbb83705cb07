"""Drawing tokens, and seeing that a generation has come to its end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TAIL_TOKENS_PER_CHARACTER = 4
"""A character may take up to four byte tokens."""


def sample(logits: Tensor, temperatures: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability under the distribution it was drawn from.

    `draws` are uniform in [0, 1), one per row: the inverse of the cumulative distribution picks
    the token, so a row's token depends on its own draw alone. Temperature 0 takes the most
    probable token, and its log-probability at temperature 1.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    picked = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    picked = picked[:, 0].clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logprobs.argmax(-1), picked)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def completes_stop(tokenizer: Any, tokens: Sequence[int], stop: tuple[str, ...]) -> bool:
    """Whether the sampled tokens contain a stop string. Asked after each token.

    `tokenizer` is a transformers tokenizer.
    """
    if not stop:
        return False
    tail = TAIL_TOKENS_PER_CHARACTER * max(map(len, stop))
    text: str = tokenizer.decode(list(tokens[-tail:]), skip_special_tokens=False)
    return any(string in text for string in stop)
