import asyncio

import pytest

from common.clock import run_sim


def test_hours_pass_without_waiting() -> None:
    async def nap() -> float:
        await asyncio.sleep(7200)
        return asyncio.get_running_loop().time()

    assert run_sim(nap()) == pytest.approx(7200)


def test_a_deadlock_is_an_error_instead_of_a_hang() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_sim(wait_for_ever())


def test_timeouts_count_simulated_time() -> None:
    async def impatient() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(60)
        return asyncio.get_running_loop().time()

    assert run_sim(impatient()) == pytest.approx(30)


def test_work_for_threads_runs_inline_and_its_error_reaches_the_awaiter() -> None:
    async def use_threads() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 7)

    assert run_sim(use_threads()) == 7
