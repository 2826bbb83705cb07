"""The coordinator and its members on the simulated network."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from common.clock import run_sim
from common.errors import PeerUnreachable, Refusal, RequestRefused
from common.membership import Membership
from common.messages.coordinator import GetFleet, PublishVersion
from common.messages.rollout import ApplyVersion, VersionApplied
from common.service import Runtime
from common.transport.sim import Faults, SimNetwork
from services.coordinator.service import CoordinatorService
from tests.support.sim import COORDINATOR, describe, process, serving, until

LEASE_S = 3.0


def coordinator(runtime: Runtime) -> CoordinatorService:
    return CoordinatorService(runtime, describe)


@contextlib.asynccontextmanager
async def joined(runtime: Runtime):  # noqa: ANN201
    membership = Membership(runtime)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(membership.run())
        await membership.joined(timeout_s=10)
        try:
            yield membership
        finally:
            task.cancel()


class Worker:
    """A rollout worker that applies versions: truly, lying, slowly or never."""

    def __init__(self, runtime: Runtime, *, delay_s: float = 0.01, lie: bool = False) -> None:
        self.applied: list[int] = []
        self._delay_s, self._lie = delay_s, lie
        runtime.mesh.serve(ApplyVersion, self.apply)

    async def apply(self, _sender: str, request: ApplyVersion) -> VersionApplied:
        await asyncio.sleep(self._delay_s)
        self.applied.append(request.manifest.version)
        digest = "something else" if self._lie else request.manifest.digest
        return VersionApplied(version=request.manifest.version, digest=digest, apply_s=0.0)


@pytest.mark.parametrize("seed", range(10))
def test_members_find_each_other_and_notice_a_silent_death(seed: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        network = SimNetwork(seed, Faults(loss=0.1, duplicate=0.1))
        async with (
            serving(network, "coordinator", "coordinator", coordinator, run_dir=tmp_path),
            process(network, "scheduler", "scheduler") as runtime,
            joined(runtime) as membership,
        ):
            async with (
                process(network, "rollout", "short-0") as dying,
                asyncio.TaskGroup() as tasks,
            ):
                task = tasks.create_task(Membership(dying).run())
                found = await membership.wait_for("rollout", timeout_s=10)
                assert found.peer == dying.mesh.identity
                network.kill(dying.mesh.identity)
                task.cancel()
            await until(lambda: membership.find("rollout") is None, 3 * LEASE_S)

    run_sim(scenario())


@pytest.mark.parametrize("seed", range(10))
def test_a_restarted_coordinator_disturbs_nobody(seed: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        network = SimNetwork(seed)
        losses: list[str] = []
        async with (
            process(network, "scheduler", "scheduler") as one,
            process(network, "rollout", "short-0") as two,
        ):
            first = serving(network, "coordinator", "coordinator", coordinator, run_dir=tmp_path)
            async with first:
                stack = contextlib.AsyncExitStack()
                membership = await stack.enter_async_context(joined(one))
                await stack.enter_async_context(joined(two))
                await membership.wait_for("rollout", timeout_s=10)
                membership.on_change(lambda u: losses.append(u.member.name) if u.gone else None)
            await asyncio.sleep(1.0)
            async with serving(
                network,
                "coordinator",
                "coordinator",
                coordinator,
                run_dir=tmp_path,
                incarnation=2,
            ):
                await asyncio.sleep(4 * LEASE_S)
                fleet = await membership.ask_coordinator(GetFleet(), timeout_s=5)
                assert {entry.member.name for entry in fleet.members} == {"scheduler", "short-0"}
                assert losses == []
                await stack.aclose()

    run_sim(scenario())


def publishing(
    tmp_path: Path,
    check: Callable[[dict[str, Worker], Membership], object],
    versions: list[int],
    **kinds: dict[str, object],
) -> None:
    """Publish versions to workers of several kinds, and then check."""

    async def scenario() -> None:
        network = SimNetwork(7)
        async with contextlib.AsyncExitStack() as stack:
            enter = stack.enter_async_context
            await enter(
                serving(network, "coordinator", "coordinator", coordinator, run_dir=tmp_path)
            )
            trainer = await enter(joined(await enter(process(network, "trainer", "trainer"))))
            workers: dict[str, Worker] = {}
            for name, kind in kinds.items():
                runtime = await enter(process(network, "rollout", name))
                workers[name] = Worker(runtime, **kind)  # type: ignore[arg-type]
                await enter(joined(runtime))
            for version in versions:
                await trainer.ask_coordinator(
                    PublishVersion(version=version, segment=f"/seg-{version}"), timeout_s=10
                )
            outcome = check(workers, trainer)
            if asyncio.iscoroutine(outcome):
                await outcome

    run_sim(scenario())


def test_a_slow_worker_skips_to_the_newest_version(tmp_path: Path) -> None:
    async def check(workers: dict[str, Worker], _trainer: Membership) -> None:
        await until(lambda: workers["slow"].applied[-1:] == [5])
        assert workers["slow"].applied == [1, 5]

    publishing(tmp_path, check, [1, 2, 3, 4, 5], slow={"delay_s": 2.0})


def test_a_worker_that_never_answers_is_evicted_and_the_others_proceed(tmp_path: Path) -> None:
    async def check(workers: dict[str, Worker], trainer: Membership) -> None:
        await until(lambda: workers["good"].applied == [1], 5)
        await trainer.wait_for("rollout", name="mute", timeout_s=5)
        fleet = await trainer.ask_coordinator(GetFleet(), timeout_s=5)
        waiting = {entry.member.name: entry.applying_s for entry in fleet.members}
        assert waiting["mute"] > 0
        assert waiting["good"] == 0
        await until(lambda: trainer.find("rollout", "mute") is None, 120)
        assert trainer.find("rollout", "good") is not None

    publishing(tmp_path, check, [1], good={}, mute={"delay_s": 1e9})


def test_a_worker_that_lies_about_applying_never_counts_as_applied(tmp_path: Path) -> None:
    async def check(workers: dict[str, Worker], trainer: Membership) -> None:
        await until(lambda: len(workers["liar"].applied) == 3)
        await asyncio.sleep(5)
        fleet = await trainer.ask_coordinator(GetFleet(), timeout_s=5)
        applied = {entry.member.name: entry.version for entry in fleet.members}
        assert applied["liar"] == -1
        assert applied["good"] == 1
        assert len(workers["liar"].applied) == 3

    publishing(tmp_path, check, [1], good={}, liar={"lie": True})


def test_an_older_version_is_refused(tmp_path: Path) -> None:
    async def check(_workers: dict[str, Worker], trainer: Membership) -> None:
        with pytest.raises(RequestRefused) as caught:
            await trainer.ask_coordinator(PublishVersion(version=4, segment="/s"), timeout_s=5)
        assert caught.value.refusal is Refusal.STALE_FENCE

    publishing(tmp_path, check, [5])


def test_without_a_coordinator_joining_ends_with_an_error_that_names_it() -> None:
    async def scenario() -> None:
        async with process(SimNetwork(1), "scheduler", "scheduler") as runtime:
            membership = Membership(runtime)
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(membership.run())
                with pytest.raises(PeerUnreachable, match=COORDINATOR):
                    await membership.joined(timeout_s=5)
                task.cancel()

    run_sim(scenario())
