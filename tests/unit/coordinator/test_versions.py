from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.messages.coordinator import Manifest
from services.coordinator.versions import FAILURES_MAX, Receiver, Versions
from tests.support.sim import manifest as manifest_of

HERE, THERE, FAR = "here", "there", "far"
SOURCE = "stream://coordinator"


def manifest(version: int) -> Manifest:
    return manifest_of(version, f"/segment-{version % 3}")


def fresh(*names: str, memory: str = HERE) -> list[Receiver]:
    return [Receiver(name, memory=memory, stream=f"stream://{name}") for name in names]


def decoding(*names: str, version: int = 0) -> list[Receiver]:
    return [Receiver(name, version=version, memory=HERE) for name in names]


def announced(*numbers: int) -> Versions:
    versions = Versions(HERE)
    for number in numbers:
        versions.announce(manifest(number))
    return versions


def orders(
    versions: Versions,
    receivers: list[Receiver],
    now: float = 0.0,
    *,
    share_min: float = 0.5,
    patience_s: float = 10.0,
) -> list[tuple[str, int]]:
    told = versions.orders(receivers, now, share_min=share_min, patience_s=patience_s)
    return [(peer, manifest.version) for peer, manifest in told]


def fetches(versions: Versions, receivers: list[Receiver]) -> list[tuple[str, int]]:
    due = versions.fetches(receivers, SOURCE, 0.0)
    return [(fetch.link.peer, fetch.manifest.version) for fetch in due]


def test_an_older_version_is_never_announced() -> None:
    versions = Versions()
    assert versions.announce(manifest(5))
    assert not versions.announce(manifest(5))
    assert not versions.announce(manifest(4))
    assert (versions.version, versions.published) == (5, 1)


def test_a_worker_is_told_one_version_at_a_time_and_skips_to_the_newest() -> None:
    versions = announced(1)
    assert orders(versions, fresh("w")) == [("w", 1)]
    versions.announce(manifest(2))
    versions.announce(manifest(3))
    assert orders(versions, fresh("w")) == []
    versions.acknowledged("w", 1)
    assert orders(versions, fresh("w")) == [("w", 3)]


def test_nothing_is_ordered_before_the_first_version() -> None:
    assert orders(Versions(), fresh("w")) == []
    assert fetches(Versions(), fresh("w", memory=THERE)) == []


def test_what_a_worker_says_by_itself_is_no_proof() -> None:
    versions = announced(4)
    assert orders(versions, decoding("w", version=4)) == [("w", 4)]
    versions.acknowledged("w", 4)
    assert orders(versions, decoding("w", version=4)) == []


# Waves.


def test_workers_swap_in_waves_so_that_a_share_goes_on_decoding() -> None:
    versions = announced(1)
    workers = decoding("a", "b", "c", "d")
    assert orders(versions, workers) == [("a", 1), ("b", 1)]
    assert orders(versions, workers) == []
    versions.acknowledged("b", 1)
    assert orders(versions, workers) == [("c", 1)]


def test_with_few_workers_one_swaps_at_a_time() -> None:
    versions = announced(1)
    assert orders(versions, decoding("a", "b"), share_min=0.9) == [("a", 1)]


def test_workers_without_weights_and_replicas_wait_for_no_wave() -> None:
    versions = announced(1)
    replicas = [replace(r, decodes=False) for r in decoding("r1", "r2")]
    told = orders(versions, [*decoding("a", "b"), *fresh("new"), *replicas])
    assert told == [("a", 1), ("new", 1), ("r1", 1), ("r2", 1)]


def test_who_swaps_for_too_long_holds_up_nobody() -> None:
    versions = announced(1)
    workers = decoding("a", "b")
    assert orders(versions, workers, now=0.0) == [("a", 1)]
    assert orders(versions, workers, now=10.0) == []
    assert orders(versions, workers, now=10.1) == [("b", 1)]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.booleans()), max_size=60),
    st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.99]),
)
def test_never_more_than_the_share_swap_at_once(
    answers: list[tuple[str, bool]], share_min: float
) -> None:
    versions = announced(1)
    workers = decoding(*"abcdefg")
    most = max(1, int((1 - share_min) * len(workers) + 1e-9))
    for number, (peer, publishes) in enumerate(answers):
        orders(versions, workers, share_min=share_min)
        assert len(versions.applying) <= most
        order = versions.applying.get(peer)
        if order is not None:
            versions.acknowledged(peer, order.manifest.version)
        if publishes:
            versions.announce(manifest(number + 2))


# Failures and quarantine.


def test_a_worker_that_keeps_failing_is_not_told_until_another_version() -> None:
    versions = announced(1)
    for attempt in range(1, FAILURES_MAX + 1):
        assert orders(versions, fresh("w"))
        assert versions.failed("w") == (attempt == FAILURES_MAX)
    assert orders(versions, fresh("w")) == []
    versions.announce(manifest(2))
    assert orders(versions, fresh("w")) == [("w", 2)]


def test_a_worker_in_quarantine_is_told_again_and_proof_ends_it() -> None:
    versions = announced(1)
    orders(versions, decoding("w"))
    assert versions.quarantine("w")
    assert orders(versions, decoding("w")) == [("w", 1)]
    assert not versions.quarantine("w")
    assert orders(versions, decoding("w")) == [("w", 1)]
    assert versions.acknowledged("w", 1)
    assert versions.quarantined == set()


def test_a_worker_in_quarantine_is_no_decode_capacity() -> None:
    versions = announced(1)
    workers = decoding("a", "b", "c")
    assert orders(versions, workers) == [("a", 1)]
    versions.quarantine("a")
    assert orders(versions, workers) == [("a", 1), ("b", 1)]


# Other hosts.


def test_a_version_reaches_a_host_once_and_then_its_workers() -> None:
    versions = announced(1)
    receivers = [*fresh("w"), *fresh("x", "y", memory=THERE)]
    assert fetches(versions, receivers) == [("x", 1)]
    assert fetches(versions, receivers) == []
    assert orders(versions, receivers) == [("w", 1)]
    versions.fetched("x")
    assert orders(versions, receivers) == [("x", 1), ("y", 1)]
    assert fetches(versions, receivers) == []


def test_a_host_skips_to_the_newest_and_uses_what_it_has_meanwhile() -> None:
    versions = announced(1)
    receivers = fresh("x", memory=THERE)
    fetches(versions, receivers)
    versions.announce(manifest(2))
    versions.announce(manifest(3))
    assert fetches(versions, receivers) == []
    versions.fetched("x")
    assert fetches(versions, receivers) == [("x", 3)]
    assert orders(versions, receivers) == [("x", 1)]


def test_another_worker_of_the_host_fetches_when_one_fails_or_leaves() -> None:
    versions = announced(1)
    receivers = fresh("x", "y", "z", memory=THERE)
    assert fetches(versions, receivers) == [("x", 1)]
    versions.fetch_failed("x")
    assert fetches(versions, receivers) == [("y", 1)]
    versions.gone("y")
    receivers = fresh("x", "z", memory=THERE)
    assert fetches(versions, receivers) == [("z", 1)]


def test_a_host_on_which_all_have_failed_waits_for_another_version() -> None:
    versions = announced(1)
    receivers = fresh("x", memory=THERE)
    for _ in range(FAILURES_MAX):
        assert fetches(versions, receivers) == [("x", 1)]
        versions.fetch_failed("x")
    assert fetches(versions, receivers) == []
    versions.announce(manifest(2))
    assert fetches(versions, receivers) == [("x", 2)]


def test_without_a_stream_nobody_is_told_to_fetch() -> None:
    versions = announced(1)
    assert versions.fetches(fresh("x", memory=THERE), "", 0.0) == []


def test_a_host_that_everybody_left_has_nothing() -> None:
    versions = announced(1)
    fetches(versions, fresh("x", memory=THERE))
    versions.fetched("x")
    versions.forget_hosts({})
    assert fetches(versions, fresh("x", memory=THERE)) == [("x", 1)]


# Segments.


def test_a_segment_is_in_use_while_it_is_newest_or_being_read() -> None:
    versions = announced(1)
    orders(versions, fresh("w"))
    versions.announce(manifest(2))
    assert versions.release() == ["/segment-1", "/segment-2"]
    versions.acknowledged("w", 1)
    assert versions.release() == ["/segment-2"]


def test_a_lost_worker_holds_no_segment() -> None:
    versions = announced(1)
    orders(versions, fresh("w"))
    versions.announce(manifest(2))
    versions.gone("w")
    assert versions.release() == ["/segment-2"]


def test_a_worker_on_another_host_reads_no_segment_but_its_fetch_does() -> None:
    versions = announced(1)
    receivers = fresh("x", memory=THERE)
    fetches(versions, receivers)
    versions.announce(manifest(2))
    assert versions.release() == ["/segment-1", "/segment-2"]
    versions.fetched("x")
    assert orders(versions, receivers) == [("x", 1)]
    versions.announce(manifest(3))
    assert versions.release() == ["/segment-0"]


def test_the_version_before_is_kept_for_deltas_while_hosts_have_it() -> None:
    versions = announced(1)
    receivers = fresh("x", memory=THERE)
    fetches(versions, receivers)
    versions.fetched("x")
    versions.announce(manifest(2))
    assert versions.release() == ["/segment-1", "/segment-2"]
    assert versions.base() == manifest(1)
    fetches(versions, receivers)
    versions.fetched("x")
    assert versions.release() == ["/segment-2"]
    assert versions.base() is None


def test_a_base_that_was_given_up_does_not_come_back() -> None:
    versions = announced(1)
    receivers = [*fresh("w"), *fresh("x", memory=THERE)]
    fetches(versions, receivers)
    versions.fetched("x")
    versions.announce(manifest(2))
    orders(versions, fresh("w"))
    versions.announce(manifest(3))
    versions.copies[THERE] = manifest(2)
    versions.acknowledged("w", 2)
    orders(versions, [Receiver("v", memory=HERE)])
    versions.announce(manifest(4))
    versions.copies[THERE] = manifest(3)
    versions.announce(manifest(5))
    assert versions.release() == ["/segment-0", "/segment-2"]
    versions.acknowledged("v", 3)
    assert versions.base() is None


def test_nobody_streams_from_a_run_on_one_host_so_no_base_is_kept() -> None:
    versions = announced(1, 2)
    assert versions.release() == ["/segment-2"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["announce", "order", "ack", "fail", "lie", "gone"]),
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
            receivers = [Receiver(peer, version=applied[peer]) for peer in applied]
            for peer, version in orders(versions, receivers):
                assert peer not in told
                assert version >= applied[peer]
                told[peer] = version
        elif operation == "ack" and worker in told:
            applied[worker] = told.pop(worker)
            versions.acknowledged(worker, applied[worker])
        elif operation == "fail" and worker in told:
            told.pop(worker)
            versions.failed(worker)
        elif operation == "lie" and worker in told:
            applied[worker] = told.pop(worker)
            versions.quarantine(worker)
        elif operation == "gone":
            told.pop(worker, None)
            versions.gone(worker)


MEMORIES = {"x": THERE, "y": THERE, "z": FAR, "w": HERE}


def play(versions: Versions, operation: str, peer: str) -> None:
    """One event of a coordinator's life."""
    receivers = [Receiver(name, memory=memory) for name, memory in MEMORIES.items()]
    order = versions.applying.get(peer)
    if operation == "announce":
        versions.announce(manifest(versions.version + 1))
    elif operation == "step":
        versions.fetches(receivers, SOURCE, 0.0)
        orders(versions, receivers)
    elif operation == "fail":
        versions.fetch_failed(peer)
    elif operation == "leave":
        versions.gone(peer)
    elif operation == "done":
        versions.fetched(peer)
        if order is not None:
            versions.acknowledged(peer, order.manifest.version)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["announce", "step", "done", "fail", "leave"]),
            st.sampled_from(sorted(MEMORIES)),
        ),
        max_size=60,
    )
)
def test_every_host_gets_the_newest_version_in_the_end(script: list[tuple[str, str]]) -> None:
    versions = announced(1)
    for operation, peer in script:
        play(versions, operation, peer)
        assert len(versions.release()) <= 2 + len(versions.applying) + len(versions.fetching)
    play(versions, "announce", "")
    for _ in range(4):
        play(versions, "step", "")
        for peer in MEMORIES:
            play(versions, "done", peer)
    assert versions.judged == dict.fromkeys(MEMORIES, versions.version)
