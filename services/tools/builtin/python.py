"""The `python` environment: code that the model wrote, run in the sandbox."""

from typing import ClassVar

from common.config import ToolServerConfig
from services.tools.builtin.arithmetic import ArithmeticEnvironment
from services.tools.sandbox import Sandbox, SandboxResult, SandboxStatus
from services.tools.sdk import ToolFault, ToolTimeout, call_limit_s, tool

RUN_MAX_S = 5.0
"""Wall clock of one run."""
WAIT_SHARE, RUN_SHARE = 0.4, 0.5
"""Of the call's own limit: for a free slot, and for the run. Both end before the call does, so that
a full sandbox is never taken for code that does not end."""
STDOUT_SHOWN_CHARS = 4000


class Python(ArithmeticEnvironment):
    """Questions that a few lines of Python answer."""

    name = "python"
    shots_from = "python"
    sandbox: ClassVar[Sandbox]

    @classmethod
    async def start(cls, server: ToolServerConfig) -> None:
        """Prove the sandbox."""
        cls.sandbox = await Sandbox.open(unsafe=server.unsafe)

    @tool
    async def python(self, code: str) -> str:
        """Run Python code and return what it prints. Nothing is kept between two calls.

        Args:
            code: Complete program; print the result. The standard library is there, no network.
        """
        self.calls += 1
        limit_s = call_limit_s()
        result = await self.sandbox.run_python(
            code,
            timeout_s=min(RUN_MAX_S, limit_s * RUN_SHARE),
            slot_wait_s=limit_s * WAIT_SHARE,
        )
        return shown(result)


def shown(result: SandboxResult) -> str:
    """What the model sees of a run.

    Raises:
        ToolFault: the code failed.
        ToolTimeout: it did not end.
    """
    printed = result.stdout.strip()[:STDOUT_SHOWN_CHARS]
    before = f"\nPrinted before: {printed}" if printed else ""
    match result.status:
        case SandboxStatus.OK:
            return printed
        case SandboxStatus.TIMEOUT:
            raise ToolTimeout(f"the code did not end within {result.wall_s:.1f} s{before}")
        case SandboxStatus.FLOOD:
            raise ToolFault("the code printed far too much and was stopped")
        case SandboxStatus.KILLED:
            raise ToolFault(f"the code crashed (exit code {result.exit_code}){before}")
        case SandboxStatus.FAILED:
            lines = result.stderr.strip().splitlines()
            reason = lines[-1] if lines else f"exit code {result.exit_code}"
            raise ToolFault(f"{reason}{before}")
