"""The processes that `bench_mesh` measures: for each way to call, a server and a caller.

`python -m services.cli.bench_mesh_peers serve WAY` prints the address it serves at.
`python -m services.cli.bench_mesh_peers call WAY ADDRESS` reads `{"outstanding": n, "seconds": s}`
lines, keeps so many calls outstanding for so long, and answers each line with the number of calls.

The ways:

- `raw`        blocking pyzmq, ROUTER and DEALER, opaque bytes: the floor.
- `transport`  `ZmqTransport` with the same opaque bytes.
- `mesh`       `Mesh.request` of a `TurnFinished`, validated on both sides.
- `asyncio`    `zmq.asyncio`, ROUTER and DEALER, same codec, same messages, same validation.
- `grpc`       `grpc.aio` with generic handlers, same codec, same messages, same validation.
"""

import asyncio
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import uvloop
import zmq
import zmq.asyncio

from common.codec import RequestEnvelope, decode, encode_reply, encode_request, validate
from common.identity import new_identity
from common.mesh import Mesh
from common.messages.scheduler import TurnFinished, TurnRecorded
from common.service import die_with_parent
from common.trajectory import ToolStatus
from common.transport.zmq import ZmqTransport

OPAQUE = bytes(300)
TIMEOUT_S = 30.0
METHOD = "/libra.Bench/Call"
Measure = Callable[[int, float], Awaitable[int]]
"""(outstanding, seconds) -> calls."""


def turn() -> TurnFinished:
    """A turn of ten sampled tokens: 443 bytes in its envelope, more than half of them names."""
    return TurnFinished(
        trajectory_id="calc-00012-3",
        lease=2,
        turn=1,
        prompt_tokens=b"",
        session_id="calc-00012-3",
        tool_server="calculator",
        action_tokens=bytes(40),
        action_logprobs=bytes(40),
        action_versions=bytes(40),
        observation_tokens=bytes(20),
        tool="calculator",
        tool_status=ToolStatus.OK,
        tool_latency_s=0.002,
        decode_s=0.1,
        queue_s=0.01,
        result=None,
    )


def handle(_: str, request: TurnFinished) -> TurnRecorded:
    """Answer a turn."""
    return TurnRecorded(go_on=request.turn >= 0)


async def keep_calling(
    call: Callable[[], Awaitable[object]], outstanding: int, seconds: float
) -> int:
    """Call from so many tasks at once, each again as soon as it has its answer."""
    until, calls = time.monotonic() + seconds, 0

    async def caller() -> None:
        nonlocal calls
        while time.monotonic() < until:
            await call()
            calls += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(outstanding):
            tasks.create_task(caller())
    return calls


def transport() -> ZmqTransport:
    """A fresh transport on loopback."""
    return ZmqTransport(str(new_identity("bench", "bench", "peer")))


# Blocking pyzmq.


def serve_raw() -> None:
    """Echo for ever."""
    socket = zmq.Context().socket(zmq.ROUTER)
    say(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    while True:
        socket.send_multipart(socket.recv_multipart())


def call_raw(address: str) -> None:
    """Keep frames outstanding on one DEALER."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    for outstanding, seconds in orders():
        until, calls = time.monotonic() + seconds, 0
        for _ in range(outstanding):
            socket.send(OPAQUE)
        while time.monotonic() < until:
            socket.recv()
            socket.send(OPAQUE)
            calls += 1
        for _ in range(outstanding):
            socket.recv()
        say(calls + outstanding)


# Our transport, with the same bytes.


def ignore_loss(peer: str, reason: str) -> None:
    """The parent ends both processes anyway."""


async def serve_transport() -> None:
    """Echo for ever."""
    ours = transport()

    def echo(batch: list[tuple[str, bytes]]) -> None:
        for peer, payload in batch:
            ours.send(peer, payload)

    ours.receive_with(echo, ignore_loss)
    async with ours:
        say(ours.address)
        await asyncio.Event().wait()


async def call_transport(address: str) -> Measure:
    """Keep payloads outstanding."""
    ours, finished = transport(), asyncio.Event()
    until, left, calls = 0.0, 0, 0

    def received(batch: list[tuple[str, bytes]]) -> None:
        nonlocal left, calls
        calls += len(batch)
        if time.monotonic() < until:
            for peer, _ in batch:
                ours.send(peer, OPAQUE)
        else:
            left -= len(batch)
            if not left:
                finished.set()

    ours.receive_with(received, ignore_loss)
    await ours.__aenter__()
    peer = await ours.connect(address, timeout_s=TIMEOUT_S)

    async def measure(outstanding: int, seconds: float) -> int:
        nonlocal until, left, calls
        until, left, calls = time.monotonic() + seconds, outstanding, 0
        finished.clear()
        for _ in range(outstanding):
            ours.send(peer, OPAQUE)
        await finished.wait()
        assert not ours.lost_edges
        return calls

    return measure


# The whole mesh.


async def serve_mesh() -> None:
    """Answer turns for ever."""
    async with Mesh(transport()) as mesh:
        mesh.serve(TurnFinished, handle)
        say(mesh.address)
        await asyncio.Event().wait()


async def call_mesh(address: str) -> Measure:
    """Request turns."""
    mesh, request = Mesh(transport()), turn()
    await mesh.__aenter__()
    peer = await mesh.connect(address, timeout_s=TIMEOUT_S)

    async def call() -> object:
        return await mesh.request(peer, request, timeout_s=TIMEOUT_S)

    return lambda outstanding, seconds: keep_calling(call, outstanding, seconds)


# zmq.asyncio with the same codec.


async def serve_asyncio() -> None:
    """Answer turns for ever."""
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    say(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    while True:
        route, frame = await socket.recv_multipart()
        asked = cast("RequestEnvelope", decode("", frame))
        reply = handle("", validate(TurnFinished, asked.body))
        answer = [route, encode_reply(asked.call_id, reply)]
        await socket.send_multipart(answer)  # pyright: ignore[reportUnknownMemberType]


async def call_asyncio(address: str) -> Measure:
    """Request turns; one task reads the answers."""
    socket, request, ids = zmq.asyncio.Context().socket(zmq.DEALER), turn(), itertools.count(1)
    socket.connect(address)
    answers: dict[int, asyncio.Future[TurnRecorded]] = {}

    async def read() -> None:
        while True:
            envelope = cast("Any", decode("", await socket.recv()))
            answers.pop(envelope.call_id).set_result(validate(TurnRecorded, envelope.body))

    async def call() -> object:
        call_id = next(ids)
        answers[call_id] = asyncio.get_running_loop().create_future()
        answer = answers[call_id]
        await socket.send(encode_request(call_id, request, TIMEOUT_S, ""))
        return await answer

    async def measure(outstanding: int, seconds: float) -> int:
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(read())
            calls = await keep_calling(call, outstanding, seconds)
            reader.cancel()
        return calls

    return measure


# grpc.aio with the same codec.


def grpc_module() -> Any:
    """Import gRPC, which comes with the development dependencies and without types."""
    return importlib.import_module("grpc")


async def serve_grpc() -> None:
    """Answer turns for ever."""
    grpc = grpc_module()

    async def answer(frame: bytes, _: object) -> bytes:
        asked = cast("RequestEnvelope", decode("", frame))
        return encode_reply(asked.call_id, handle("", validate(TurnFinished, asked.body)))

    _, service, method = METHOD.split("/")
    server = grpc.aio.server()
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    say(f"127.0.0.1:{port}")
    await asyncio.Event().wait()


async def call_grpc(address: str) -> Measure:
    """Request turns over one channel."""
    invoke = grpc_module().aio.insecure_channel(address).unary_unary(METHOD)
    request, ids = turn(), itertools.count(1)

    async def call() -> object:
        frame = encode_request(next(ids), request, TIMEOUT_S, "")
        envelope = cast("Any", decode("", await invoke(frame, timeout=TIMEOUT_S)))
        return validate(TurnRecorded, envelope.body)

    return lambda outstanding, seconds: keep_calling(call, outstanding, seconds)


# The process.

SERVERS: dict[str, Callable[[], Awaitable[None]]] = {
    "transport": serve_transport,
    "mesh": serve_mesh,
    "asyncio": serve_asyncio,
    "grpc": serve_grpc,
}
CALLERS: dict[str, Callable[[str], Awaitable[Measure]]] = {
    "transport": call_transport,
    "mesh": call_mesh,
    "asyncio": call_asyncio,
    "grpc": call_grpc,
}


def say(value: object) -> None:
    """Tell the parent one thing."""
    print(json.dumps(value), flush=True)


def orders() -> Iterator[tuple[int, float]]:
    """What the parent asks for, one line at a time, until it closes the pipe."""
    for line in sys.stdin:
        order = json.loads(line)
        yield order["outstanding"], order["seconds"]


def main() -> None:
    """Serve or call, as the arguments say."""
    die_with_parent(os.getppid())
    role, way = sys.argv[1:3]
    if way == "raw":
        return serve_raw() if role == "serve" else call_raw(sys.argv[3])
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    if role == "serve":
        return loop.run_until_complete(SERVERS[way]())
    measure = loop.run_until_complete(CALLERS[way](sys.argv[3]))
    for outstanding, seconds in orders():
        say(loop.run_until_complete(measure(outstanding, seconds)))
    return None


if __name__ == "__main__":
    main()
