"""Replicas and the core's side on the simulated network: whatever is lost, each micro-batch counts.

Torch runs inline, in no virtual time; so what a micro-batch takes is slept.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.clock import run_sim
from common.config import Config
from common.digests import hash_pieces
from common.errors import RequestRefused, TransportError
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
from common.messages.trainer import PackData, ReturnGradient, WorkOffer
from common.stream import CHUNK_BYTES, StreamServer
from common.transport.sim import Faults, SimNetwork
from common.transport.sim_stream import SimStreamNetwork
from services.trainer.crew import Crew
from services.trainer.gradients import StreamedGradients
from services.trainer.leases import Own, Wait
from services.trainer.pieces import Totals
from services.trainer.replica import Replica
from services.trainer.replica_engine import Computed, ReplicaEngine
from services.trainer.rounds import Sum
from services.trainer.step import Learner
from tests.support.models import make_tiny_model, write_segment
from tests.support.sim import process, seeds, until
from tests.support.trainer import sequences, tiny_policy, trainer_config

PACK_S = 0.4
ORDER_S = 5.0
STEPS = 4


@dataclass
class Slow:
    """How a replica behaves."""

    pack_s: float = PACK_S
    lie: Callable[[Computed], Computed] = lambda computed: computed
    finished: int = 0


class SlowEngine(ReplicaEngine):
    """The real one, which takes virtual time and may lie."""

    def __init__(self, config: Config, stem: Path, manner: Slow, server: StreamServer) -> None:
        super().__init__(config, stem, server)
        self.manner = manner

    async def accumulate(self, offer: WorkOffer, pack: PackData) -> None:
        await asyncio.sleep(self.manner.pack_s)
        await super().accumulate(offer, pack)

    async def finish(self) -> Computed:
        self.manner.finished += 1
        return self.manner.lie(await super().finish())


@dataclass
class Coordinator:
    """Answers members, and gives the orders of the story. The trainer shares its mesh."""

    mesh: Mesh
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    fence: int = 0

    def serve(self) -> None:
        self.mesh.serve(Register, self.register)
        self.mesh.serve(Heartbeat, lambda *_: HeartbeatAck(number=0, updates=[], version=-1))
        self.mesh.serve(Leave, lambda *_: Left())

    def register(self, _sender: str, request: Register) -> Registered:
        self.members[request.member.name] = request.member
        trainer = Member(
            peer=self.mesh.identity, role="trainer", name="trainer", address=self.mesh.address
        )
        return Registered(lease_s=3.0, number=0, members=[trainer], version=-1)

    async def order(self, slot: str, request: Any) -> bool:
        """Whether it was answered, after a few tries."""
        member = self.members[slot]
        for _ in range(5):
            with contextlib.suppress(TransportError, RequestRefused):
                peer = await self.mesh.connect(member.address, timeout_s=ORDER_S)
                await self.mesh.request(peer, request, timeout_s=ORDER_S)
                return True
        return False

    async def take(self, slot: str) -> bool:
        self.fence += 1
        return await self.order(slot, TakeSlot(fence=self.fence))

    async def yield_slot(self, slot: str, deadline_s: float = 2.0) -> bool:
        self.fence += 1
        return await self.order(slot, YieldSlot(fence=self.fence, deadline_s=deadline_s))


@dataclass
class Job:
    """One core and its replicas."""

    network: SimNetwork
    config: Config
    directory: Path
    coordinator: Coordinator
    crew: Crew
    core: Learner
    alone: Learner
    tasks: asyncio.TaskGroup
    streams: SimStreamNetwork
    running: "dict[str, asyncio.Task[None]]" = field(
        default_factory=dict[str, "asyncio.Task[None]"]
    )
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    waited_s: list[float] = field(default_factory=list[float])

    async def start(self, slot: str, manner: Slow | None = None, incarnation: int = 1) -> None:
        self.running[slot] = self.tasks.create_task(
            self.run_replica(slot, manner or Slow(), incarnation), name=slot
        )
        await until(lambda: slot in self.coordinator.members)

    async def join(self, slot: str, manner: Slow | None = None) -> Slow:
        """One more replica, which has taken its slot."""
        manner = manner or Slow()
        await self.start(slot, manner)
        assert await self.coordinator.take(slot)
        return manner

    async def run_replica(self, slot: str, manner: Slow, incarnation: int) -> None:
        stem = self.directory / f"g-{slot}-{incarnation}"
        async with (
            self.streams.server(f"stream://{slot}") as server,
            process(
                self.network, "replica", slot, config=self.config, incarnation=incarnation
            ) as runtime,
        ):
            engine = SlowEngine(self.config, stem, manner, server)
            try:
                await Replica(runtime, engine).run(self.stopping)
            finally:
                engine.close()

    def kill(self, slot: str) -> str:
        peer = self.coordinator.members.pop(slot).peer
        self.network.kill(peer)
        self.running.pop(slot).cancel()
        return peer

    def publish(self, step: int) -> Manifest:
        state = dict(self.core.policy.model.state_dict())
        state.pop("lm_head.weight", None)  # Tied.
        return write_segment(self.directory / f"v{step}", state, step)

    async def step(self, number: int) -> None:
        """One step of the core with help, and one of the other without."""
        batch = sequences(24, seed=number)
        work = self.core._work(batch)
        totals = Totals(torch.device("cpu"))
        self.crew.expect(number, number)
        self.crew.begin(work)
        loop = asyncio.get_running_loop()
        waited_s = 0.0
        while (due := self.crew.look()) is not None:
            match due:
                case Own(packs):
                    await asyncio.sleep(PACK_S)
                    self.core.pieces.accumulate(self.core._piece(work, packs), totals)
                case Sum():
                    self.core._add(due, totals)
                case Wait(until_s):
                    began_s = loop.time()
                    await asyncio.sleep(min(0.05, max(0.0, until_s - began_s)) or 0.001)
                    waited_s += loop.time() - began_s
        self.crew.end()
        self.waited_s.append(waited_s)
        assert not self.core._update(totals, lambda: None).skipped
        assert not self.alone.train(batch, number).skipped

    def check(self) -> None:
        """Nothing was counted twice or lost."""
        pairs = zip(self.core.policy.parameters(), self.alone.policy.parameters(), strict=True)
        for helped, alone in pairs:
            assert (helped - alone).norm() <= 1e-5 * alone.norm()


@contextlib.asynccontextmanager
async def job(
    tmp_path: Path, network: SimNetwork | None = None, **training: Any
) -> AsyncGenerator[Job]:
    network = network or SimNetwork(1)
    make_tiny_model(tmp_path / "model", tied=True)
    config = trainer_config(
        tmp_path / "model", micro_batch_tokens=40, learning_rate=1e-4, **training
    )
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as helper:
        async with process(network, "coordinator", "coordinator") as beside:
            coordinator = Coordinator(beside.mesh)
            coordinator.serve()
            streams = SimStreamNetwork(1)
            fetcher = StreamedGradients(streams.streamer())
            crew = Crew(1, helper, clock=loop.time, fetcher=fetcher)
            crew.serve_on(beside.mesh)
            core, alone = (Learner(tiny_policy(tmp_path / "model"), config) for _ in range(2))
            crew.prepare(core.layout)
            async with asyncio.TaskGroup() as tasks:
                made = Job(
                    network, config, tmp_path, coordinator, crew, core, alone, tasks, streams
                )
                yield made
                made.stopping.set()


async def train(made: Job, numbers: range, *, befall: Any = None) -> int:
    """Steps with everybody on the version of the step; how many micro-batches replicas ran."""
    helped = 0
    for number in numbers:
        manifest = made.publish(number)
        for slot in list(made.coordinator.members):
            await made.coordinator.order(slot, ApplyVersion(manifest=manifest))
        async with asyncio.TaskGroup() as tasks:
            if befall is not None:
                tasks.create_task(befall(number))
            await made.step(number)
        helped += made.crew.tally.replicas
        made.check()
    return helped


def test_replicas_take_their_share_and_change_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            for slot in ("a", "b"):
                await made.join(slot)
            helped = await train(made, range(1, STEPS))
            assert helped > 12
            assert sum(made.waited_s) < STEPS * PACK_S

    run_sim(scenario())


@pytest.mark.parametrize("seed", seeds(8))
def test_whatever_befalls_replicas_nothing_is_counted_twice_or_lost(
    tmp_path: Path, seed: int
) -> None:
    """They leave, stall, die and come again, on a network that loses and repeats messages."""
    rng = random.Random(seed)

    async def scenario() -> None:
        network = SimNetwork(seed, Faults(loss=0.05, duplicate=0.05))
        async with job(tmp_path, network) as made:
            manners = {slot: Slow() for slot in "abc"}
            incarnations = dict.fromkeys("abc", 1)
            for slot, manner in manners.items():
                await made.start(slot, manner)
                await made.coordinator.take(slot)

            async def befall(number: int) -> None:
                await asyncio.sleep(rng.random() * 6 * PACK_S)
                slot = rng.choice("abc")
                manners[slot].pack_s = PACK_S
                match rng.choice(["leave", "stall", "die"]):
                    case "leave":
                        await made.coordinator.yield_slot(slot)
                        await made.coordinator.take(slot)
                    case "stall":
                        manners[slot].pack_s = 15.0
                    case _:
                        peer = made.kill(slot)
                        if rng.random() < 0.5:
                            made.crew.lost(peer)
                        incarnations[slot] += 1
                        await made.start(slot, manners[slot], incarnations[slot])
                        await made.coordinator.take(slot)

            await train(made, range(1, STEPS + 1), befall=befall)

    run_sim(scenario())


def corrupt(computed: Computed, change: Callable[[bytearray], None]) -> Computed:
    path = Path(computed.blob.path)
    content = bytearray(path.read_bytes())
    change(content)
    with path.open("r+b") as file:
        file.write(content)
    return computed


def flip(content: bytearray) -> None:
    content[100] ^= 1


def nan_and_its_hash(computed: Computed) -> Computed:
    def poison(content: bytearray) -> None:
        content[400:404] = b"\x00\x00\xc0\x7f"

    corrupt(computed, poison)
    content = memoryview(Path(computed.blob.path).read_bytes())
    blob = computed.blob.model_copy(update={"chunks": hash_pieces([content], CHUNK_BYTES)})
    return replace(computed, blob=blob)


def changed(**fields: Any) -> Callable[[Computed], Computed]:
    return lambda computed: replace(computed, **fields)


LIES: dict[str, Callable[[Computed], Computed]] = {
    "digest": lambda computed: corrupt(computed, flip),
    "not finite": nan_and_its_hash,
    "layout": changed(layout="another"),
    "dtype": changed(dtype="F8"),
    "length": changed(dtype="BF16"),
    "tokens": changed(tokens=1),
    "sums": changed(sums=[float("nan")] * 7),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_replica_that_lies_costs_its_own_work(tmp_path: Path, lie: str) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            manner = await made.join("a", Slow(lie=LIES[lie]))
            assert await train(made, range(1, 3)) == 0
            assert manner.finished

    run_sim(scenario())


def elsewhere(computed: Computed) -> Computed:
    """As if written on a host whose memory the core does not see."""
    return replace(computed, blob=computed.blob.model_copy(update={"path": "/nonexistent/g"}))


def test_gradients_of_another_host_are_streamed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            await made.join("a", Slow(lie=elsewhere))
            assert await train(made, range(1, 4)) > 0

    run_sim(scenario())


def test_a_host_that_streams_nothing_costs_its_own_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            manner = await made.join("a", Slow(lie=elsewhere))
            made.streams.kill("stream://a")
            assert await train(made, range(1, 3)) == 0
            assert manner.finished

    run_sim(scenario())


def test_a_core_waits_no_longer_than_it_would_need_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            manner = await made.join("a")
            await train(made, range(1, 3))
            manner.pack_s = 1e3
            made.waited_s.clear()
            await train(made, range(3, 4))
            assert made.crew.tally.again > 0
            assert made.waited_s[0] <= (made.crew.tally.again + 1) * 2 * PACK_S

    run_sim(scenario())


def test_a_replica_that_yields_returns_what_it_has_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            await made.join("a")

            async def befall(number: int) -> None:
                if number == 3:
                    await asyncio.sleep(1.5 * PACK_S)
                    assert await made.coordinator.yield_slot("a", deadline_s=10.0)

            assert await train(made, range(1, 4), befall=befall) > 0
            assert made.crew.tally.replicas > 0
            assert made.crew.tally.again == 0
            assert await train(made, range(4, 5)) == 0

    run_sim(scenario())


def test_a_yield_ends_by_its_deadline_and_the_core_does_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            manner = await made.join("a")
            loop = asyncio.get_running_loop()

            async def befall(number: int) -> None:
                if number == 3:
                    manner.pack_s = 1.8
                    await asyncio.sleep(1.5 * PACK_S)
                    began_s = loop.time()
                    assert await made.coordinator.yield_slot("a", deadline_s=1.0)
                    assert loop.time() - began_s < 1.0 + 2 * manner.pack_s

            await train(made, range(1, 4), befall=befall)

    run_sim(scenario())


def test_a_gradient_of_an_older_step_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            manner = await made.join("a")
            await train(made, range(1, 3))
            manner.pack_s = 30.0
            await train(made, range(3, 4))
            await asyncio.sleep(60.0)  # It returns what nobody waits for.
            assert await train(made, range(4, 5)) == 0

    run_sim(scenario())


def test_bfloat16_sums_are_near_and_their_rounding_is_given_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path, gradient_dtype="bfloat16") as made:
            await made.join("a")
            manifest = made.publish(1)
            await made.coordinator.order("a", ApplyVersion(manifest=manifest))
            await made.step(1)
            await made.step(1)
            assert made.crew.tally.replicas > 0
            pairs = zip(made.core.policy.parameters(), made.alone.policy.parameters(), strict=True)
            assert all((a - b).norm() <= 1e-2 * b.norm() for a, b in pairs)

    run_sim(scenario())


def test_an_older_fence_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with job(tmp_path) as made:
            await made.join("a")
            await train(made, range(1, 2))
            request = ReturnGradient.model_construct(slot="a", fence=-1)
            with pytest.raises(RequestRefused, match="stale_fence"):
                await made.crew.return_gradient("a", request)

    run_sim(scenario())
