"""Versions between real processes, one of which sees another memory file system."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.config_load import load_config
from common.errors import TransportError
from common.identity import new_identity
from common.membership import Membership
from common.mesh import Mesh
from common.messages.coordinator import GetFleet, PublishVersion
from common.service import Runtime, published_coordinator
from common.transport.zmq import ZmqTransport
from tests.support.jobs import make_job
from tests.support.rollouts import publish

BYTES = 24 << 20
RATE = 12 << 20
"""Bytes a second: a whole version takes two seconds."""
PATIENCE_S = 40.0
ELSEWHERE = "mount -t tmpfs tmpfs /dev/shm && exec "
OTHER_HOST = ["unshare", "-m", "sh", "-c"]


def can_unshare() -> bool:
    command = [*OTHER_HOST, f"{ELSEWHERE}true"]
    return shutil.which("unshare") is not None and not subprocess.call(
        command, stderr=subprocess.DEVNULL
    )


pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace"),
]


@dataclass
class Run:
    """A coordinator and two workers as processes; the trainer is the test."""

    directory: Path
    config: Path
    run_id: str = field(default_factory=lambda: f"versions{os.getpid()}")
    processes: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, subprocess.Popen[bytes]]
    )

    def start(self, name: str, *, elsewhere: bool = False) -> None:
        role = name if name == "coordinator" else "rollout"
        command = [sys.executable, "-m", f"services.{role}", "--config", str(self.config)]
        command += ["--name", name, "--run-id", self.run_id, "--run-dir", str(self.directory)]
        command += [f"coordinator.stream_bytes_per_s_max={RATE}"]
        if elsewhere:
            command = [*OTHER_HOST, ELSEWHERE + " ".join(command)]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def events(self, name: str, event: str) -> list[dict[str, int]]:
        lines = (self.directory / f"{name}.log").read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]

    def write(self, version: int, content: bytes) -> str:
        entry = {"dtype": "BF16", "shape": [BYTES // 2], "data_offsets": [0, BYTES]}
        table = json.dumps({"w": entry}).encode()
        path = Path(f"/dev/shm/libra-{self.run_id}-w{version % 3}")
        path.write_bytes(len(table).to_bytes(8, "little") + table + content)
        return str(path)


@pytest.fixture
def run(tmp_path: Path) -> Generator[Run]:
    run = Run(tmp_path, make_job(tmp_path))
    try:
        yield run
    finally:
        for name in list(run.processes):
            run.kill(name)
        for path in Path("/dev/shm").glob(f"libra-{run.run_id}-*"):
            path.unlink()


@contextlib.asynccontextmanager
async def trainer(run: Run) -> AsyncGenerator[Membership]:
    def address() -> str:
        return published_coordinator(run.directory, run.run_id) or "tcp://127.0.0.1:1"

    transport = ZmqTransport(str(new_identity(run.run_id, "trainer", "trainer")))
    async with Mesh(transport) as mesh, asyncio.TaskGroup() as tasks:
        config = load_config(run.config, [])
        runtime = Runtime(config, run.run_id, run.directory, "trainer", "trainer", mesh, address)
        membership = Membership(runtime)
        task = tasks.create_task(membership.run())
        try:
            await membership.joined(timeout_s=PATIENCE_S)
            yield membership
        finally:
            task.cancel()


async def announce(membership: Membership, version: int, segment: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        request = PublishVersion(version=version, segment=segment)
        await publish(membership, request, timeout_s=20)


async def applied(membership: Membership, version: int, *names: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(TransportError):
                fleet = await membership.ask_coordinator(GetFleet(), timeout_s=5)
                if set(names) <= {s.member.name for s in fleet.members if s.version == version}:
                    assert not any(status.quarantined for status in fleet.members)
                    return
            await asyncio.sleep(0.1)


def changed(content: bytes, seed: int) -> bytes:
    dice, new = random.Random(seed), bytearray(content)
    for _ in range(BYTES // 400):
        new[2 * dice.randrange(BYTES // 2)] ^= 1
    return bytes(new)


async def test_a_worker_on_another_host_streams_each_version_through_kills(run: Run) -> None:
    first = random.Random(1).randbytes(BYTES)
    third = random.Random(3).randbytes(BYTES)
    run.start("coordinator")
    run.start("short-0")
    run.start("long-0", elsewhere=True)
    async with trainer(run) as membership:
        # In full, and then as differences.
        await announce(membership, 1, run.write(1, first))
        await applied(membership, 1, "short-0", "long-0")
        await announce(membership, 2, run.write(2, changed(first, 2)))
        await applied(membership, 2, "short-0", "long-0")
        full, delta = run.events("long-0", "version.mirrored")
        assert full["bytes"] >= BYTES
        assert delta["bytes"] < BYTES / 4
        assert run.events("short-0", "version.mirrored") == []

        # The receiver dies in mid-stream: the others go on, the next publish works.
        await announce(membership, 3, run.write(3, third))
        await asyncio.sleep(0.7)
        run.kill("long-0")
        await applied(membership, 3, "short-0")
        run.start("long-0", elsewhere=True)
        await applied(membership, 3, "short-0", "long-0")

        # The coordinator dies in mid-publish: it is told again, and hears who has what.
        segment = run.write(4, changed(third, 4))
        await announce(membership, 4, segment)
        run.kill("coordinator")
        run.start("coordinator")
        await announce(membership, 4, segment)
        await applied(membership, 4, "short-0", "long-0")
