import asyncio
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import run_sim
from common.errors import LibraError, PeerUnreachable, RequestTimeout
from common.mesh import Mesh
from common.transport.base import Transport
from common.transport.sim import Faults, SimNetwork
from tests.support.mesh_scenario import FAULTY, Note, Notebook, busy, digest, insist


@pytest.mark.parametrize("seed", range(20))
def test_under_loss_repetition_and_reordering_every_note_is_answered(seed: int) -> None:
    notebook = run_sim(busy(SimNetwork(seed, FAULTY)))
    assert len(notebook.times) == 60


@pytest.mark.parametrize("seed", range(20))
def test_a_key_is_executed_once_whatever_is_lost(seed: int) -> None:
    async def scenario() -> Notebook:
        network, notebook = SimNetwork(seed, FAULTY), Notebook()
        async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
            b.serve(Note, notebook.note_at_once)
            peer = await a.connect(b.address, timeout_s=10)
            for number in range(20):
                reply = await insist(a, peer, Note(text=str(number), slow=False), key=str(number))
                assert reply.times == 1
        return notebook

    assert run_sim(scenario()).times == {str(number): 1 for number in range(20)}


@pytest.mark.parametrize("seed", range(10))
def test_a_repeated_message_is_not_executed_twice(seed: int) -> None:
    async def scenario() -> Notebook:
        network = SimNetwork(seed, Faults(duplicate=1.0, reorder=0.5, delay_s=(0.001, 2.0)))
        notebook = Notebook()
        async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
            b.serve(Note, notebook.note)
            peer = await a.connect(b.address, timeout_s=10)
            for number in range(10):
                request = Note(text=str(number), slow=number % 2 == 0)
                assert (await a.request(peer, request, timeout_s=30)).times == 1
        return notebook

    assert run_sim(scenario()).times == {str(number): 1 for number in range(10)}


async def three_notes(network: SimNetwork) -> None:
    notebook = Notebook()
    async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
        b.serve(Note, notebook.note_at_once)
        peer = await a.connect(b.address, timeout_s=10)
        for text in ("x", "y", "z"):
            await insist(a, peer, Note(text=text, slow=False), key=text, tries=2)
    assert notebook.times == {"x": 1, "y": 1, "z": 1}


def test_losing_any_single_message_costs_one_retry_and_nothing_else() -> None:
    clean = SimNetwork(0)
    run_sim(three_notes(clean))
    assert clean.payloads_sent == 6
    for lost in range(clean.payloads_sent):
        run_sim(three_notes(SimNetwork(0, Faults(lose=frozenset({lost})))))


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_every_request_ends_within_its_limit(
    seed: int, loss: float, duplicate: float, reorder: float
) -> None:
    async def scenario() -> None:
        network = SimNetwork(seed, Faults(loss, duplicate, (0.001, 3.0), reorder))
        async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
            b.serve(Note, Notebook().note)
            peer = await a.connect(b.address, timeout_s=60)

            async def ask(number: int) -> None:
                began = asyncio.get_running_loop().time()
                try:
                    request = Note(text=str(number), slow=number % 2 == 0)
                    await a.request(peer, request, timeout_s=1.0)
                except RequestTimeout:
                    pass
                assert asyncio.get_running_loop().time() - began <= 1.02

            async with asyncio.TaskGroup() as tasks:
                for number in range(10):
                    tasks.create_task(ask(number))

    run_sim(scenario())


@pytest.mark.parametrize("seed", range(10))
def test_order_holds_whatever_the_delays(seed: int) -> None:
    async def scenario() -> list[bytes]:
        network, received = SimNetwork(seed, Faults(delay_s=(0.0, 5.0))), list[bytes]()
        sender, receiver = network.connect("a"), network.connect("b")
        sender.receive_with(lambda batch: None, lambda peer, reason: None)
        receiver.receive_with(
            lambda batch: received.extend(payload for _, payload in batch),
            lambda peer, reason: None,
        )
        async with sender, receiver:
            peer = await sender.connect(receiver.address, timeout_s=60)
            for number in range(100):
                sender.send(peer, bytes([number]))
                if number % 10 == 0:
                    await asyncio.sleep(1)
            await asyncio.sleep(10)
        return received

    assert run_sim(scenario()) == [bytes([number]) for number in range(100)]


def test_a_partition_is_a_timeout_and_its_end_is_an_end() -> None:
    async def scenario() -> None:
        network = SimNetwork(3)
        async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
            b.serve(Note, Notebook().note)
            peer = await a.connect(b.address, timeout_s=1)
            network.partition(a.identity, b.identity)
            with pytest.raises(RequestTimeout):
                await a.request(peer, Note(text="x", slow=False), timeout_s=5)
            with pytest.raises(PeerUnreachable):
                await a.connect("sim://nowhere", timeout_s=5)
            network.heal(a.identity, b.identity)
            await a.request(peer, Note(text="x", slow=False), timeout_s=5)

    run_sim(scenario())


def test_who_was_forgotten_during_a_partition_learns_it_when_it_sends() -> None:
    async def scenario() -> None:
        network, lost = SimNetwork(3), list[str]()
        async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
            a.on_peer_lost(lambda peer, reason: lost.append(reason))
            peer = await a.connect(b.address, timeout_s=1)
            network.partition(a.identity, peer)
            b.disconnect(a.identity)
            await asyncio.sleep(1)
            network.heal(a.identity, peer)
            assert not lost
            with pytest.raises(PeerUnreachable):
                await a.request(peer, Note(text="x", slow=False), timeout_s=5)
            assert lost == ["connection reset"]

    run_sim(scenario())


def test_the_killed_hear_nothing_and_their_peers_know_at_once() -> None:
    async def scenario() -> None:
        network, notebook = SimNetwork(3), Notebook()
        async with Mesh(network.connect("a")) as a, Mesh(network.connect("b")) as b:
            b.serve(Note, notebook.note)
            peer = await a.connect(b.address, timeout_s=1)
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(expect(a, peer))
                await asyncio.sleep(0.1)
                network.kill(peer)
            assert isinstance(call.result(), PeerUnreachable)
            assert asyncio.get_running_loop().time() < 0.2
            assert not notebook.times

    run_sim(scenario())


async def expect(mesh: Mesh, peer: str) -> LibraError | None:
    try:
        await mesh.request(peer, Note(text="x", slow=True), timeout_s=60)
    except LibraError as error:
        return error
    return None


def test_a_restarted_process_may_take_over_its_address() -> None:
    async def scenario() -> None:
        network = SimNetwork(3)

        def serve(transport: Transport) -> Mesh:
            mesh = Mesh(transport)
            mesh.serve(Note, Notebook().note)
            return mesh

        async with (
            Mesh(network.connect("a")) as a,
            serve(network.connect("b", "sim://coordinator")) as first,
        ):
            await a.connect("sim://coordinator", timeout_s=1)
            network.kill(first.identity)
            async with serve(network.connect("b", "sim://coordinator")) as second:
                peer = await a.connect("sim://coordinator", timeout_s=1)
                assert peer == second.identity != first.identity
                await a.request(peer, Note(text="x", slow=False), timeout_s=1)

    run_sim(scenario())


def test_the_same_seed_is_the_same_trace() -> None:
    assert digest(7) == digest(7)
    assert digest(7) != digest(8)


@pytest.mark.slow
def test_the_trace_does_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-m", "tests.support.mesh_scenario", "7"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        ).stdout
        for hash_seed in ("0", "1", "2")
    }
    assert len(digests) == 1
