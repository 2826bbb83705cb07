import math

import pytest

from common.messages.coordinator import Manifest, TensorSpec
from common.messages.rollout import VersionApplied
from services.coordinator.judge import mismatch
from tests.support.sim import manifest as manifest_of

CANARY = [-1.0, -2.0, -3.0]


def version(dtype: str = "F32", canary: list[float] = CANARY) -> Manifest:
    spec = TensorSpec(name="w", dtype=dtype, shape=[1], offset=0, length=4)
    return manifest_of(3).model_copy(update={"tensors": [spec], "canary": canary})


def applied(**changes: object) -> VersionApplied:
    values = {"version": 3, "digest": "digest-3", "apply_s": 0.0, "canary": CANARY}
    return VersionApplied.model_validate(values | changes)


def test_equal_digest_and_canary_are_accepted() -> None:
    assert mismatch(version(), applied(), canary=True) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "answers with version 2"),
        ({"digest": "digest-2"}, "its digest is digest-2, not digest-3"),
        ({"digest": ""}, "its digest is missing"),
        ({"canary": []}, "0 canary log-probabilities of 3"),
        ({"canary": [-1.0, -2.1, -3.1]}, "differs by 0.1 in the median"),
        ({"canary": [math.nan, -2.0, -3.0]}, "differs by inf"),
    ],
)
def test_what_differs_is_named(changes: dict[str, object], problem: str) -> None:
    assert problem in mismatch(version(), applied(**changes), canary=True)


def test_one_token_that_differs_is_a_rounding_and_the_tolerance_is_the_type_s() -> None:
    assert mismatch(version(), applied(canary=[-1.0, -2.0, -9.0]), canary=True) == ""
    rough = applied(canary=[-1.3, -2.3, -3.3])
    assert mismatch(version("BF16"), rough, canary=True) == ""
    assert mismatch(version("F32"), rough, canary=True) != ""


def test_a_replica_and_a_version_without_canary_are_judged_by_the_digest_alone() -> None:
    assert mismatch(version(), applied(canary=[]), canary=False) == ""
    assert mismatch(version(canary=[]), applied(canary=[-7.0]), canary=True) == ""
    assert mismatch(version(canary=[]), applied(digest="x"), canary=True) != ""
