"""The tool server as a process of the mesh: hosts what one target offers until asked to stop."""

import asyncio
import faulthandler

import structlog

from common.config import ToolServerConfig
from common.errors import ConfigError, RunFailed
from common.membership import Membership
from common.messages.tools import CallTool, CloseSession, DescribeServer, GradeSession, OpenSession
from common.service import Runtime
from services.tools.host import STUCK_MAX, ToolHost
from services.tools.registry import load_target

log = structlog.get_logger()

TICK_S = 0.5
"""How often sessions are reaped and stuck threads are counted."""
DRAIN_S = 4.0
"""For the calls that run when the server is asked to stop; within the launcher's patience."""
LOOP_BLOCKED_MAX_S = 30.0
"""Foreign code that blocks the event loop for so long has no other end than the process's."""


class ToolsService:
    """One tool server."""

    def __init__(self, runtime: Runtime, *, guarded: bool = False) -> None:
        """Take the server of the configuration that has this process's name.

        Args:
            runtime: the process.
            guarded: end the process when its event loop is blocked for `LOOP_BLOCKED_MAX_S`.

        Raises:
            ConfigError: no such server, or its target cannot be loaded.
        """
        self._runtime = runtime
        self._guarded = guarded
        self._server = _server_of(runtime)
        self._offer = load_target(self._server.target)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until asked to stop, then let the running calls end."""
        for environment in self._offer.environments.values():
            await environment.start(self._server)
        membership = Membership(
            self._runtime, {"environments": ",".join(sorted(self._offer.environments))}
        )
        async with asyncio.TaskGroup() as tasks:
            host = ToolHost(self._server, self._offer, tasks)
            self._serve(host)
            member = tasks.create_task(membership.run(), name="tools.membership")
            ticks = tasks.create_task(self._tick(host, membership), name="tools.tick")
            await stopping.wait()
            await _drain(host)
            member.cancel()
            ticks.cancel()

    def _serve(self, host: ToolHost) -> None:
        mesh = self._runtime.mesh
        mesh.serve(DescribeServer, host.describe)
        mesh.serve(OpenSession, host.open_session)
        mesh.serve(CallTool, host.call_tool)
        mesh.serve(GradeSession, host.grade_session)
        mesh.serve(CloseSession, host.close_session)

    async def _tick(self, host: ToolHost, membership: Membership) -> None:
        try:
            while True:
                if self._guarded:
                    # A C thread: it also sees a function that holds the GIL and never returns.
                    faulthandler.dump_traceback_later(LOOP_BLOCKED_MAX_S, exit=True)
                host.reap()
                membership.busy_s = host.busy_s
                if host.stuck > STUCK_MAX:
                    raise RunFailed(
                        f"tool server {self._server.name!r}: {host.stuck} calls never returned and"
                        " each holds a thread; run code that may hang in the sandbox"
                        " (services.tools.sandbox)"
                    )
                await asyncio.sleep(TICK_S)
        finally:
            if self._guarded:
                faulthandler.cancel_dump_traceback_later()


def _server_of(runtime: Runtime) -> ToolServerConfig:
    for server in runtime.config.tools:
        if server.name == runtime.name:
            return server
    known = ", ".join(server.name for server in runtime.config.tools)
    raise ConfigError(f"there is no tool server {runtime.name!r}; the configuration has: {known}")


async def _drain(host: ToolHost) -> None:
    host.draining = True
    try:
        async with asyncio.timeout(DRAIN_S):
            await host.idle()
    except TimeoutError:
        log.warning("calls.abandoned", reason="draining")
