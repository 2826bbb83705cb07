"""`libra scale` against a coordinator that listens on a real socket."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.config import BucketConfig, ModelConfig
from common.errors import ConfigError, Refusal, RequestRefused, RunFailed
from common.identity import new_identity
from common.mesh import Mesh
from common.messages.coordinator import Fleet, GetFleet, SetSplit, SlotStatus, SplitSet
from common.toml_write import to_toml
from common.transport.zmq import ZmqTransport
from services.cli.scale import Wanted, scale
from tests.support.sim import sim_config

LOOKS = 3
"""After so many looks a slot has changed sides."""


@dataclass
class FakeCoordinator:
    """Two slots that change sides while they are looked at, or never do."""

    moves: bool = True
    refusal: Refusal | None = None
    orders: list[SetSplit] = field(default_factory=list)
    looks: int = 0

    def set_split(self, _sender: str, request: SetSplit) -> SplitSet:
        if self.refusal:
            raise RequestRefused(self.refusal, "not now")
        self.orders.append(request)
        return SplitSet(train=request.train, rollout=request.rollout)

    def fleet(self, _sender: str, _request: GetFleet) -> Fleet:
        self.looks += 1
        train = self.orders[-1].train if self.orders else 0
        there = not self.orders or (self.moves and self.looks >= LOOKS)
        slots = [self._slot(n, train=n < train, there=there) for n in range(2)]
        return Fleet(members=[], version=0, versions_published=1, slots=slots)

    def _slot(self, number: int, *, train: bool, there: bool) -> SlotStatus:
        return SlotStatus(
            slot=f"flex-{number}",
            side="train" if train else "rollout",
            phase="active" if there or not train else "loading",
            phase_s=1.0,
            fence=2,
            switches=1,
            drain_s=0.1,
            release_s=0.1,
            load_s=0.1,
        )

    async def serve(self, run_dir: Path, ready: threading.Event, over: threading.Event) -> None:
        transport = ZmqTransport(
            str(new_identity("scaled", "coordinator", "coordinator")), "tcp://127.0.0.1:0"
        )
        async with Mesh(transport) as mesh:
            mesh.serve(SetSplit, self.set_split)
            mesh.serve(GetFleet, self.fleet)
            entry = {"address": mesh.address, "run_id": "scaled", "pid": 1}
            (run_dir / "coordinator.json").write_text(json.dumps(entry))
            ready.set()
            await asyncio.to_thread(over.wait, 60)


def make_run(directory: Path) -> None:
    config = sim_config(
        model=ModelConfig(path="m", context_tokens=4096),
        buckets=[BucketConfig(name="short"), BucketConfig(name="flex", workers=2, hybrid=True)],
    )
    (directory / "config.toml").write_text(to_toml(config))
    (directory / "ledger.sqlite").touch()


@contextlib.contextmanager
def listening(directory: Path, coordinator: FakeCoordinator) -> Generator[FakeCoordinator]:
    make_run(directory)
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(coordinator.serve(directory, ready, over)), daemon=True
    )
    thread.start()
    assert ready.wait(10)
    try:
        yield coordinator
    finally:
        over.set()
        thread.join(10)


def test_the_split_is_ordered_and_shown_until_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(tmp_path, FakeCoordinator()) as coordinator:
        scale(tmp_path, Wanted(1, 1, hold_s=30.0, timeout_s=20.0), as_json=False)
    (order,) = coordinator.orders
    assert (order.train, order.rollout, order.by, order.hold_s) == (1, 1, "operator", 30.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("flex-0 train (loading 1 s)  flex-1 rollout")
    assert lines[-1].endswith("flex-0 train  flex-1 rollout")


def test_json_is_one_line_that_says_whether_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(tmp_path, FakeCoordinator()):
        scale(tmp_path, Wanted(2, 0, hold_s=0.0, timeout_s=20.0), as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["done"]
    assert (told["train"], told["rollout"]) == (2, 0)


def test_without_numbers_it_only_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(tmp_path, FakeCoordinator()) as coordinator:
        scale(tmp_path, None, as_json=False)
    assert not coordinator.orders
    assert capsys.readouterr().out.splitlines() == ["flex-0 rollout", "flex-1 rollout"]


def test_a_split_that_does_not_hold_in_time_is_a_failure_that_names_the_slots(
    tmp_path: Path,
) -> None:
    with (
        listening(tmp_path, FakeCoordinator(moves=False)),
        pytest.raises(RunFailed, match=r"within 0\.1 s; .* flex-0 train \(loading 1 s\)"),
    ):
        scale(tmp_path, Wanted(1, 1, hold_s=0.0, timeout_s=0.1), as_json=True)


def test_what_the_coordinator_refuses_is_said(tmp_path: Path) -> None:
    with (
        listening(tmp_path, FakeCoordinator(refusal=Refusal.INVALID)),
        pytest.raises(ConfigError, match=r"refuses the split: .*not now"),
    ):
        scale(tmp_path, Wanted(1, 1, hold_s=0.0, timeout_s=1.0), as_json=True)


def test_a_run_that_has_ended_is_said_to_be_silent(tmp_path: Path) -> None:
    make_run(tmp_path)
    entry = {"address": "tcp://127.0.0.1:1", "run_id": "scaled", "pid": 1}
    (tmp_path / "coordinator.json").write_text(json.dumps(entry))
    with pytest.raises(RunFailed, match=r"does not answer .* is the run still going on"):
        scale(tmp_path, Wanted(1, 1, hold_s=0.0, timeout_s=1.0), as_json=True)
