from services.coordinator.relay import Link, links

SOURCE = "c"


def test_one_or_two_hosts_stream_from_the_source() -> None:
    assert links([("b", "sb"), ("a", "sa")], SOURCE) == [Link("a", ("c",)), Link("b", ("c",))]


def test_three_hosts_make_a_chain_with_the_source_as_last_resort() -> None:
    assert links([("c1", "s1"), ("c3", "s3"), ("c2", "s2")], SOURCE) == [
        Link("c1", ("c",)),
        Link("c2", ("s1", "c")),
        Link("c3", ("s2", "c")),
    ]


def test_a_host_that_passes_nothing_on_is_left_out_of_the_chain() -> None:
    assert links([("c1", "s1"), ("c2", ""), ("c3", "s3")], SOURCE) == [
        Link("c1", ("c",)),
        Link("c2", ("s1", "c")),
        Link("c3", ("s1", "c")),
    ]


def test_nobody_makes_no_links() -> None:
    assert links([], SOURCE) == []
