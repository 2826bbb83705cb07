"""What strangers may send to a `ZmqTransport`, and what its descriptors may hide."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import structlog
import uvloop
import zmq

from common.codec import pack, unpack
from common.errors import PeerUnreachable
from common.identity import new_identity
from common.messages.base import PROTOCOL_VERSION
from common.transport import zmq as transport_module
from common.transport.zmq import ZmqTransport
from common.transport.zmq_link import LINGER_MS

LIMIT_S = 10.0
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


class Stranger:
    """A bare DEALER that says what it wants."""

    def __init__(self, address: str, route: str, *, frames_max: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, route.encode())
        self.socket.set(zmq.LINGER, LINGER_MS)
        self.socket.set(zmq.RCVHWM, frames_max)
        self.socket.set(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        self.socket.connect(address)

    async def say(self, *parts: bytes) -> None:
        await asyncio.to_thread(self.socket.send_multipart, parts)

    async def hear(self) -> dict[str, Any]:
        return unpack("us", await asyncio.to_thread(self.socket.recv))

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def strangers() -> Iterator[list[Stranger]]:
    opened: list[Stranger] = []
    yield opened
    for stranger in opened:
        stranger.close()


def hello(identity: str, version: int = PROTOCOL_VERSION, **more: object) -> bytes:
    return pack({"what": "hello", "identity": identity, "protocol_version": version, **more})


class Heard:
    """What a transport received."""

    def __init__(self) -> None:
        self.payloads: list[tuple[str, bytes]] = []
        self.something = asyncio.Event()

    def receive(self, batch: list[tuple[str, bytes]]) -> None:
        self.payloads += batch
        self.something.set()


def listen() -> tuple[ZmqTransport, Heard]:
    transport, heard = ZmqTransport(str(new_identity("run", "role", "us"))), Heard()
    transport.receive_with(heard.receive, lambda peer, reason: None)
    return transport, heard


def test_a_stranger_with_a_proper_hello_is_a_peer(run: Run, strangers: list[Stranger]) -> None:
    async def scenario() -> None:
        transport, heard = listen()
        async with transport:
            strangers.append(Stranger(transport.address, "run/role/them/00/0"))
            await strangers[0].say(hello("run/role/them/00"))
            assert (await strangers[0].hear())["what"] == "welcome"
            await strangers[0].say(pack([b"one", b"two"]))
            await strangers[0].say(hello("run/role/them/00"))
            assert (await strangers[0].hear())["what"] == "welcome"
            assert heard.payloads == [("run/role/them/00", b"one"), ("run/role/them/00", b"two")]

    run(scenario())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (hello("run/role/them/00", PROTOCOL_VERSION + 1), "version"),
        (hello("other/role/them/00"), "routing id"),
        (hello("run/role/somebody-else/00"), "routing id"),
    ],
)
def test_a_hello_of_somebody_else_is_refused(
    run: Run, strangers: list[Stranger], said: bytes, why: str
) -> None:
    async def scenario() -> None:
        transport, _ = listen()
        async with transport:
            strangers.append(Stranger(transport.address, "run/role/them/00/0"))
            await strangers[0].say(said)
            answer = await strangers[0].hear()
            assert answer["what"] == "refuse"
            assert why in answer["detail"]
            with pytest.raises(PeerUnreachable):
                transport.send("run/role/them/00", b"")

    run(scenario())


def test_garbage_is_dropped_and_logged_and_the_next_peer_is_served(
    run: Run, strangers: list[Stranger]
) -> None:
    async def scenario() -> None:
        transport, heard = listen()
        async with transport:
            strangers.append(Stranger(transport.address, "run/role/them/00/0"))
            with structlog.testing.capture_logs() as logs:
                await strangers[0].say(b"\xc1")
                await strangers[0].say(b"")
                await strangers[0].say(pack("text"))
                await strangers[0].say(pack(None))
                await strangers[0].say(hello("not an identity"))
                await strangers[0].say(hello("run/role/them/00", more=1))
                await strangers[0].say(hello("run/role/them/00"), b"a second part")
                await strangers[0].say(pack({"what": "x", "identity": "", "protocol_version": 1}))
                await strangers[0].say(hello("run/role/them/00"))
                assert (await strangers[0].hear())["what"] == "welcome"
                await strangers[0].say(pack([b"good", 7]))
                await strangers[0].say(hello("run/role/them/00"))
                assert (await strangers[0].hear())["what"] == "welcome"
            assert {entry["event"] for entry in logs} == {"mesh.peer_refused"}
            assert len(logs) >= 5
            assert [payload for _, payload in heard.payloads] in ([b"good"], [])

    run(scenario())


def test_payloads_before_the_hello_are_answered_with_bye(
    run: Run, strangers: list[Stranger]
) -> None:
    async def scenario() -> None:
        transport, heard = listen()
        async with transport:
            strangers.append(Stranger(transport.address, "run/role/them/00/0"))
            await strangers[0].say(pack([b"let me in"]))
            assert (await strangers[0].hear())["what"] == "bye"
            assert not heard.payloads

    run(scenario())


def test_a_hello_nobody_welcomed_is_said_again_to_whoever_listens_next(run: Run) -> None:
    async def scenario() -> None:
        context, (us, _), heard = zmq.Context(), listen(), asyncio.Event()
        silent = context.socket(zmq.ROUTER)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        async with us, asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            address = f"tcp://127.0.0.1:{port}"
            dialling = tasks.create_task(us.connect(address, timeout_s=LIMIT_S))
            _, frame = await asyncio.to_thread(silent.recv_multipart)
            assert unpack("us", frame)["what"] == "hello"
            silent.close(linger=0)
            context.term()
            late = ZmqTransport(str(new_identity("run", "role", "late")), address)
            late.receive_with(lambda batch: heard.set(), lambda peer, reason: None)
            async with late:
                assert await dialling == late.identity
                us.send(late.identity, b"at last")
                await heard.wait()

    run(scenario())


def test_what_is_no_address_is_unreachable(run: Run) -> None:
    async def scenario() -> None:
        us, _ = listen()
        async with us:
            with pytest.raises(PeerUnreachable):
                await us.connect("nonsense", timeout_s=LIMIT_S)

    run(scenario())


def test_a_dial_that_is_given_up_leaves_nothing(run: Run) -> None:
    async def scenario() -> None:
        us, _ = listen()
        async with us, asyncio.TaskGroup() as tasks:
            dialling = tasks.create_task(us.connect("tcp://127.0.0.1:1", timeout_s=LIMIT_S))
            await asyncio.sleep(0)
            dialling.cancel()
        assert not us._dials
        assert not us._dials_by_link

    run(scenario())


async def fill(transport: ZmqTransport, peer: str, sent: list[bytes]) -> None:
    payload = bytes(1 << 20)
    while True:
        transport.send(peer, payload)
        sent.append(payload)
        await asyncio.sleep(0)


def test_a_peer_that_does_not_read_fills_its_own_queue_only(
    run: Run, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.transport.zmq_link.HIGH_WATER_FRAMES", 8)
    monkeypatch.setattr("common.transport.zmq_frames.QUEUE_BYTES_MAX", 16 << 20)

    async def scenario() -> None:
        (us, _), (other, heard), sent = listen(), listen(), list[bytes]()
        async with us, other, asyncio.timeout(LIMIT_S):
            await us.connect(other.address, timeout_s=LIMIT_S)
            strangers.append(Stranger(us.address, "run/role/stuck/00/0", frames_max=8))
            await strangers[0].say(hello("run/role/stuck/00"))
            assert (await strangers[0].hear())["what"] == "welcome"
            with pytest.raises(PeerUnreachable, match="queue full"):
                await fill(us, "run/role/stuck/00", sent)
            assert 16 <= len(sent) < 64
            us.send(other.identity, b"and you?")
            await heard.something.wait()
            us.disconnect("run/role/stuck/00")

    run(scenario())


def test_dialling_one_process_under_two_addresses_leaves_one_connection(run: Run) -> None:
    async def scenario() -> None:
        (a, _), (b, heard) = listen(), listen()
        async with a, b, asyncio.timeout(LIMIT_S):
            first = await a.connect(b.address, timeout_s=LIMIT_S)
            other_address = b.address.replace("127.0.0.1", "localhost")
            assert await a.connect(other_address, timeout_s=LIMIT_S) == first == b.identity
            a.send(first, b"through")
            await heard.something.wait()
            assert heard.payloads == [(a.identity, b"through")]

    run(scenario())


def test_no_edge_is_lost_under_traffic_in_both_directions(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "WATCHDOG_S", 0.005)

    async def scenario() -> None:
        transports = [ZmqTransport(str(new_identity("run", "role", name))) for name in "ab"]
        done, counts = asyncio.Event(), [0, 0]

        def bouncing(number: int) -> Callable[[list[tuple[str, bytes]]], None]:
            def bounce(batch: list[tuple[str, bytes]]) -> None:
                counts[number] += len(batch)
                for peer, payload in batch:
                    transports[number].send(peer, payload)
                if min(counts) > 5_000:
                    done.set()

            return bounce

        for number, transport in enumerate(transports):
            transport.receive_with(bouncing(number), lambda peer, reason: None)
        async with transports[0] as a, transports[1] as b, asyncio.timeout(LIMIT_S):
            await a.connect(b.address, timeout_s=LIMIT_S)
            for _ in range(3):
                a.send(b.identity, b"ball")
                b.send(a.identity, b"ball")
            await done.wait()
        assert [transport.lost_edges for transport in transports] == [0, 0]

    run(scenario())


def test_the_watchdog_revives_a_socket_whose_edge_was_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "WATCHDOG_S", 0.01)

    async def scenario() -> None:
        (a, _), (b, heard) = listen(), listen()
        async with a, b, asyncio.timeout(LIMIT_S):
            await a.connect(b.address, timeout_s=LIMIT_S)
            asyncio.get_running_loop().remove_reader(b._router._fd)
            a.send(b.identity, b"unannounced")
            while not heard.something.is_set():
                b._router._get(zmq.EVENTS)  # Swallows the edge, as an unchecked send would.
                await asyncio.sleep(0.005)
            assert b.lost_edges == 1

    run(scenario())
