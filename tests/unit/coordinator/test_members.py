from hypothesis import given
from hypothesis import strategies as st

from common.messages.coordinator import Heartbeat, Member, MemberUpdate
from services.coordinator.members import UPDATES_KEPT, Members


def member(name: str, incarnation: str = "a", role: str = "rollout") -> Member:
    return Member(
        peer=f"run/{role}/{name}/{incarnation}", role=role, name=name, address="tcp://x:1"
    )


def beat(number: int = 0, version: int = -1) -> Heartbeat:
    return Heartbeat(number=number, loop_lag_s=0.0, busy_s=0.0, uptime_s=0.0, version=version)


def replay(members: set[str], updates: list[MemberUpdate]) -> set[str]:
    for update in updates:
        if update.gone:
            members.discard(update.member.peer)
        else:
            members.add(update.member.peer)
    return members


def test_a_silent_member_is_gone_after_its_lease() -> None:
    members = Members(lease_s=3.0)
    members.register(member("w"), 1, -1, now=0.0)
    assert members.expire(now=3.0) == []
    assert members.expire(now=3.1) == [member("w")]
    assert members.heartbeat(member("w").peer, beat(), now=3.2) is None


def test_a_heartbeat_renews_the_lease() -> None:
    members = Members(lease_s=3.0)
    members.register(member("w"), 1, -1, now=0.0)
    members.heartbeat(member("w").peer, beat(), now=2.0)
    assert members.expire(now=4.0) == []


def test_a_new_incarnation_replaces_the_old_one_at_once() -> None:
    members = Members(lease_s=3.0)
    members.register(member("w", "a"), 1, -1, now=0.0)
    assert members.register(member("w", "b"), 2, -1, now=0.1) == [member("w", "a")]
    assert members.live() == [member("w", "b")]


def test_registering_twice_changes_nothing() -> None:
    members = Members(lease_s=3.0)
    members.register(member("w"), 1, -1, now=0.0)
    number = members.number
    assert members.register(member("w"), 1, -1, now=0.5) == []
    assert members.number == number


def test_a_heartbeat_brings_exactly_the_unseen_changes() -> None:
    members = Members(lease_s=3.0)
    members.register(member("a"), 1, -1, now=0.0)
    seen = members.number
    members.register(member("b"), 2, -1, now=0.0)
    members.leave(member("b").peer)
    updates = members.heartbeat(member("a").peer, beat(seen), now=0.1)
    assert updates is not None
    assert [(update.member.name, update.gone) for update in updates] == [
        ("b", False),
        ("b", True),
    ]


def test_who_is_too_far_behind_gets_the_whole_membership() -> None:
    members = Members(lease_s=3.0)
    for index in range(UPDATES_KEPT + 10):
        members.register(member("w", f"{index}"), 1, -1, now=0.0)
    updates = members.updates_after(1)
    assert [update.member for update in updates] == members.live()


operations = st.lists(
    st.tuples(
        st.sampled_from(["register", "leave", "expire", "beat"]),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["1", "2"]),
        st.integers(0, 4),
    ),
    max_size=30,
)


@given(operations)
def test_a_follower_of_the_updates_knows_the_members(
    script: list[tuple[str, str, str, int]],
) -> None:
    members = Members(lease_s=3.0)
    known: set[str] = set()
    seen = 0
    now = 0.0
    for operation, name, incarnation, wait in script:
        now += wait
        who = member(name, incarnation)
        if operation == "register":
            members.register(who, 1, -1, now)
        elif operation == "leave":
            members.leave(who.peer)
        elif operation == "beat":
            members.heartbeat(who.peer, beat(), now)
        else:
            members.expire(now)
        known = replay(known, members.updates_after(seen))
        seen = members.number
        assert known == {who.peer for who in members.live()}
        names = [(who.role, who.name) for who in members.live()]
        assert len(names) == len(set(names))


def test_a_hidden_member_is_gone_to_the_others_and_learns_it_itself() -> None:
    members = Members(lease_s=3.0)
    members.register(member("w"), 1, -1, now=0.0)
    number = members.number
    members.hide(member("w").peer)
    members.hide(member("w").peer)
    assert members.live() == []
    updates = members.heartbeat(member("w").peer, beat(number), now=1.0)
    assert updates is not None
    assert [(update.member.name, update.gone) for update in updates] == [("w", True)]
    members.register(member("w"), 1, -1, now=1.5)
    assert members.live() == []
    members.show(member("w").peer)
    assert members.live() == [member("w")]


def test_a_hidden_member_that_goes_is_told_of_once() -> None:
    members = Members(lease_s=3.0)
    members.register(member("w"), 1, -1, now=0.0)
    members.hide(member("w").peer)
    number = members.number
    assert members.leave(member("w").peer) == member("w")
    assert members.updates_after(number) == []
    assert members.hidden == set()
