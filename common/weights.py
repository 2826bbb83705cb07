"""The identity of a policy version.

A version is named by its lineage (a counter that grows with every resume) and its step. Packed
into one int32 it is an id that is never reused and orders as history does: all versions of a
resumed run come after those of the history it left behind.
"""

STEP_BITS = 20
STEP_MAX = (1 << STEP_BITS) - 1
LINEAGE_MAX = (1 << (31 - STEP_BITS)) - 1
NO_VERSION = -1
"""Before the first version was published or applied."""


def version_id(lineage: int, step: int) -> int:
    """Pack lineage and step."""
    assert 0 <= step <= STEP_MAX, step
    assert 0 <= lineage <= LINEAGE_MAX, lineage
    return lineage << STEP_BITS | step


def step_of(version: int) -> int:
    """The optimizer steps that this version has seen."""
    assert version >= 0, version
    return version & STEP_MAX


def lineage_of(version: int) -> int:
    """The lineage in which this version was made."""
    assert version >= 0, version
    return version >> STEP_BITS
