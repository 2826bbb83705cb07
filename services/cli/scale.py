"""`libra scale`: how many hybrid slots train, by hand; and where they stand until it is so."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
from rich.console import Console

from common.config import Config
from common.config_load import load_config
from common.errors import (
    ConfigError,
    LibraError,
    Refusal,
    RequestRefused,
    RunFailed,
    TransportError,
)
from common.identity import new_identity
from common.mesh import Mesh
from common.messages.coordinator import GetFleet, SetSplit, SlotStatus
from common.service import COORDINATOR_FILE, bind_address, published_coordinator
from common.transport.zmq import ZmqTransport
from services.cli.progress import describe_slot
from services.cli.why import find_run

CONNECT_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 5.0
LOOK_S = 0.25
"""Between two looks at the slots."""
SILENCE_S = 15.0
"""A coordinator that is restarted answers again by then."""
SIDES = ("train", "rollout")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A split as it was asked for."""

    train: int
    rollout: int
    hold_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """A run that is going on."""

    directory: Path
    config: Config
    address: str
    run_id: str


def scale(run: Path | None, wanted: Wanted | None, *, as_json: bool) -> None:
    """Ask for a split and show the slots until it holds; without one, show where they stand.

    Raises:
        ConfigError: no such run, or the split is none of this run's; says what is.
        RunFailed: the run does not answer, or the split does not hold in time.
    """
    place = find_place(run)
    check(place.config, wanted)
    console = Console(highlight=False, quiet=as_json)
    slots, took_s = uvloop.run(_scale(place, wanted, console))
    if as_json:
        print(json.dumps(summary(place, wanted, slots, took_s)))
    elif wanted is None:
        for slot in slots:
            console.print(describe_slot(slot), markup=False)
    done = wanted is None or holds(slots, wanted.train)
    if not done:
        assert wanted is not None
        raise RunFailed(
            f"the split did not hold within {wanted.timeout_s:g} s; the coordinator goes on with "
            f"it: {', '.join(map(describe_slot, slots))}"
        )


def find_place(run: Path | None) -> Place:
    """The run's coordinator, by what it has written.

    Raises:
        ConfigError: there is no such run, or it never began.
    """
    directory = find_run(run)
    try:
        entry = cast("dict[str, Any]", json.loads((directory / COORDINATOR_FILE).read_text()))
        address, run_id = str(entry["address"]), str(entry["run_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{directory}: no coordinator has listened there ({error})") from error
    return Place(directory, load_config(directory / "config.toml", []), address, run_id)


def check(config: Config, wanted: Wanted | None) -> None:
    """Refuse what the run's coordinator would refuse, with what would do.

    Raises:
        ConfigError: no hybrid slots, or not so many.
    """
    total = sum(bucket.workers for bucket in config.buckets if bucket.hybrid)
    if not total:
        raise ConfigError("no bucket of this run has hybrid = true, so there is nothing to scale")
    if wanted is None:
        return
    if min(wanted.train, wanted.rollout) < 0 or wanted.train + wanted.rollout != total:
        raise ConfigError(
            f"--train {wanted.train} --rollout {wanted.rollout}: the run has {total} hybrid "
            f"{'slot' if total == 1 else 'slots'}; the two numbers must add up to {total}"
        )
    if not wanted.rollout and all(bucket.hybrid for bucket in config.buckets):
        raise ConfigError(
            "--rollout 0: every rollout worker of this run is in a hybrid slot, and nobody would "
            "roll out; leave one"
        )


async def _scale(
    place: Place, wanted: Wanted | None, console: Console
) -> tuple[list[SlotStatus], float]:
    identity = str(new_identity(place.run_id, "cli", "scale"))
    bind = bind_address(place.address, local=True)
    async with Mesh(ZmqTransport(identity, bind)) as mesh:
        try:
            return await _watch(_Run(mesh, place), wanted, console)
        except LibraError as error:
            failure = error
    raise failure  # Not in the block above, which would make a group of it.


async def _watch(
    run: "_Run", wanted: Wanted | None, console: Console
) -> tuple[list[SlotStatus], float]:
    """Order the split and look at the slots until it holds or its time is over."""
    if wanted is None:
        return await run.slots(), 0.0
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await run.order(wanted)
    shown: list[tuple[str, str]] = []
    while True:
        slots = await run.slots()
        took_s = loop.time() - began_s
        stand = [(slot.side, slot.phase) for slot in slots]
        if stand != shown:
            line = "  ".join(map(describe_slot, slots))
            console.print(f"{took_s:6.1f} s  {line}", markup=False, soft_wrap=True)
            shown = stand
        if holds(slots, wanted.train) or took_s > wanted.timeout_s:
            return slots, took_s
        await asyncio.sleep(LOOK_S)


class _Run:
    """The coordinator of a run, which may be started again in between."""

    def __init__(self, mesh: Mesh, place: Place) -> None:
        self._mesh, self._place = mesh, place

    async def order(self, wanted: Wanted) -> None:
        request = SetSplit(
            train=wanted.train, rollout=wanted.rollout, by="operator", hold_s=wanted.hold_s
        )
        try:
            peer = await self._connect()
            await self._mesh.request(peer, request, timeout_s=ASK_TIMEOUT_S)
        except RequestRefused as error:
            kind = ConfigError if error.refusal is Refusal.INVALID else RunFailed
            raise kind(f"the coordinator refuses the split: {error}") from error
        except TransportError as error:
            raise self._silent(error) from error

    async def slots(self) -> list[SlotStatus]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SILENCE_S
        while True:
            try:
                peer = await self._connect()
                fleet = await self._mesh.request(peer, GetFleet(), timeout_s=ASK_TIMEOUT_S)
            except (TransportError, RequestRefused) as error:
                if loop.time() > until_s:
                    raise self._silent(error) from error
                await asyncio.sleep(LOOK_S)
            else:
                return fleet.slots

    async def _connect(self) -> str:
        place = self._place
        address = published_coordinator(place.directory, place.run_id) or place.address
        return await self._mesh.connect(address, timeout_s=CONNECT_TIMEOUT_S)

    def _silent(self, error: Exception) -> RunFailed:
        return RunFailed(
            f"{self._place.directory}: its coordinator does not answer ({error}); is the run "
            "still going on?"
        )


def holds(slots: list[SlotStatus], train: int) -> bool:
    """Whether every slot is active on its side, and as many train as are wanted."""
    active = all(slot.phase == "active" for slot in slots)
    return bool(slots) and active and sum(slot.side == "train" for slot in slots) == train


def summary(
    place: Place, wanted: Wanted | None, slots: list[SlotStatus], took_s: float
) -> dict[str, Any]:
    """The same for programs."""
    counts = {side: sum(slot.side == side for slot in slots) for side in SIDES}
    told: dict[str, Any] = {"run": str(place.directory), **counts}
    if wanted is not None:
        told |= {
            "wanted": {"train": wanted.train, "rollout": wanted.rollout},
            "done": holds(slots, wanted.train),
            "took_s": round(took_s, 3),
        }
    return told | {"slots": [slot.model_dump() for slot in slots]}
