"""The contract of `common.transport.base`, on ZeroMQ (both event loops) and on the simulation."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import structlog
import uvloop

from common.clock import run_sim
from common.errors import ConfigError, PeerUnreachable, ProtocolError
from common.identity import new_identity
from common.transport.base import QUEUE_PAYLOADS_MAX, Transport
from common.transport.sim import SimNetwork, SimTransport
from common.transport.zmq import ZmqTransport

LIMIT_S = 10.0


@dataclass
class Net:
    """Makes, runs and kills transports of one kind."""

    run: Callable[[Coroutine[Any, Any, None]], None]
    make: Callable[[str, str], Transport]

    def transport(self, name: str, address: str = "", run_id: str = "run") -> Transport:
        return self.make(str(new_identity(run_id, "role", name)), address)

    def kill(self, transport: Transport) -> None:
        if isinstance(transport, SimTransport):
            transport._network.kill(transport.identity)
        else:
            assert isinstance(transport, ZmqTransport)
            for link in (transport._router, *transport._dials_by_link):
                link.close()


def make_zmq(identity: str, address: str) -> Transport:
    return ZmqTransport(identity, address or "tcp://127.0.0.1:0")


@pytest.fixture(params=["sim", "zmq-asyncio", "zmq-uvloop"])
def net(request: pytest.FixtureRequest) -> Net:
    match request.param:
        case "sim":
            return Net(run_sim, SimNetwork(seed=1).connect)
        case "zmq-asyncio":
            return Net(asyncio.run, make_zmq)
        case _:
            return Net(uvloop.run, make_zmq)


@dataclass
class End:
    """A transport with what it received."""

    transport: Transport
    received: list[tuple[str, bytes]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    echo: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.transport.receive_with(self.on_receive, self.on_lost)

    @property
    def identity(self) -> str:
        return self.transport.identity

    def on_receive(self, batch: list[tuple[str, bytes]]) -> None:
        self.received += batch
        if self.echo:
            for sender, payload in batch:
                self.transport.send(sender, payload)
        self.changed.set()

    def on_lost(self, peer: str, reason: str) -> None:
        self.lost.append((peer, reason))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def connect(self, other: "End") -> str:
        return await self.transport.connect(other.transport.address, timeout_s=LIMIT_S)

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        await self.transport.__aexit__(*details)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


def test_payloads_arrive_in_order_in_both_directions(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b"), echo=True) as b:
            assert await a.connect(b) == b.identity
            for payload in numbers(500):
                a.transport.send(b.identity, payload)
            await a.until(lambda: len(a.received) == 500)
            assert b.received == [(a.identity, p) for p in numbers(500)]
            assert a.received == [(b.identity, p) for p in numbers(500)]

    net.run(scenario())


def test_order_holds_when_both_dial_each_other(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b")) as b:
            async with asyncio.TaskGroup() as both:
                both.create_task(a.connect(b))
                both.create_task(b.connect(a))
            for payload in numbers(300):
                a.transport.send(b.identity, payload)
                b.transport.send(a.identity, payload)
                await asyncio.sleep(0)
            await b.until(lambda: len(b.received) == 300)
            await a.until(lambda: len(a.received) == 300)
            assert [p for _, p in a.received] == [p for _, p in b.received] == numbers(300)

    net.run(scenario())


def test_connecting_twice_gives_the_same_identity_and_one_connection(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b")) as b:
            async with asyncio.TaskGroup() as both:
                calls = [both.create_task(a.connect(b)) for _ in range(2)]
            again = await a.connect(b)
            assert {*(call.result() for call in calls), again} == {b.identity}
            a.transport.send(b.identity, b"once")
            a.transport.send(b.identity, b"end")
            await b.until(lambda: (a.identity, b"end") in b.received)
            assert [p for _, p in b.received] == [b"once", b"end"]
            assert not a.lost
            assert not b.lost

    net.run(scenario())


def test_a_peer_of_another_run_is_refused_and_logged_once(net: Net) -> None:
    async def scenario() -> None:
        foreign = net.transport("a", run_id="other-run")
        async with End(foreign) as a, End(net.transport("b")) as b:
            with structlog.testing.capture_logs() as logs:
                for _ in range(3):
                    with pytest.raises(ProtocolError, match="run"):
                        await a.connect(b)
            with pytest.raises(PeerUnreachable):
                a.transport.send(b.identity, b"weights")
            assert [entry["event"] for entry in logs] == ["mesh.peer_refused"]
            assert logs[0]["peer"] == a.identity
            assert not b.received

    net.run(scenario())


@pytest.mark.parametrize("victim_dialled", [True, False])
def test_the_death_of_a_peer_is_noticed(net: Net, victim_dialled: bool) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as survivor, End(net.transport("b")) as victim:
            if victim_dialled:
                await victim.connect(survivor)
                victim.transport.send(survivor.identity, b"last words")
                await survivor.until(lambda: bool(survivor.received))
            else:
                await survivor.connect(victim)
            net.kill(victim.transport)
            await survivor.until(lambda: bool(survivor.lost))
            assert [peer for peer, _ in survivor.lost] == [victim.identity]
            with pytest.raises(PeerUnreachable):
                survivor.transport.send(victim.identity, b"hello?")
            assert not victim.lost

    net.run(scenario())


def test_leaving_is_noticed_by_who_dialled_and_by_who_was_dialled(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("c")) as c:
            async with End(net.transport("b")) as b:
                await a.connect(b)
                await b.connect(c)
            await a.until(lambda: bool(a.lost))
            await c.until(lambda: bool(c.lost))
            assert a.lost == [(b.identity, "the peer left")]
            assert c.lost == [(b.identity, "the peer left")]
            assert not b.lost

    net.run(scenario())


@pytest.mark.parametrize("dialler_ends", [True, False])
def test_a_connection_that_was_ended_can_be_made_again(net: Net, dialler_ends: bool) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b")) as b:
            await a.connect(b)
            ending, other = (a, b) if dialler_ends else (b, a)
            ending.transport.disconnect(other.identity)
            with pytest.raises(PeerUnreachable):
                ending.transport.send(other.identity, b"no")
            await other.until(lambda: bool(other.lost))
            assert not ending.lost
            assert await a.connect(b) == b.identity
            a.transport.send(b.identity, b"again")
            await b.until(lambda: (a.identity, b"again") in b.received)

    net.run(scenario())


def test_reconnecting_at_once_is_fine(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b"), echo=True) as b:
            for number in numbers(5):
                await a.connect(b)
                a.transport.send(b.identity, number)
                await a.until(lambda number=number: (b.identity, number) in a.received)
                a.transport.disconnect(b.identity)

    net.run(scenario())


def test_the_queue_to_a_peer_is_bounded(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b")) as b:
            await a.connect(b)
            for _ in range(QUEUE_PAYLOADS_MAX):
                a.transport.send(b.identity, b"x")
            with pytest.raises(PeerUnreachable, match="queue full"):
                a.transport.send(b.identity, b"x")
            await b.until(lambda: len(b.received) == QUEUE_PAYLOADS_MAX)
            a.transport.send(b.identity, b"space again")
            await b.until(lambda: len(b.received) == QUEUE_PAYLOADS_MAX + 1)

    net.run(scenario())


def test_megabytes_arrive_whole(net: Net) -> None:
    async def scenario() -> None:
        payloads = [bytes([i]) * (1 << 20) for i in range(8)]
        async with End(net.transport("a")) as a, End(net.transport("b"), echo=True) as b:
            await a.connect(b)
            for payload in payloads:
                a.transport.send(b.identity, payload)
            await a.until(lambda: len(a.received) == 8)
            assert [p for _, p in a.received] == payloads

    net.run(scenario())


def test_none_of_ten_thousand_is_lost(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a, End(net.transport("b"), echo=True) as b:
            await a.connect(b)
            for number, payload in enumerate(numbers(10_000)):
                a.transport.send(b.identity, payload)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await a.until(lambda: len(a.received) == 10_000)
            assert [p for _, p in a.received] == numbers(10_000)

    net.run(scenario())


def test_a_restarted_peer_at_the_same_address_is_a_new_identity(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a:
            async with End(net.transport("b")) as first:
                await a.connect(first)
                address = first.transport.address
            await a.until(lambda: bool(a.lost))
            async with End(net.transport("b", address)) as second:
                identity = await a.connect(second)
                assert identity == second.identity != first.identity
                with pytest.raises(PeerUnreachable):
                    a.transport.send(first.identity, b"for the dead")

    net.run(scenario())


def test_connecting_waits_for_a_listener_until_its_limit(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("probe")) as probe:
            address = probe.transport.address
        async with End(net.transport("a")) as a:
            with pytest.raises(PeerUnreachable, match="no answer"):
                await a.transport.connect(address, timeout_s=0.05)
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(a.transport.connect(address, timeout_s=LIMIT_S))
                await asyncio.sleep(0)
                async with End(net.transport("late", address)) as late:
                    assert await waiting == late.identity

    net.run(scenario())


def test_sending_to_a_stranger_raises(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a:
            with pytest.raises(PeerUnreachable):
                a.transport.send("run/role/nobody/00", b"")
            a.transport.disconnect("run/role/nobody/00")

    net.run(scenario())


def test_an_address_in_use_is_the_users_mistake(net: Net) -> None:
    async def scenario() -> None:
        async with End(net.transport("a")) as a:
            with pytest.raises(ConfigError, match="in use"):
                async with End(net.transport("b", a.transport.address)):
                    pass

    net.run(scenario())


def test_two_runs_on_one_host_get_two_addresses(net: Net) -> None:
    async def scenario() -> None:
        one, other = net.transport("a", run_id="one"), net.transport("a", run_id="other")
        async with End(one), End(other):
            assert one.address != other.address

    net.run(scenario())
