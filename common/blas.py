"""How numpy's matrices are multiplied."""

import os

LIBRARIES = ("OPENBLAS", "OMP", "MKL")


def use_one_thread() -> None:
    """Multiply in the calling thread alone. To be called before numpy is imported.

    The control services' matrices are small: threads that spin beside them slow a run down
    several times over. What the environment says already stays.
    """
    for library in LIBRARIES:
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
