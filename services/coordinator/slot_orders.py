"""Carries the orders of hybrid slots to their tenants, and their answers back."""

import asyncio
import json
from collections.abc import Callable
from math import inf
from pathlib import Path

import structlog

from common.config import Config
from common.errors import PeerUnreachable, Refusal, RequestRefused, TransportError
from common.mesh import Mesh
from common.messages.coordinator import SetSplit, SlotStatus, SplitSet
from common.messages.slots import TakeSlot, YieldSlot
from common.service import Runtime
from services.coordinator.members import Entry, Members
from services.coordinator.slot_split import next_wanted
from services.coordinator.slot_state import (
    Answered,
    Event,
    Evict,
    Heard,
    Limits,
    Passed,
    Refused,
    Side,
    SlotState,
    Switched,
    Tell,
    Unanswered,
    Wanted,
    new_slot,
)
from services.coordinator.slots import advance

log = structlog.get_logger()

SIDES = {"rollout": Side.ROLLOUT, "replica": Side.TRAIN}
"""By the role of the tenant's process."""
CONNECT_TIMEOUT_S = 2.0
ORDER_LEASES = 2.0
"""An order that takes longer is asked about again: the tenant goes on with it meanwhile."""
SPLIT_FILE = "split.json"


class SlotOrders:
    """All hybrid slots of a run. `look` is called at every tick of the coordinator."""

    def __init__(
        self,
        runtime: Runtime,
        members: Members,
        newest: Callable[[], int],
        evict: Callable[[str, str], None],
        wake: asyncio.Event,
    ) -> None:
        config = runtime.config
        self._mesh: Mesh = runtime.mesh
        self._members, self._newest, self._evict = members, newest, evict
        self._wake = wake
        self._lease_s = config.coordinator.lease_s
        self._limits = Limits(
            lease_s=config.coordinator.lease_s,
            drain_s=config.elastic.drain_timeout_s,
            load_s=config.rollout.start_timeout_s + config.coordinator.apply_timeout_s,
        )
        self._others_roll_out = any(not bucket.hybrid for bucket in config.buckets)
        self._names = hybrid_workers(config)
        self._slots: dict[str, SlotState] = {}
        self._train = config.elastic.train_slots
        self._split = _SplitFile(runtime.run_dir / SPLIT_FILE, runtime.run_id)
        self._held_until_s = -inf
        self._tasks: asyncio.TaskGroup | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def look(self, tasks: asyncio.TaskGroup, now: float) -> None:
        """Take in what members say of themselves, and do what follows."""
        if not self._names:
            return
        if not self._slots:
            self._begin(now)
        self._tasks = tasks
        for entry in list(self._members.entries.values()):  # An eviction takes one away.
            slot = entry.member.labels.get("slot", "")
            side = SIDES.get(entry.member.role)
            if slot in self._slots and side is not None:
                self._happened(slot, _heard(side, entry))
        for slot in self._names:
            self._happened(slot, Passed(self._newest()))
        for slot, side in next_wanted(self._slots, self._train, now, self._limits).items():
            self._happened(slot, Wanted(side))

    def set_split(self, sender: str, request: SetSplit) -> SplitSet:
        """Work towards another split."""
        now = asyncio.get_running_loop().time()
        if request.train < 0 or request.train + request.rollout != len(self._names):
            detail = f"{request.train} + {request.rollout} are not the {len(self._names)} slots"
            raise RequestRefused(Refusal.INVALID, detail)
        if not request.rollout and not self._others_roll_out:
            raise RequestRefused(Refusal.INVALID, "nobody would roll out any more")
        if request.by == "planner" and now < self._held_until_s and request.train != self._train:
            raise RequestRefused(Refusal.STALE_FENCE, "an operator's order holds")
        if request.by == "operator":
            self._held_until_s = now + request.hold_s
        if request.train != self._train:
            log.info("split.set", train=request.train, by=request.by, peer=sender)
        self._train = request.train
        self._split.write(self._train)
        self._wake.set()
        return SplitSet(train=request.train, rollout=request.rollout)

    def is_evicted(self, peer: str, *, awake: bool) -> bool:
        """Whether a process is answered no more, until it says that it has yielded."""
        return awake and any(slot.evicted == peer for slot in self._slots.values())

    def close(self) -> None:
        """Wait for no answer any more."""
        for task in self._telling:
            task.cancel()

    def status(self, now: float) -> list[SlotStatus]:
        """Where each slot stands."""
        return [
            SlotStatus(
                slot=slot.name,
                side=slot.side.value,
                phase=slot.phase.value,
                phase_s=now - slot.since_s,
                fence=slot.fence,
                switches=slot.switches,
                drain_s=slot.times.drain_s,
                release_s=slot.times.release_s,
                load_s=slot.times.load_s,
            )
            for slot in self._slots.values()
        ]

    def _begin(self, now: float) -> None:
        """Nobody holds a slot of a run that begins; after a restart somebody may."""
        written = self._split.read()
        if written is not None and 0 <= written <= len(self._names):
            self._train = written
        began_s = -inf if written is None else now
        self._slots = {name: new_slot(name, began_s) for name in self._names}
        self._split.write(self._train)

    def _happened(self, slot: str, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        state, commands = advance(self._slots[slot], event, now, self._limits)
        self._slots[slot] = state
        for command in commands:
            match command:
                case Tell():
                    self._begin_telling(slot, command)
                case Evict(peer):
                    log.warning("slot.evicted", slot=slot, peer=peer, fence=state.fence)
                    self._evict(peer, "slot_not_yielded")
                case Switched(side, fence, times):
                    log.info(
                        "slot.switched",
                        slot=slot,
                        side=side.value,
                        fence=fence,
                        drain_s=times.drain_s,
                        release_s=times.release_s,
                        load_s=times.load_s,
                    )

    def _begin_telling(self, slot: str, order: Tell) -> None:
        assert self._tasks is not None
        task = self._tasks.create_task(self._tell(slot, order), name=f"order of {slot}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, slot: str, order: Tell) -> None:
        try:
            event = await self._ask(order)
        except RequestRefused as error:
            stale = error.refusal is Refusal.STALE_FENCE
            event = Refused(order.fence) if stale else Unanswered(order.fence)
        except TransportError:
            event = Unanswered(order.fence)
        self._happened(slot, event)
        self._wake.set()

    async def _ask(self, order: Tell) -> Event:
        """Send one order.

        Raises:
            TransportError: no answer.
            RequestRefused: it is stale, or the tenant is not ready.
        """
        entry = self._members.entries.get(order.peer)
        if entry is None:
            raise PeerUnreachable(order.peer, "no member at the moment")
        answered = await self._mesh.connect(entry.member.address, timeout_s=CONNECT_TIMEOUT_S)
        if answered != order.peer:
            raise PeerUnreachable(order.peer, f"{answered!r} answers at its address")
        timeout_s = ORDER_LEASES * self._lease_s
        if order.take:
            take = TakeSlot(fence=order.fence)
            taken = await self._mesh.request(order.peer, take, timeout_s=timeout_s)
            return Answered(order.side, order.peer, taken.fence, take=True)
        leave = YieldSlot(fence=order.fence, deadline_s=order.deadline_s)
        left = await self._mesh.request(order.peer, leave, timeout_s=timeout_s)
        return Answered(
            order.side,
            order.peer,
            left.fence,
            take=False,
            drain_s=left.drain_s,
            release_s=left.release_s,
        )


def hybrid_workers(config: Config) -> list[str]:
    """Names of all hybrid slots: those of the rollout workers."""
    return [
        f"{bucket.name}-{index}"
        for bucket in config.buckets
        if bucket.hybrid
        for index in range(bucket.workers)
    ]


def _heard(side: Side, entry: Entry) -> Heard:
    return Heard(
        side, entry.member.peer, entry.fence, entry.awake, entry.version, heard_s=entry.heard_s
    )


class _SplitFile:
    """The split that was asked for last, for a coordinator that is started again."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id

    def read(self) -> int | None:
        """How many slots were to train; None when the run has no such file."""
        try:
            entry = json.loads(self._path.read_text())
            return int(entry["train"]) if entry["run_id"] == self._run_id else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, train: int) -> None:
        """Replace the file."""
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps({"train": train, "run_id": self._run_id}))
        draft.replace(self._path)
