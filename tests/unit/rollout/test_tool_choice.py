from common.messages.coordinator import Member
from services.rollout.tool_client import choose_server


def server(name: str, environments: str, role: str = "tools") -> Member:
    return Member(
        peer=f"r/{role}/{name}/1",
        role=role,
        name=name,
        address="a",
        labels={"environments": environments},
    )


A, B, C = server("a", "maths"), server("b", "python,maths"), server("c", "python")
TRAINER = server("t", "maths", role="trainer")


def choose(environment: str, refused: frozenset[str] = frozenset(), **open_sessions: int) -> str:
    chosen = choose_server(
        [TRAINER, C, B, A], environment, open_sessions=open_sessions, refused=refused
    )
    return chosen.name if chosen else ""


def test_the_least_used_server_of_the_environment_is_chosen() -> None:
    assert choose("maths", a=3, b=2) == "b"
    assert choose("python", b=2, c=1) == "c"


def test_ties_are_decided_by_name() -> None:
    assert choose("maths") == "a"
    assert choose("maths", a=2, b=2) == "a"


def test_servers_that_refused_come_last() -> None:
    assert choose("maths", frozenset("a"), b=9) == "b"
    assert choose("maths", frozenset("ab"), a=1) == "b"


def test_nobody_serves_an_unknown_environment() -> None:
    assert choose("math") == ""
