"""A session that is gone is not opened afresh for a trajectory that has moved."""

import asyncio
from typing import Any

import pytest

from common.clock import run_sim
from common.config import ToolServerConfig
from common.errors import Refusal, RequestRefused
from common.messages.tools import OpenSession
from services.tools.host import ToolHost
from services.tools.registry import Offer
from services.tools.sdk import Environment


class Echo(Environment):
    """Says the task back."""

    name = "echo"

    def reset(self, task: dict[str, Any]) -> str:
        return str(task["question"])

    def grade(self, trajectory: Any) -> float:
        return 1.0


def opening(session_id: str, *, resume: bool) -> OpenSession:
    return OpenSession(
        session_id=session_id,
        environment="echo",
        task='{"question": "hello"}',
        ttl_s=60,
        resume=resume,
    )


def test_resuming_finds_an_open_session_and_refuses_a_lost_one() -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            offer = Offer(environments={"echo": Echo})
            host = ToolHost(ToolServerConfig(name="echo", target="x"), offer, tasks)
            with pytest.raises(RequestRefused) as caught:
                await host.open_session("worker", opening("s", resume=True))
            assert caught.value.refusal is Refusal.NOT_FOUND
            first = await host.open_session("worker", opening("s", resume=False))
            assert await host.open_session("worker", opening("s", resume=True)) == first

    run_sim(scenario())
