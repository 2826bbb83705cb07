"""What `common.mesh` promises, on ZeroMQ (both event loops) and on the simulated network."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import uvloop

from common.clock import run_sim
from common.codec import encode_refusal, encode_reply, pack
from common.errors import (
    EngineError,
    PeerUnreachable,
    ProtocolError,
    Refusal,
    RequestRefused,
    RequestTimeout,
)
from common.executions import CACHED_REPLIES_MAX, CACHED_REPLY_AGE_S, Key, ReplyCache, SeenCalls
from common.identity import new_identity
from common.mesh import Mesh
from common.messages.base import Message, Request
from common.transport.base import Transport
from common.transport.sim import SimNetwork
from common.transport.zmq import ZmqTransport

LIMIT_S = 10.0


class Counted(Message):
    """Answers `Count`."""

    number: int


class Count(Request[Counted]):
    """Asks to count one up."""

    step: int


class Unserved(Request[Counted]):
    """Nobody serves this."""


@dataclass
class Net:
    """Runs scenarios on one kind of transport."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    make: Callable[[str], Transport]

    def mesh(self, name: str) -> Mesh:
        return Mesh(self.make(str(new_identity("run", "role", name))))


@pytest.fixture(params=["sim", "zmq-asyncio", "zmq-uvloop"])
def net(request: pytest.FixtureRequest) -> Net:
    match request.param:
        case "sim":
            return Net(run_sim, SimNetwork(seed=1).connect)
        case "zmq-asyncio":
            return Net(asyncio.run, ZmqTransport)
        case _:
            return Net(uvloop.run, ZmqTransport)


class Counter:
    """A handler of each kind, that can be held and tells what happened to it."""

    def __init__(self) -> None:
        self.number = 0
        self.cancelled = asyncio.Event()
        self.started = asyncio.Event()
        self.release = asyncio.Event()

    def count(self, sender: str, request: Count) -> Counted:
        self.number += request.step
        return Counted(number=self.number)

    async def count_when_released(self, sender: str, request: Count) -> Counted:
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return self.count(sender, request)


Scenario = Callable[[Mesh, Mesh, str, Counter], Awaitable[None]]


def run_pair(
    net: Net, scenario: Scenario, handler: Callable[[Counter], Any] = lambda c: c.count
) -> None:
    """Run with a caller connected to a server that counts."""

    async def run() -> None:
        counter = Counter()
        async with net.mesh("server") as server, net.mesh("caller") as caller:
            server.serve(Count, handler(counter))
            peer = await caller.connect(server.address, timeout_s=LIMIT_S)
            async with asyncio.timeout(LIMIT_S):
                await scenario(caller, server, peer, counter)

    net.run(run())


async def outcome_of(call: Awaitable[Counted]) -> Any:
    """How a call failed."""
    with pytest.raises((RequestRefused, PeerUnreachable)) as caught:
        await call
    return caught.value


def slow(counter: Counter) -> Any:
    return counter.count_when_released


def test_a_request_is_answered(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        assert peer == server.identity
        reply = await caller.request(peer, Count(step=3), timeout_s=LIMIT_S)
        assert reply == Counted(number=3)

    run_pair(net, scenario)


def test_a_coroutine_handler_is_awaited_while_others_are_answered(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
            await counter.started.wait()
            assert not held.done()
            counter.release.set()
        assert held.result() == Counted(number=1)

    run_pair(net, scenario, slow)


def test_many_requests_at_once_each_get_their_own_reply(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
                for _ in range(500)
            ]
        assert [call.result().number for call in calls] == list(range(1, 501))

    run_pair(net, scenario)


def test_both_sides_may_ask_over_one_connection(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        caller.serve(Count, Counter().count)
        await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)
        reply = await server.request(caller.identity, Count(step=5), timeout_s=LIMIT_S)
        assert reply.number == 5

    run_pair(net, scenario)


def test_silence_is_a_timeout_and_cancels_the_handler(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with pytest.raises(RequestTimeout) as caught:
            await caller.request(peer, Count(step=1), timeout_s=0.05)
        assert caught.value.kind == "Count"
        assert isinstance(caught.value, TimeoutError)
        await counter.cancelled.wait()

    run_pair(net, scenario, slow)


def test_cancelling_the_caller_cancels_the_handler(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
            await counter.started.wait()
            call.cancel()
        await counter.cancelled.wait()

    run_pair(net, scenario, slow)


def test_the_same_key_is_executed_once(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        replies = [
            await caller.request(peer, Count(step=1), timeout_s=LIMIT_S, key=key)
            for key in ("a", "a", "b", "a")
        ]
        assert [reply.number for reply in replies] == [1, 1, 2, 1]

    run_pair(net, scenario)


def test_a_duplicate_joins_the_execution_that_runs(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S, key="k"))
                for _ in range(3)
            ]
            await counter.started.wait()
            calls[0].cancel()
            counter.release.set()
        assert [call.result().number for call in calls[1:]] == [1, 1]
        again = await caller.request(peer, Count(step=1), timeout_s=LIMIT_S, key="k")
        assert again.number == 1
        assert not counter.cancelled.is_set()

    run_pair(net, scenario, slow)


def test_two_callers_with_the_same_key_are_two_executions(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with net.mesh("second") as second:
            await second.connect(server.address, timeout_s=LIMIT_S)
            one = await caller.request(peer, Count(step=1), timeout_s=LIMIT_S, key="k")
            two = await second.request(peer, Count(step=1), timeout_s=LIMIT_S, key="k")
        assert (one.number, two.number) == (1, 2)

    run_pair(net, scenario)


def refusing(refusal: Refusal) -> Callable[[Counter], Any]:
    def handler(sender: str, request: Count) -> Counted:
        raise RequestRefused(refusal, "in other words")

    async def later(sender: str, request: Count) -> Counted:
        await asyncio.sleep(0)
        return handler(sender, request)

    return lambda _: later if refusal is Refusal.DRAINING else handler


@pytest.mark.parametrize("refusal", list(Refusal))
def test_a_refusal_keeps_its_code_and_detail(net: Net, refusal: Refusal) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with pytest.raises(RequestRefused) as caught:
            await caller.request(peer, Count(step=1), timeout_s=LIMIT_S, key="k")
        assert (caught.value.refusal, caught.value.detail) == (refusal, "in other words")

    run_pair(net, scenario, refusing(refusal))


def test_an_expected_error_of_a_handler_is_a_failure_with_its_words(net: Net) -> None:
    def fail(sender: str, request: Count) -> Counted:
        raise EngineError("out of blocks")

    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with pytest.raises(RequestRefused, match="EngineError: out of blocks") as caught:
            await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)
        assert caught.value.refusal is Refusal.FAILED

    run_pair(net, scenario, lambda _: fail)


def test_a_handler_that_cancels_itself_is_a_failure_at_once(net: Net) -> None:
    async def give_up(sender: str, request: Count) -> Counted:
        raise asyncio.CancelledError

    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with pytest.raises(RequestRefused, match="cancelled"):
            await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)

    run_pair(net, scenario, lambda _: give_up)


def test_a_process_that_stops_tells_callers_to_ask_again(net: Net) -> None:
    async def run() -> None:
        counter = Counter()
        async with net.mesh("caller") as caller, asyncio.TaskGroup() as tasks:
            async with net.mesh("server") as server:
                server.serve(Count, counter.count_when_released)
                peer = await caller.connect(server.address, timeout_s=LIMIT_S)
                call = tasks.create_task(
                    outcome_of(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
                )
                async with asyncio.timeout(LIMIT_S):
                    await counter.started.wait()
            error = await call
            assert isinstance(error, PeerUnreachable) or error.refusal.retryable

    net.run(run())


def test_an_unknown_kind_is_refused_as_invalid_and_logged(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with (
            structlog.testing.capture_logs() as logs,
            pytest.raises(RequestRefused, match="Unserved is not served") as caught,
        ):
            await caller.request(peer, Unserved(), timeout_s=LIMIT_S)
        assert caught.value.refusal is Refusal.INVALID
        assert [entry["event"] for entry in logs] == ["mesh.request_refused"]

    run_pair(net, scenario)


def test_an_invalid_body_is_refused_with_the_name_of_the_field(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        wrong = Count.model_construct(step="three")
        with pytest.raises(RequestRefused, match="step: Input should be a valid integer") as caught:
            await caller.request(peer, wrong, timeout_s=LIMIT_S)
        assert caught.value.refusal is Refusal.INVALID
        assert counter.number == 0

    run_pair(net, scenario)


def test_a_reply_of_the_wrong_shape_is_a_protocol_error(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with pytest.raises(ProtocolError, match="number"):
            await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)

    run_pair(net, scenario, lambda _: lambda sender, request: Counted.model_construct(number="x"))


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_bug_in_a_handler_ends_who_entered_the_mesh(net: Net, coroutine: bool) -> None:
    def buggy(sender: str, request: Count) -> Counted:
        raise ZeroDivisionError

    async def buggy_later(sender: str, request: Count) -> Counted:
        return buggy(sender, request)

    async def serve(address: asyncio.Future[str]) -> None:
        async with net.mesh("server") as server:
            server.serve(Count, buggy_later if coroutine else buggy)
            address.set_result(server.address)
            await asyncio.Event().wait()

    async def serve_until_the_bug(address: asyncio.Future[str]) -> None:
        with pytest.raises(ExceptionGroup) as caught:
            await serve(address)
        assert caught.group_contains(ZeroDivisionError)

    async def scenario() -> None:
        address = asyncio.get_running_loop().create_future()
        async with net.mesh("caller") as caller, asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_until_the_bug(address))
            peer = await caller.connect(await address, timeout_s=LIMIT_S)
            with pytest.raises((PeerUnreachable, RequestRefused)):
                await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)

    net.run(scenario())


def test_a_bug_in_a_lost_peer_callback_ends_who_entered_the_mesh(net: Net) -> None:
    def buggy(peer: str, reason: str) -> None:
        raise ZeroDivisionError

    async def survive() -> None:
        async with net.mesh("survivor") as survivor:
            survivor.on_peer_lost(buggy)
            async with net.mesh("victim") as victim:
                await survivor.connect(victim.address, timeout_s=LIMIT_S)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        net.run(survive())
    assert caught.group_contains(ZeroDivisionError)


def test_losing_the_peer_fails_its_calls_at_once_and_tells(net: Net) -> None:
    async def scenario() -> None:
        counter, lost = Counter(), asyncio.Queue[str]()
        async with net.mesh("caller") as caller:
            caller.on_peer_lost(lambda peer, reason: lost.put_nowait(peer))
            async with asyncio.TaskGroup() as tasks, net.mesh("server") as server:
                server.serve(Count, counter.count_when_released)
                peer = await caller.connect(server.address, timeout_s=LIMIT_S)
                call = tasks.create_task(_expect_gone(caller, peer))
                await counter.started.wait()
            assert call.done()
            async with asyncio.timeout(LIMIT_S):
                assert await lost.get() == peer

    net.run(scenario())


async def _expect_gone(caller: Mesh, peer: str, step: int = 1) -> None:
    with pytest.raises((PeerUnreachable, RequestRefused)):
        await caller.request(peer, Count(step=step), timeout_s=LIMIT_S)


def test_losing_the_caller_cancels_its_handlers(net: Net) -> None:
    async def scenario() -> None:
        counter = Counter()
        async with net.mesh("server") as server:
            server.serve(Count, counter.count_when_released)
            async with asyncio.TaskGroup() as tasks, net.mesh("caller") as caller:
                peer = await caller.connect(server.address, timeout_s=LIMIT_S)
                tasks.create_task(_expect_gone(caller, peer))
                await counter.started.wait()
            async with asyncio.timeout(LIMIT_S):
                await counter.cancelled.wait()

    net.run(scenario())


def test_disconnecting_fails_what_is_pending(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_expect_gone(caller, peer))
            await counter.started.wait()
            caller.disconnect(peer)
        await counter.cancelled.wait()
        caller.disconnect(peer)

    run_pair(net, scenario, slow)


def test_a_request_to_a_stranger_is_unreachable(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with pytest.raises(PeerUnreachable):
            await caller.request("run/role/nobody/00", Count(step=1), timeout_s=LIMIT_S)

    run_pair(net, scenario)


def test_too_many_running_handlers_are_refused(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.executions.RUNNING_MAX", 1)

    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
            await counter.started.wait()
            with pytest.raises(RequestRefused) as caught:
                await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)
            assert caught.value.refusal is Refusal.OVERLOADED
            assert caught.value.refusal.retryable
            counter.release.set()
        assert held.result().number == 1

    run_pair(net, scenario, slow)


def test_garbage_from_a_peer_is_dropped_and_logged(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        with structlog.testing.capture_logs() as logs:
            for garbage in (
                b"",
                b"\xc1",
                pack([0, 1]),
                pack({"a": 1}),
                pack([0, 1, "K", -1.0, "", {}]),
            ):
                caller._transport.send(peer, garbage)
            await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)
        assert [entry["event"] for entry in logs] == ["mesh.message_dropped"] * 5

    run_pair(net, scenario)


def test_an_answer_to_nothing_or_to_somebody_elses_call_is_ignored(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with net.mesh("liar") as liar, asyncio.TaskGroup() as tasks:
            await liar.connect(caller.address, timeout_s=LIMIT_S)
            call = tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
            await counter.started.wait()
            for call_id in range(10):
                liar._send(caller.identity, encode_reply(call_id, Counted(number=666)))
            with pytest.raises(RequestRefused, match="not served"):
                await liar.request(caller.identity, Unserved(), timeout_s=LIMIT_S)
            counter.release.set()
        assert call.result().number == 1

    run_pair(net, scenario, slow)


def test_an_unknown_refusal_is_a_protocol_error(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(_expect_nonsense(caller, peer))
            await counter.started.wait()
            for call_id in range(5):
                server._send(caller.identity, encode_refusal(call_id, "mood", ""))
            await call

    run_pair(net, scenario, slow)


async def _expect_nonsense(caller: Mesh, peer: str) -> None:
    with pytest.raises(ProtocolError, match="mood"):
        await caller.request(peer, Count(step=1), timeout_s=LIMIT_S)


def test_cancelling_a_call_that_was_just_refused_is_quiet(net: Net) -> None:
    async def scenario(caller: Mesh, server: Mesh, peer: str, counter: Counter) -> None:
        complaints: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(caller.request(peer, Count(step=1), timeout_s=LIMIT_S))
            await counter.started.wait()
            caller._fail_calls(peer, "as if it had been lost")
            call.cancel()
        gc.collect()
        assert call.cancelled()
        assert not complaints

    run_pair(net, scenario, slow)


def test_requests_after_a_bug_are_not_handled(net: Net) -> None:
    handled: list[int] = []

    def buggy(sender: str, request: Count) -> Counted:
        handled.append(request.step)
        raise ZeroDivisionError

    async def ask_often(address: str) -> None:
        async with net.mesh("caller") as caller, asyncio.TaskGroup() as tasks:
            peer = await caller.connect(address, timeout_s=LIMIT_S)
            for step in range(10):
                tasks.create_task(_expect_gone(caller, peer, step))

    async def serve() -> None:
        async with asyncio.TaskGroup() as callers, net.mesh("server") as server:
            server.serve(Count, buggy)
            callers.create_task(ask_often(server.address))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        net.run(serve())
    assert caught.group_contains(ZeroDivisionError)
    assert handled == [0]


def test_the_reply_cache_is_bounded_by_count_and_age() -> None:
    cache = ReplyCache()
    keys: list[Key] = [("s", "k", str(i)) for i in range(CACHED_REPLIES_MAX + 1)]
    for key in keys:
        cache.put(key, Counted(number=1), now=0.0)
    assert cache.get(keys[0], now=1.0) is None
    assert cache.get(keys[1], now=1.0) == Counted(number=1)
    assert cache.get(keys[1], now=CACHED_REPLY_AGE_S) is None


def test_seen_calls_are_remembered_over_a_thousand_others() -> None:
    seen = SeenCalls()
    assert all(seen.add("s", i) for i in range(1024))
    assert not any(seen.add("s", i) for i in range(1024))
    assert seen.add("other", 1)
    assert all(seen.add("s", i) for i in range(1024, 4000))
    seen.forget("s")
    assert seen.add("s", 3999)
