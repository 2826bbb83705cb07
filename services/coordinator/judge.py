"""Whether a worker decodes with the weights that it names. Pure.

The digest tells what bytes it holds, the canary what it computes with them: a reload that kept an
old packed copy, or a kernel that reads another buffer, has the right digest and the wrong
log-probabilities.
"""

from math import isfinite
from statistics import median

from common.messages.coordinator import Manifest
from common.messages.rollout import VersionApplied

TOLERANCES = {"F32": 1e-3, "BF16": 0.5, "F16": 0.5}
"""Absolute difference of a token's log-probability, in the median over the canary, that kernels,
batch shapes and the rounding of activations explain."""


def mismatch(manifest: Manifest, applied: VersionApplied, *, canary: bool) -> str:
    """What is wrong with a worker's word that it has applied a version; empty if nothing is.

    Args:
        manifest: the version that it was told to apply.
        applied: its answer.
        canary: whether its log-probabilities must be those of the manifest, where that has some.
    """
    if applied.version != manifest.version:
        return f"it answers with version {applied.version}"
    if applied.digest != manifest.digest:
        return f"its digest is {applied.digest[:16] or 'missing'}, not {manifest.digest[:16]}"
    if not canary or not manifest.canary:
        return ""
    if len(applied.canary) != len(manifest.canary):
        return f"{len(applied.canary)} canary log-probabilities of {len(manifest.canary)}"
    apart = difference(manifest.canary, applied.canary)
    tolerance = tolerance_of(manifest)
    if apart <= tolerance:
        return ""
    return f"its canary differs by {apart:.3g} in the median, more than {tolerance:g}"


def difference(expected: list[float], found: list[float]) -> float:
    """Median over the tokens; infinite where something is no number."""
    if not all(map(isfinite, [*expected, *found])):
        return float("inf")
    return median(abs(a - b) for a, b in zip(expected, found, strict=True))


def tolerance_of(manifest: Manifest) -> float:
    """By the coarsest type of any of its tensors."""
    return max((TOLERANCES.get(spec.dtype, 0.0) for spec in manifest.tensors), default=1e-3)
