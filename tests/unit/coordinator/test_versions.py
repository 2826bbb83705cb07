from hypothesis import given
from hypothesis import strategies as st

from common.messages.coordinator import Manifest
from services.coordinator.versions import FAILURES_MAX, Versions
from tests.support.sim import manifest as manifest_of


def manifest(version: int) -> Manifest:
    return manifest_of(version, f"/segment-{version % 3}")


def test_an_older_version_is_never_announced() -> None:
    versions = Versions()
    assert versions.announce(manifest(5))
    assert not versions.announce(manifest(5))
    assert not versions.announce(manifest(4))
    assert (versions.version, versions.published) == (5, 1)


def test_a_worker_is_told_one_version_at_a_time_and_skips_to_the_newest() -> None:
    versions = Versions()
    versions.announce(manifest(1))
    assert versions.orders({"w": -1}, now=0.0) == [("w", manifest(1))]
    versions.announce(manifest(2))
    versions.announce(manifest(3))
    assert versions.orders({"w": -1}, now=1.0) == []
    versions.acknowledged("w")
    assert versions.orders({"w": 1}, now=2.0) == [("w", manifest(3))]


def test_a_segment_is_in_use_while_it_is_newest_or_being_applied() -> None:
    versions = Versions()
    versions.announce(manifest(1))
    versions.orders({"w": -1}, now=0.0)
    versions.announce(manifest(2))
    assert versions.segments_in_use() == ["/segment-1", "/segment-2"]
    versions.acknowledged("w")
    assert versions.segments_in_use() == ["/segment-2"]


def test_a_worker_that_keeps_failing_is_quarantined_until_another_version() -> None:
    versions = Versions()
    versions.announce(manifest(1))
    for attempt in range(1, FAILURES_MAX + 1):
        assert versions.orders({"w": -1}, now=0.0)
        assert versions.failed("w") == (attempt == FAILURES_MAX)
    assert versions.orders({"w": -1}, now=0.0) == []
    versions.announce(manifest(2))
    assert versions.orders({"w": -1}, now=0.0) == [("w", manifest(2))]


def test_nothing_is_ordered_before_the_first_version() -> None:
    assert Versions().orders({"w": -1}, now=0.0) == []


def test_a_lost_worker_holds_no_segment() -> None:
    versions = Versions()
    versions.announce(manifest(1))
    versions.orders({"w": -1}, now=0.0)
    versions.announce(manifest(2))
    versions.gone("w")
    assert versions.segments_in_use() == ["/segment-2"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["announce", "order", "ack", "fail", "gone"]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 6),
        ),
        max_size=40,
    )
)
def test_no_worker_is_ever_told_an_older_version(script: list[tuple[str, str, int]]) -> None:
    versions = Versions()
    applied = {"a": -1, "b": -1}
    told: dict[str, int] = {}
    for operation, worker, number in script:
        if operation == "announce":
            versions.announce(manifest(number))
        elif operation == "order":
            for peer, order in versions.orders(applied, now=0.0):
                assert peer not in told
                assert order.version > applied[peer]
                told[peer] = order.version
        elif operation == "ack" and worker in told:
            applied[worker] = told.pop(worker)
            versions.acknowledged(worker)
        elif operation == "fail" and worker in told:
            told.pop(worker)
            versions.failed(worker)
        elif operation == "gone":
            told.pop(worker, None)
            versions.gone(worker)
