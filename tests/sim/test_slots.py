"""Two tenants of a hybrid slot and the real coordinator, on a network that loses and repeats."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from common.clock import run_sim
from common.config import BucketConfig, Config, CoordinatorConfig, ElasticConfig
from common.errors import Refusal, RequestRefused, RunFailed
from common.membership import Membership
from common.messages.base import Request
from common.messages.coordinator import GetFleet, PublishVersion, SetSplit, SlotStatus
from common.messages.rollout import ApplyVersion, VersionApplied
from common.messages.slots import SlotYielded, TakeSlot, YieldSlot
from common.service import Runtime
from common.tenant import Tenant
from common.transport.sim import Faults, SimNetwork
from common.weights import NO_VERSION
from services.coordinator.service import CoordinatorService
from tests.support.devices import Devices
from tests.support.sim import describe, process, seeds, serving, sim_config, until

SLOT = "long-0"
ROLES = ("rollout", "replica")
SEEDS = seeds(20)
LEASE_S = 3.0
LOSSY = Faults(loss=0.15, duplicate=0.15, reorder=0.15, delay_s=(0.001, 0.05))


def config(train_slots: int = 0) -> Config:
    return sim_config(
        buckets=[BucketConfig(name="short"), BucketConfig(name="long", hybrid=True)],
        coordinator=CoordinatorConfig(apply_timeout_s=8.0),
        elastic=ElasticConfig(train_slots=train_slots, drain_timeout_s=4.0),
    )


class Body:
    """Takes its time for everything."""

    def __init__(
        self, devices: Devices, role: str, membership: Membership, rng: random.Random
    ) -> None:
        self._devices, self._role, self._membership = devices, role, membership
        self.drain_s, self.release_s, self.wake_s = (rng.uniform(0.0, 2.0) for _ in range(3))

    async def wake(self) -> None:
        self._devices.take(self._role)
        await asyncio.sleep(self.wake_s)

    async def drain(self, deadline_s: float) -> None:
        await asyncio.sleep(min(self.drain_s, deadline_s))

    async def release(self) -> None:
        await asyncio.sleep(self.release_s)
        self._membership.applied_version = NO_VERSION
        self._devices.free(self._role)


class Cluster:
    """A coordinator, an observer and the two tenants of one slot; all can be killed."""

    def __init__(self, seed: int, run_dir: Path, faults: Faults, train_slots: int = 0) -> None:
        self.network = SimNetwork(seed, faults)
        self.devices = Devices()
        self.bodies: dict[str, Body] = {}
        self.fences: dict[str, list[int]] = {role: [] for role in ROLES}
        self.observer: Membership
        self.coordinator: CoordinatorService | None = None
        self._rng = random.Random(seed)
        self._run_dir, self._config = run_dir, config(train_slots)
        self._incarnations: dict[str, int] = dict.fromkeys((*ROLES, "coordinator"), 0)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup
        self.change: Callable[[Body], object] = lambda _body: None

    @contextlib.asynccontextmanager
    async def running(self):  # noqa: ANN201
        async with (
            process(self.network, "scheduler", "scheduler", config=self._config) as runtime,
            asyncio.TaskGroup() as self._tasks,
        ):
            self.observer = Membership(runtime)
            watching = self._tasks.create_task(self.observer.run())
            for name in ("coordinator", *ROLES):
                self.start(name)
            await self.observer.joined(timeout_s=60)
            try:
                yield self
            finally:
                for task in [watching, *self._running.values()]:
                    task.cancel()

    def start(self, name: str) -> None:
        self._incarnations[name] += 1
        run = self._coordinate if name == "coordinator" else self._dwell
        self._running[name] = self._tasks.create_task(run(name, self._incarnations[name]))

    async def kill(self, name: str) -> None:
        """End a process at once, and start it again after a while."""
        owner = "coordinator" if name == "coordinator" else SLOT
        role = "coordinator" if name == "coordinator" else name
        self.network.kill(f"sim/{role}/{owner}/{self._incarnations[name]:04d}")
        self.devices.free(name)
        if name == "coordinator":
            self.coordinator = None
        self._running[name].cancel()
        await asyncio.wait([self._running[name]])
        await asyncio.sleep(self._rng.uniform(0.5, 3.0))
        self.start(name)

    async def _coordinate(self, _name: str, incarnation: int) -> None:
        async with serving(
            self.network,
            "coordinator",
            "coordinator",
            self._build,
            run_dir=self._run_dir,
            config=self._config,
            incarnation=incarnation,
        ):
            await asyncio.Event().wait()

    def _build(self, runtime: Runtime) -> CoordinatorService:
        self.coordinator = CoordinatorService(runtime, describe)
        return self.coordinator

    async def _dwell(self, role: str, incarnation: int) -> None:
        """One life of a tenant's process. A failure ends it, and it is started again."""
        try:
            async with (
                process(
                    self.network, role, SLOT, config=self._config, incarnation=incarnation
                ) as runtime,
                asyncio.TaskGroup() as tasks,
            ):
                membership = Membership(runtime, {"slot": SLOT})
                body = self.bodies[role] = Body(self.devices, role, membership, self._rng)
                self.change(body)
                tenant = Tenant(runtime.mesh, membership, body)
                runtime.mesh.serve(ApplyVersion, self._applying(membership, tenant))
                tasks.create_task(membership.run())
                tasks.create_task(tenant.run())
                tasks.create_task(self._note_fences(role, tenant))
        except* RunFailed:
            self.devices.free(role)
            self.start(role)

    def _applying(
        self, membership: Membership, tenant: Tenant
    ) -> Callable[[str, ApplyVersion], Awaitable[VersionApplied]]:
        async def apply(_sender: str, request: ApplyVersion) -> VersionApplied:
            await asyncio.sleep(self._rng.uniform(0.01, 0.2))
            if not tenant.awake:
                raise RequestRefused(Refusal.NOT_READY, "asleep")
            membership.applied_version = request.manifest.version
            return VersionApplied(
                version=request.manifest.version, digest=request.manifest.digest, apply_s=0.0
            )

        return apply

    async def _note_fences(self, role: str, tenant: Tenant) -> None:
        while True:
            self.fences[role].append(tenant.fence)
            await asyncio.sleep(0.05)

    # ── what the test asks ───────────────────────────────────────────────────────────────────

    async def split(self, train: int, by: str = "planner", hold_s: float = 0.0) -> None:
        """Order a split, again and again until somebody has heard it."""
        order = SetSplit(train=train, rollout=1 - train, by=by, hold_s=hold_s)
        await self._insist(lambda: self.observer.ask_coordinator(order, timeout_s=1.0))

    async def publish(self, version: int) -> None:
        order = PublishVersion(version=version, segment=f"sim:{version}")
        await self._insist(lambda: self.observer.ask_coordinator(order, timeout_s=1.0))

    def status(self) -> SlotStatus | None:
        """As `GetFleet` tells it."""
        fleet = self.coordinator and self.coordinator._fleet("", GetFleet())
        return fleet.slots[0] if fleet and fleet.slots else None

    async def reach(self, side: str, *phases: str, patience_s: float = 120.0) -> SlotStatus:
        """Wait until the slot is on a side, in one of the phases."""
        async with asyncio.timeout(patience_s):
            while True:
                status = self.status()
                if status and status.side == side and status.phase in (phases or ("active",)):
                    return status
                await asyncio.sleep(0.02)

    @staticmethod
    async def _insist(act: Callable[[], Awaitable[object]]) -> None:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    await act()
                    return
                await asyncio.sleep(0.1)


def play(
    seed: int,
    run_dir: Path,
    scenario: Callable[[Cluster], Awaitable[None]],
    faults: Faults = LOSSY,
    train_slots: int = 0,
) -> Cluster:
    cluster = Cluster(seed, run_dir, faults, train_slots)

    async def run() -> None:
        async with cluster.running():
            await scenario(cluster)

    run_sim(run())
    for fences in cluster.fences.values():
        assert all(a <= b or b == -1 for a, b in itertools.pairwise(fences))
    return cluster


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("train_slots", [0, 1])
def test_the_slot_begins_on_the_configured_side(
    seed: int, train_slots: int, tmp_path: Path
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.reach(("rollout", "train")[train_slots])
        assert set(cluster.devices.history) == {ROLES[train_slots]}

    play(seed, tmp_path, scenario, train_slots=train_slots)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_slot_changes_sides_and_back(seed: int, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.publish(1)
        await cluster.reach("rollout")
        for train, side, role in ((1, "train", "replica"), (0, "rollout", "rollout")):
            await cluster.split(train)
            status = await cluster.reach(side)
            assert cluster.devices.holder == role
            assert status.load_s > 0
        assert status.switches == 2

    play(seed, tmp_path, scenario)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("victim", [*ROLES, "coordinator"])
def test_a_death_in_any_phase_of_a_switch_only_delays_it(
    victim: str, seed: int, tmp_path: Path
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.publish(1)
        train = 0
        for phase in ("idle", "draining", "loading", "active", "draining", "loading"):
            train, side = 1 - train, ("train", "rollout")[train]
            await cluster.split(train)
            await cluster.reach(side, phase, "active")
            await cluster.kill(victim)
            await cluster.publish(1)
            await until(lambda: cluster.devices.holder == ROLES[train], 120.0)  # noqa: B023
            await cluster.reach(side)

    play(seed, tmp_path, scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_switches_ordered_at_once_the_last_one_counts(seed: int, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.reach("rollout")
        for train in (1, 0, 1):
            await cluster.split(train)
        await cluster.reach("train")
        await cluster.split(0)
        await cluster.split(1)
        await asyncio.sleep(20)
        status = await cluster.reach("train")
        assert status.phase_s > 0
        assert cluster.devices.holder == "replica"

    play(seed, tmp_path, scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_without_a_coordinator_yields_before_the_other_takes_over(
    seed: int, tmp_path: Path
) -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.change = lambda body: setattr(body, "release_s", 0.3)
        cluster.bodies["rollout"].release_s = 0.3
        await cluster.reach("rollout")
        pair = (f"sim/rollout/{SLOT}/0001", "sim/coordinator/coordinator/0001")
        cluster.network.partition(*pair)
        await cluster.split(1)
        lapsed_s = asyncio.get_running_loop().time()
        await until(lambda: cluster.devices.holder is None, 3.2 * LEASE_S)
        await cluster.reach("train")
        assert cluster.devices.history == ["rollout", "replica"]
        assert asyncio.get_running_loop().time() - lapsed_s < 6 * LEASE_S
        cluster.network.heal(*pair)
        await asyncio.sleep(20)
        assert cluster.devices.holder == "replica"

    play(seed, tmp_path, scenario, Faults())


@pytest.mark.parametrize("seed", range(5))
def test_a_tenant_that_cannot_free_the_devices_ends_and_frees_them_so(
    seed: int, tmp_path: Path
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.reach("rollout")
        cluster.bodies["rollout"].release_s = 1e9
        await cluster.split(1)
        await cluster.reach("train", patience_s=200)
        assert cluster.devices.history == ["rollout", "replica"]

    play(seed, tmp_path, scenario)


@pytest.mark.parametrize("seed", range(5))
def test_drained_in_time_or_given_up_it_yields_by_the_deadline(seed: int, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.reach("rollout")
        cluster.bodies["rollout"].drain_s = 1e9
        await cluster.split(1)
        status = await cluster.reach("train", patience_s=15)
        assert status.drain_s == pytest.approx(4.0, abs=1.0)

    play(seed, tmp_path, scenario, Faults())


def test_a_tenant_that_is_heard_and_never_yields_is_evicted_and_waited_out(
    tmp_path: Path,
) -> None:
    """It breaks every rule but one: it says that it is awake."""

    async def liar(network: SimNetwork) -> None:
        async with (
            process(network, "rollout", SLOT, config=config(), incarnation=7) as runtime,
            asyncio.TaskGroup() as tasks,
        ):
            membership = Membership(runtime, {"slot": SLOT})
            membership.fence, membership.awake = 3, True

            async def refuse(_sender: str, _request: YieldSlot) -> SlotYielded:
                raise RequestRefused(Refusal.OVERLOADED, "no")

            runtime.mesh.serve(YieldSlot, refuse)
            tasks.create_task(membership.run())

    async def scenario(cluster: Cluster) -> None:
        await cluster.reach("rollout")
        cluster._running["rollout"].cancel()
        cluster.devices.free("rollout")
        cluster._running["rollout"] = cluster._tasks.create_task(liar(cluster.network))
        await asyncio.sleep(5)
        await cluster.split(1)
        await cluster.reach("train", "draining")
        with pytest.raises(TimeoutError):
            await cluster.reach("train", patience_s=60)
        await cluster.reach("train", patience_s=60)

    play(1, tmp_path, scenario, Faults())


def test_an_operators_split_holds_against_the_planner(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.split(1, by="operator", hold_s=30.0)
        with pytest.raises(RequestRefused) as refused:
            await cluster.split(0)
        assert refused.value.refusal is Refusal.STALE_FENCE
        await cluster.split(1)
        await asyncio.sleep(31)
        await cluster.split(0)
        await cluster.reach("rollout")

    play(1, tmp_path, scenario, Faults())


@pytest.mark.parametrize(("train", "rollout"), [(2, 0), (0, 0), (-1, 2)])
def test_a_split_of_other_numbers_is_invalid(train: int, rollout: int, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        order = SetSplit(train=train, rollout=rollout, by="operator")
        with pytest.raises(RequestRefused) as refused:
            await cluster.observer.ask_coordinator(order, timeout_s=5)
        assert refused.value.refusal is Refusal.INVALID

    play(1, tmp_path, scenario, Faults())


def test_only_the_coordinator_gives_orders_and_old_ones_are_stale(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.reach("rollout")
        tenant = await cluster.observer.wait_for("rollout", timeout_s=5)
        orders: list[Request[Any]] = [TakeSlot(fence=99), YieldSlot(fence=99, deadline_s=1.0)]
        for order in orders:
            with pytest.raises(RequestRefused) as refused:
                await cluster.observer.request(tenant, order, timeout_s=5)
            assert refused.value.refusal is Refusal.NOT_READY
        assert cluster.devices.holder == "rollout"

    play(1, tmp_path, scenario, Faults())
