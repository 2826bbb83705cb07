"""Fixed tokens whose log-probabilities tell whether a worker decodes with the weights it names."""

CANARY_TOKENS = 16
_STRIDE = 7919
"""A prime far from any structure of a vocabulary."""


def canary_tokens(vocabulary: int) -> list[int]:
    """Equal in every process: spread over the vocabulary, at least one token apart.

    Args:
        vocabulary: number of token ids, at least 2.
    """
    return [(number + 1) * _STRIDE % vocabulary for number in range(CANARY_TOKENS)]
