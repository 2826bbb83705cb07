"""A worker that changes sides, with real processes."""

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from common.errors import LibraError
from common.identity import new_identity
from common.mesh import Mesh
from common.messages.base import Message, Request
from common.messages.coordinator import Fleet, GetFleet, SetSplit, SlotStatus
from common.service import bind_address
from common.transport.zmq import ZmqTransport
from tests.support.jobs import Job, make_job, poll_until, running

SWITCH_S = 60.0
"""Two busy cores; a replica that was killed imports torch again."""


def make_hybrid_job(directory: Path, max_steps: int) -> Path:
    path = make_job(directory, tasks=8000, max_steps=max_steps, engine="torch")
    text = path.read_text().replace('name = "long"\n', 'name = "long"\nhybrid = true\n')
    path.write_text(text + "\n[elastic]\nplanner = false\ndrain_timeout_s = 3.0\n")
    return path


def ask(job: Job, request: Request[Any]) -> Message | None:
    """Ask the coordinator of a running job; None while it does not answer."""
    try:
        entry = json.loads((job.run_dir / "coordinator.json").read_text())
    except (OSError, ValueError):
        return None
    return asyncio.run(_ask(entry["address"], entry["run_id"], request))


async def _ask(address: str, run_id: str, request: Request[Any]) -> Message | None:
    identity = str(new_identity(run_id, "test", "test"))
    async with Mesh(ZmqTransport(identity, bind_address(address, local=True))) as mesh:
        try:
            peer = await mesh.connect(address, timeout_s=2.0)
            return await mesh.request(peer, request, timeout_s=2.0)
        except LibraError:
            return None


def slot_of(job: Job) -> SlotStatus | None:
    fleet = ask(job, GetFleet())
    return fleet.slots[0] if isinstance(fleet, Fleet) else None


def switch(job: Job, train: int) -> None:
    order = SetSplit(train=train, rollout=1 - train, by="operator", hold_s=600.0)
    poll_until(lambda: ask(job, order) is not None, SWITCH_S)


def wait_for_side(job: Job, side: str) -> SlotStatus:
    """Until the slot is active on a side."""
    found: list[SlotStatus] = []

    def reached() -> bool:
        slot = slot_of(job)
        found[:] = [slot] if slot else []
        return slot is not None and (slot.side, slot.phase) == (side, "active")

    job.wait_until(reached, f"the slot is on {side}", SWITCH_S)
    return found[0]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_worker_changes_sides_whoever_is_killed_meanwhile(tmp_path: Path) -> None:
    with running(make_hybrid_job(tmp_path, max_steps=900)) as job:
        job.wait_for_steps(2)
        wait_for_side(job, "rollout")
        switch(job, train=1)
        there = wait_for_side(job, "train")
        assert there.switches == 1
        job.kill("long-0.replica")
        job.wait_until(lambda: changed(job, there), "the slot was lost", SWITCH_S)
        wait_for_side(job, "train")
        switch(job, train=0)
        back = wait_for_side(job, "rollout")
        job.kill("coordinator")
        switch(job, train=1)
        again = wait_for_side(job, "train")
        assert again.fence > back.fence > there.fence
        switch(job, train=0)
        job.kill("long-0")
        wait_for_side(job, "rollout")
        job.wait_for_steps(job.steps() + 2)
        job.process.terminate()
        assert job.wait() in (0, 130), job.output
    groups = trained_groups(job.run_dir)
    assert len(groups) == len(set(groups)) > 0


def changed(job: Job, before: SlotStatus) -> bool:
    slot = slot_of(job)
    return slot is not None and slot.fence > before.fence


def trained_groups(run_dir: Path) -> list[str]:
    """Ids of all groups that some step consumed, as often as one did."""
    with contextlib.closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT group_id FROM groups WHERE step IS NOT NULL").fetchall()
    return [group_id for (group_id,) in rows]
