import asyncio

from hypothesis import given
from hypothesis import strategies as st

from common.clock import run_sim
from common.deadlines import TICK_S, DeadlineWheel


@given(st.lists(st.tuples(st.floats(0.001, 3600), st.booleans()), max_size=30))
def test_every_item_expires_once_within_a_tick_unless_removed(
    script: list[tuple[float, bool]],
) -> None:
    async def scenario() -> dict[int, float]:
        loop = asyncio.get_running_loop()
        expired: dict[int, float] = {}

        def expire(item: int) -> None:
            assert item not in expired
            expired[item] = loop.time()

        wheel = DeadlineWheel(loop, expire)
        slots = [wheel.add(item, timeout_s) for item, (timeout_s, _) in enumerate(script)]
        for item, (_, removed) in enumerate(script):
            if removed:
                del slots[item][item]
        await asyncio.sleep(3700)
        return expired

    expired = run_sim(scenario())
    assert sorted(expired) == [item for item, (_, removed) in enumerate(script) if not removed]
    for item, at in expired.items():
        assert -1e-9 <= at - script[item][0] <= TICK_S + 1e-6


def test_an_expired_item_may_add_and_remove_others() -> None:
    async def scenario() -> list[str]:
        loop, expired = asyncio.get_running_loop(), list[str]()

        def expire(item: str) -> None:
            expired.append(item)
            if item == "first":
                slot.pop("second")
                wheel.add("third", 0.5)

        wheel = DeadlineWheel(loop, expire)
        slot = wheel.add("first", 1.0)
        assert wheel.add("second", 1.0) is slot
        await asyncio.sleep(5)
        return expired

    assert run_sim(scenario()) == ["first", "third"]


def test_a_closed_wheel_is_silent() -> None:
    async def scenario() -> list[str]:
        expired = list[str]()
        wheel = DeadlineWheel(asyncio.get_running_loop(), expired.append)
        wheel.add("item", 1.0)
        wheel.close()
        await asyncio.sleep(2)
        return expired

    assert run_sim(scenario()) == []
