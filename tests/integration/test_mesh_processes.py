import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from common.errors import PeerUnreachable
from common.identity import new_identity
from common.mesh import Mesh
from common.transport.zmq import ZmqTransport
from services.cli.bench_mesh import bench_mesh
from services.cli.bench_mesh_peers import turn

LIMIT_S = 20.0


@asynccontextmanager
async def server() -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """A process that answers turns, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli.bench_mesh_peers", "serve", "mesh"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        async with asyncio.timeout(LIMIT_S):
            line = await process.stdout.readline()
        yield process, line.decode().strip().strip('"')
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_is_killed_or_stuck_fails_its_calls(how: signal.Signals) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    async with (
        server() as (process, address),
        Mesh(ZmqTransport(str(new_identity("bench", "test", "caller")))) as mesh,
        asyncio.timeout(LIMIT_S),
    ):
        mesh.on_peer_lost(lambda peer, reason: lost.put_nowait(peer))
        peer = await mesh.connect(address, timeout_s=LIMIT_S)
        assert (await mesh.request(peer, turn(), timeout_s=LIMIT_S)).go_on
        os.kill(process.pid, how)
        if how is signal.SIGKILL:
            assert await lost.get() == peer
            with pytest.raises(PeerUnreachable):
                await mesh.request(peer, turn(), timeout_s=LIMIT_S)
        else:
            with pytest.raises(TimeoutError):
                await mesh.request(peer, turn(), timeout_s=0.2)
            os.kill(process.pid, signal.SIGCONT)
            assert (await mesh.request(peer, turn(), timeout_s=LIMIT_S)).go_on


@pytest.mark.slow
def test_the_mesh_benchmark_measures_every_way_and_checks_its_limits() -> None:
    report = bench_mesh(seconds=0.2)
    assert {check.limit for check in report.checks} == {"<= 2.5", ">= 4", ">= 10"}
    for outstanding in ("outstanding_1", "outstanding_64"):
        for way in ("raw", "transport", "mesh", "asyncio", "grpc"):
            assert report.figures[outstanding][way]["cpu_us_per_call"] > 0
