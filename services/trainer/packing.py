"""Which sequences go through the model together.

A micro-batch is padded on the right: with causal attention no real token ever sees padding or
another sequence, so there is no mask to get wrong, and attention keeps its fast causal path.
On a CPU with 90-token sequences this took 4.2 s per 256 where one packed row with a
block-diagonal mask took 6.3 s (8 sequences a row) to 13.5 s (32). Sorting by length keeps the
padding small.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `tokens_max` tokens, padding included.

    Longest first; ties in the order given, so that equal inputs give equal micro-batches. A
    sequence longer than `tokens_max` gets a micro-batch of its own.

    Returns:
        Indices into `lengths`; each index occurs once.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * width <= tokens_max:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index]
    return batches


def deal(batches: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
    """Deal micro-batches to ranks, the same number to each: short hands end with empty ones.

    Every rank has to take part in every collective, so each runs equally many micro-batches.
    """
    rounds = -(-len(batches) // ranks)
    return [
        [batches[i] if (i := r * ranks + rank) < len(batches) else [] for r in range(rounds)]
        for rank in range(ranks)
    ]
