"""Replica processes for `bench_replicas`, and the little of a coordinator that they need."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.errors import PeerUnreachable, Refusal, RequestRefused, RunFailed
from common.logs import last_lines
from common.mesh import Mesh
from common.messages.coordinator import (
    Heartbeat,
    HeartbeatAck,
    Leave,
    Left,
    Manifest,
    Member,
    Register,
    Registered,
)
from common.messages.rollout import ApplyVersion
from common.messages.slots import TakeSlot, YieldSlot
from common.toml_write import to_toml
from common.weights import NO_VERSION
from services.cli.plan import common_environment
from services.cli.rundir import sweep

RUN = "bench-replicas"
LEASE_S = 3.0
START_S = 90.0
"""A Python process that imports torch, on a busy core."""
ORDER_S = 20.0
DRAIN_S = 2.0
LOOK_S = 0.02
STOP_S = 10.0
LOG_LINES = 12


@dataclass(slots=True)
class Process:
    """One replica."""

    running: subprocess.Popen[bytes]
    awake: bool = False
    stalled: bool = False


class Stage:
    """Starts, orders, stalls and kills replicas."""

    def __init__(self, config: Config, run_dir: Path, mesh: Mesh) -> None:
        self._run_dir, self._mesh = run_dir, mesh
        (run_dir / "config.toml").write_text(to_toml(config))
        self._fences: dict[str, int] = {}
        self._members: dict[str, Member] = {}
        """Registered, by slot."""
        self.replicas: dict[str, Process] = {}
        mesh.serve(Register, self._register)
        mesh.serve(Heartbeat, self._heartbeat)
        mesh.serve(Leave, self._leave)

    def start(self, slot: str) -> None:
        """Start a replica; it sleeps until it takes its slot."""
        self._members.pop(slot, None)
        config = str(self._run_dir / "config.toml")
        command = [
            *(sys.executable, "-m", "services.trainer.replica_main"),
            *("--config", config, "--name", slot, "--run-dir", str(self._run_dir)),
            *("--run-id", RUN, "--parent", str(os.getpid())),
        ]
        environment = common_environment(os.environ, self._run_dir) | {"OMP_NUM_THREADS": "1"}
        with self._log(slot).open("ab") as output:
            running = subprocess.Popen(  # noqa: S603  (our own module)
                command, stdout=output, stderr=output, env=environment
            )
        self.replicas[slot] = Process(running)

    def ready(self, slot: str) -> bool:
        """Whether a replica has loaded its model and registered."""
        return slot in self._members

    async def until_ready(self, slot: str) -> None:
        """Wait for it.

        Raises:
            RunFailed: it ended, or was not ready in time.
        """
        try:
            async with asyncio.timeout(START_S):
                while not self.ready(slot):
                    await asyncio.sleep(LOOK_S)
                    if self.replicas[slot].running.poll() is not None:
                        raise RunFailed(f"replica {slot} ended:\n{self._tail(slot)}")
        except TimeoutError as error:
            raise RunFailed(f"replica {slot} was not ready:\n{self._tail(slot)}") from error

    async def take(self, slot: str) -> None:
        """Wake it up."""
        self._fences[slot] = self._fences.get(slot, 0) + 1
        order = TakeSlot(fence=self._fences[slot])
        await self._mesh.request(await self._peer(slot), order, timeout_s=ORDER_S)
        self.replicas[slot].awake = True

    async def yield_slot(self, slot: str) -> None:
        """Send it to sleep, with or without something at work."""
        self._fences[slot] += 1
        order = YieldSlot(fence=self._fences[slot], deadline_s=DRAIN_S)
        await self._mesh.request(await self._peer(slot), order, timeout_s=ORDER_S)
        self.replicas[slot].awake = False

    async def apply(self, slot: str, manifest: Manifest) -> None:
        """Have it take a version."""
        order = ApplyVersion(manifest=manifest)
        await self._mesh.request(await self._peer(slot), order, timeout_s=ORDER_S)

    def stall(self, slot: str) -> None:
        """It says and does nothing until `go_on`."""
        self.replicas[slot].running.send_signal(signal.SIGSTOP)
        self.replicas[slot].stalled = True

    def go_on(self, slot: str) -> None:
        """Undo `stall`."""
        self.replicas[slot].running.send_signal(signal.SIGCONT)
        self.replicas[slot].stalled = False

    def kill(self, slot: str) -> str:
        """End it without a word, and return who it was on the mesh."""
        process = self.replicas.pop(slot)
        process.running.kill()
        process.running.wait(STOP_S)
        member = self._members.pop(slot)
        self._mesh.disconnect(member.peer)
        return member.peer

    def stop(self) -> None:
        """End all of them, and remove what those that were killed left in memory."""
        for slot, process in self.replicas.items():
            if process.stalled:
                self.go_on(slot)
            process.running.terminate()
        for process in self.replicas.values():
            try:
                process.running.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.running.kill()
                process.running.wait(STOP_S)
        sweep(RUN)

    async def _peer(self, slot: str) -> str:
        member = self._members[slot]
        peer = await self._mesh.connect(member.address, timeout_s=ORDER_S)
        if peer != member.peer:
            raise PeerUnreachable(member.peer, f"{peer!r} answers at its address")
        return peer

    def _register(self, sender: str, request: Register) -> Registered:
        self._members[request.member.name] = request.member
        trainer = Member(
            peer=self._mesh.identity, role="trainer", name="trainer", address=self._mesh.address
        )
        return Registered(lease_s=LEASE_S, number=0, members=[trainer], version=NO_VERSION)

    def _heartbeat(self, sender: str, _beat: Heartbeat) -> HeartbeatAck:
        if sender not in {member.peer for member in self._members.values()}:
            raise RequestRefused(Refusal.NOT_FOUND)
        return HeartbeatAck(number=0, updates=[], version=NO_VERSION)

    def _leave(self, _sender: str, _request: Leave) -> Left:
        return Left()

    def _log(self, slot: str) -> Path:
        return self._run_dir / f"{slot}.log"

    def _tail(self, slot: str) -> str:
        return "\n".join(last_lines(self._log(slot), LOG_LINES))
