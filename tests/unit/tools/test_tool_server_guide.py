"""The example of the guide works as it stands there."""

import asyncio
import json
import re
from pathlib import Path

from common.config import ToolServerConfig
from common.messages.tools import CallTool, GradeSession, OpenSession, TranscriptTurn
from common.trajectory import ToolStatus
from services.tools.host import ToolHost
from services.tools.registry import load_target

ROOT = Path(__file__).parent.parent.parent.parent
GUIDE = ROOT / "docs" / "TOOL_SERVERS.md"
README = ROOT / "README.md"


async def test_the_guides_first_server_can_be_loaded_called_and_graded(tmp_path: Path) -> None:
    text = GUIDE.read_text()
    example, row = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in LANGUAGES)
    assert example in README.read_text()
    target = tmp_path / "capitals.py"
    target.write_text(example)
    assert len([line for line in example.splitlines() if line.strip()]) <= 22
    server = ToolServerConfig(name="capitals", target=str(target))
    async with asyncio.TaskGroup() as tasks:
        host = ToolHost(server, load_target(server.target), tasks)
        task = json.loads(row)
        opening = OpenSession(session_id="s", environment=task["environment"], task=row, ttl_s=60.0)
        assert (await host.open_session("w", opening)).messages[0].content == task["question"]
        statuses = [(await host.call_tool("w", call(country))).status for country in COUNTRIES]
        assert statuses == [ToolStatus.OK, ToolStatus.ERROR]
        turns = [TranscriptTurn(action="It is Paris.", observation="")]
        grade = GradeSession(session_id="s", turns=turns, stop_reason="answered", timeout_s=5.0)
        assert (await host.grade_session("w", grade)).reward == 1.0


LANGUAGES = ("python", "json")
COUNTRIES = ("France", "Atlantis")


def call(country: str) -> CallTool:
    return CallTool(
        session_id="s",
        call_id=country,
        tool="capital_of",
        arguments=json.dumps({"country": country}),
        timeout_s=5.0,
    )
