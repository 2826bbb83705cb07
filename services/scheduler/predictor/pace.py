"""How many rows are new before the predictor's weights are solved anew."""

_SOLVE_ROWS_MIN = 4
_SOLVE_ROWS_MAX = 1024
_SOLVE_SHARE = 12
_SOLVE_UNFINISHED_SHARE = 32
"""Weights are solved anew when so many rows are new, a twelfth of all that were ever finished and a
thirty-second of the unfinished, or 1024…"""
_SOLVE_UNFINISHED = 64
"""…or one for so many unfinished rows: one more turn of few says little of so many."""


def solve_after(rows: int, unfinished_rows: int) -> int:
    """New rows until then, when so many were ever finished and so many are not yet.

    Grows with both.
    """
    known = rows / _SOLVE_SHARE + unfinished_rows / _SOLVE_UNFINISHED_SHARE
    most = max(_SOLVE_ROWS_MAX, unfinished_rows // _SOLVE_UNFINISHED)
    return min(most, max(_SOLVE_ROWS_MIN, int(known)))
