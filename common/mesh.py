"""Requests and replies between the processes of a run, on any transport.

A caller awaits `request`; the peer's handler answers, refuses, or the deadline passes. The mesh
promises: every wait ends; a handler runs at most once for one call, however often the transport
delivers it; nobody waiting any more cancels the handler; a lost peer fails its calls at once.
It does not retry: that is the caller's, with an idempotency key where it matters.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from inspect import iscoroutine
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import structlog
from pydantic import ValidationError

from common.codec import (
    CancelEnvelope,
    Envelope,
    RefusalEnvelope,
    ReplyEnvelope,
    RequestEnvelope,
    decode,
    encode_cancel,
    encode_refusal,
    encode_reply,
    encode_request,
    explain,
    validate,
)
from common.deadlines import DeadlineWheel
from common.errors import (
    LibraError,
    PeerUnreachable,
    ProtocolError,
    Refusal,
    RequestRefused,
    RequestTimeout,
)
from common.messages.base import Message, Request
from common.transport.base import Transport

log = structlog.get_logger()

RUNNING_MAX = 4096
"""Coroutine handlers that run at once; more are refused. Each may hold a message of megabytes."""
SEEN_CALLS_MIN = 1024
"""Call ids remembered per peer; a transport repeats a message within far fewer."""
CACHED_REPLIES_MAX = 4096
CACHED_REPLY_AGE_S = 300.0
"""Longer than any caller goes on retrying with the same key."""

R = TypeVar("R", bound=Message)
Handler = Callable[[str, Any], Message | Awaitable[Message]]
Key = tuple[str, str, str]
"""Sender, kind, idempotency key. Two senders that choose the same key mean two things."""


@dataclass(eq=False, slots=True)
class _Call:
    """A request of ours that is not answered yet."""

    call_id: int
    peer: str
    kind: str
    timeout_s: float
    reply_type: type[Message]
    answer: asyncio.Future[Message]


@dataclass(eq=False, slots=True)
class _Execution:
    """A coroutine handler at work, and the calls that wait for its reply."""

    key: Key | None
    task: asyncio.Task[None] | None = None
    waiters: "dict[_Waiter, None]" = field(default_factory=dict["_Waiter", None])


@dataclass(eq=False, slots=True)
class _Waiter:
    """One call of a peer that waits for an execution until its budget is used up."""

    sender: str
    call_id: int
    execution: _Execution
    slot: "dict[_Waiter, None]"


class _SeenCalls:
    """The last call ids of one peer: at least `SEEN_CALLS_MIN` of them."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._older: set[int] = set()

    def is_new(self, call_id: int) -> bool:
        """Remember the id; False when it was remembered already."""
        if call_id in self._recent or call_id in self._older:
            return False
        if len(self._recent) >= SEEN_CALLS_MIN:
            self._recent, self._older = set(), self._recent
        self._recent.add(call_id)
        return True


class _ReplyCache:
    """Replies by idempotency key, bounded by count and age."""

    def __init__(self) -> None:
        self._replies: OrderedDict[Key, tuple[float, Message]] = OrderedDict()

    def get(self, key: Key, now: float) -> Message | None:
        self._forget_old(now)
        entry = self._replies.get(key)
        return entry[1] if entry else None

    def put(self, key: Key, reply: Message, now: float) -> None:
        self._replies[key] = now, reply
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._replies:
            made, _ = next(iter(self._replies.values()))
            if len(self._replies) <= CACHED_REPLIES_MAX and now - made < CACHED_REPLY_AGE_S:
                return
            self._replies.popitem(last=False)


class _BugCarrier:
    """Carries what a plain handler or a callback raises from the loop to the task group."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._fail(error)
        return True


class Mesh:
    """One process's end of the mesh. Enter it in the task that should end when a handler fails."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        transport.receive_with(self._receive, self._lost)
        self._handlers: dict[str, tuple[type[Request[Any]], Handler]] = {}
        self._peer_lost: list[Callable[[str, str], None]] = []
        self._call_ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._seen: dict[str, _SeenCalls] = {}
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._executions: dict[_Execution, None] = {}
        self._keyed: dict[Key, _Execution] = {}
        self._replies = _ReplyCache()
        self._bugs = _BugCarrier(self._fail)
        self._closed = True

    @property
    def identity(self) -> str:
        """Of this process."""
        return self._transport.identity

    @property
    def address(self) -> str:
        """Where others connect to."""
        return self._transport.address

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._call_deadlines = DeadlineWheel(self._loop, self._time_out)
        self._budgets = DeadlineWheel(self._loop, self._stop_waiting)
        self._tasks = asyncio.TaskGroup()
        await self._transport.__aenter__()
        await self._tasks.__aenter__()
        self._closed = False
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the network; raise what a handler failed with, as an exception group."""
        self._closed = True
        self._fail_calls(None, "this process leaves the mesh")
        for execution in list(self._executions):
            self._cancel(execution)
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            self._call_deadlines.close()
            self._budgets.close()
            await self._transport.__aexit__(kind, error, traceback)

    def serve(
        self,
        request_type: type[Request[R]],
        handler: Callable[[str, Any], R | Awaitable[R]],
    ) -> None:
        """Answer requests of one type with `handler(sender identity, request)`.

        A plain function is called at once, with all messages that arrived in the same loop turn
        before the loop goes on; a coroutine function becomes a task. It refuses by raising
        `RequestRefused`; another `LibraError` is answered with `FAILED`; anything else is a bug
        and is raised where the mesh was entered.
        """
        kind = request_type.__name__
        assert kind not in self._handlers, f"{kind} is served twice"
        self._handlers[kind] = request_type, handler

    async def connect(self, address: str, *, timeout_s: float) -> str:
        """Connect and return the identity of who answers; see `Transport.connect`."""
        return await self._transport.connect(address, timeout_s=timeout_s)

    def disconnect(self, peer: str) -> None:
        """End the connection to a peer; what is pending with it fails. Unknown peers are fine."""
        self._transport.disconnect(peer)
        self._forget(peer, "disconnected by this process")

    def on_peer_lost(self, callback: Callable[[str, str], None]) -> None:
        """Call `callback(peer, reason)` whenever a connection is lost, not when it is ended."""
        self._peer_lost.append(callback)

    async def request(
        self, peer: str, request: Request[R], *, timeout_s: float, key: str = ""
    ) -> R:
        """Ask a peer and wait for its reply. Cancelling the wait cancels its handler.

        Args:
            peer: Identity of a connected peer.
            request: What is asked.
            timeout_s: Limit of the wait and of the handler.
            key: Idempotency key: the peer executes the same kind and key of this process once,
                and answers later ones with the same reply.

        Raises:
            RequestTimeout: no reply in time; the peer may still have acted.
            PeerUnreachable: there is no connection, or it was lost while waiting.
            ProtocolError: the reply cannot be understood.
            RequestRefused: the handler refused or failed.
        """
        answer: asyncio.Future[Message] = self._loop.create_future()
        call_id, kind = next(self._call_ids), type(request).__name__
        self._transport.send(peer, encode_request(call_id, request, float(timeout_s), key))
        call = _Call(call_id, peer, kind, timeout_s, request.reply_type, answer)
        self._calls[call_id] = call
        slot = self._call_deadlines.add(call, timeout_s)
        try:
            return cast("R", await answer)
        except asyncio.CancelledError:
            if self._calls.pop(call_id, None):
                self._send(peer, encode_cancel(call_id))
            elif not answer.cancelled():
                answer.exception()  # Nobody reads it any more; say so to asyncio.
            raise
        finally:
            slot.pop(call, None)

    # What arrives.

    def _receive(self, batch: list[tuple[str, bytes]]) -> None:
        with self._bugs:
            for sender, payload in batch:
                if self._closed:
                    return
                try:
                    envelope = decode(sender, payload)
                except ProtocolError as error:
                    log.warning("mesh.message_dropped", peer=sender, reason=error.reason)
                else:
                    self._dispatch(sender, envelope)

    def _dispatch(self, sender: str, envelope: Envelope) -> None:
        if isinstance(envelope, RequestEnvelope):
            self._on_request(sender, envelope)
        elif isinstance(envelope, CancelEnvelope):
            self._on_cancel(sender, envelope.call_id)
        else:
            self._on_answer(sender, envelope)

    def _on_answer(self, sender: str, envelope: ReplyEnvelope | RefusalEnvelope) -> None:
        call = self._calls.get(envelope.call_id)
        if call is None or call.peer != sender or call.answer.done():
            return  # Too late, a repetition, or not theirs to answer.
        del self._calls[envelope.call_id]
        if isinstance(envelope, RefusalEnvelope):
            call.answer.set_exception(_as_error(sender, envelope))
            return
        try:
            call.answer.set_result(validate(call.reply_type, envelope.body))
        except ValidationError as error:
            reason = f"reply to {call.kind}: {explain(error)}"
            log.warning("mesh.message_dropped", peer=sender, kind=call.kind, reason=reason)
            call.answer.set_exception(ProtocolError(sender, reason))

    def _on_request(self, sender: str, asked: RequestEnvelope) -> None:
        if not self._first_time(sender, asked.call_id):
            return
        key = (sender, asked.kind, asked.key) if asked.key else None
        if key and self._join(key, asked):
            return
        try:
            request_type, handler = self._handlers[asked.kind]
            request = validate(request_type, asked.body)
        except KeyError:
            detail = f"{asked.kind} is not served here"
            self._refuse(sender, asked.call_id, asked.kind, Refusal.INVALID, detail)
        except ValidationError as error:
            self._refuse(sender, asked.call_id, asked.kind, Refusal.INVALID, explain(error))
        else:
            self._handle(sender, asked, key, handler, request)

    def _handle(
        self,
        sender: str,
        asked: RequestEnvelope,
        key: Key | None,
        handler: Handler,
        request: Message,
    ) -> None:
        try:
            outcome = handler(sender, request)
        except LibraError as error:
            self._refuse(sender, asked.call_id, asked.kind, *_as_refusal(error))
        else:
            if isinstance(outcome, Message):
                self._send(sender, encode_reply(asked.call_id, outcome))
                if key:
                    self._replies.put(key, outcome, self._loop.time())
            else:
                self._spawn(sender, asked, key, outcome)

    def _first_time(self, sender: str, call_id: int) -> bool:
        seen = self._seen.get(sender)
        if seen is None:
            seen = self._seen[sender] = _SeenCalls()
        return seen.is_new(call_id)

    def _join(self, key: Key, asked: RequestEnvelope) -> bool:
        """Answer from the cache, or wait for the execution that runs under the key."""
        if reply := self._replies.get(key, self._loop.time()):
            self._send(key[0], encode_reply(asked.call_id, reply))
            return True
        if execution := self._keyed.get(key):
            self._wait(execution, key[0], asked)
            return True
        return False

    # Coroutine handlers.

    def _spawn(
        self, sender: str, asked: RequestEnvelope, key: Key | None, work: Awaitable[Message]
    ) -> None:
        if len(self._executions) >= RUNNING_MAX:
            if iscoroutine(work):
                work.close()
            detail = f"{RUNNING_MAX} handlers run"
            self._refuse(sender, asked.call_id, asked.kind, Refusal.OVERLOADED, detail)
            return
        execution = _Execution(key)
        self._executions[execution] = None
        if key:
            self._keyed[key] = execution
        self._wait(execution, sender, asked)
        execution.task = self._tasks.create_task(
            self._execute(execution, asked, work), name=f"{asked.kind} of {sender}"
        )
        execution.task.add_done_callback(lambda _: self._end(execution, work))

    async def _execute(
        self, execution: _Execution, asked: RequestEnvelope, work: Awaitable[Message]
    ) -> None:
        try:
            reply = await work
        except LibraError as error:
            self._refuse_waiters(execution, asked.kind, *_as_refusal(error))
        except asyncio.CancelledError:
            detail = "the handler was cancelled"
            self._refuse_waiters(execution, asked.kind, Refusal.FAILED, detail)
            raise
        except Exception:
            self._closed = True  # The task group cancels everything else.
            raise
        else:
            if execution.key:
                self._replies.put(execution.key, reply, self._loop.time())
            for waiter in execution.waiters:
                self._send(waiter.sender, encode_reply(waiter.call_id, reply))

    def _refuse_waiters(
        self, execution: _Execution, kind: str, refusal: Refusal, detail: str
    ) -> None:
        for waiter in execution.waiters:
            self._refuse(waiter.sender, waiter.call_id, kind, refusal, detail)

    def _end(self, execution: _Execution, work: Awaitable[Message]) -> None:
        if iscoroutine(work):
            work.close()  # It was never started if its task was cancelled before its first step.
        self._executions.pop(execution, None)
        for waiter in list(execution.waiters):
            self._remove(waiter)
        if execution.key and self._keyed.get(execution.key) is execution:
            del self._keyed[execution.key]

    def _wait(self, execution: _Execution, sender: str, asked: RequestEnvelope) -> None:
        waiter = _Waiter(sender, asked.call_id, execution, {})
        waiter.slot = self._budgets.add(waiter, asked.budget_s)
        execution.waiters[waiter] = None
        self._waiters[sender, asked.call_id] = waiter

    def _remove(self, waiter: _Waiter) -> None:
        waiter.slot.pop(waiter, None)
        waiter.execution.waiters.pop(waiter, None)
        self._waiters.pop((waiter.sender, waiter.call_id), None)

    def _stop_waiting(self, waiter: _Waiter) -> None:
        """The budget is used up, or the caller is gone. The last one cancels the handler."""
        self._remove(waiter)
        if not waiter.execution.waiters:
            self._cancel(waiter.execution)

    def _cancel(self, execution: _Execution) -> None:
        """Cancel a handler. A repetition of its key from now on is executed anew."""
        if execution.key:
            self._keyed.pop(execution.key, None)
        if execution.task:
            execution.task.cancel()

    def _on_cancel(self, sender: str, call_id: int) -> None:
        self._first_time(sender, call_id)  # A request that arrives after its cancellation.
        if waiter := self._waiters.get((sender, call_id)):
            self._stop_waiting(waiter)

    # What ends.

    def _time_out(self, call: _Call) -> None:
        if self._calls.pop(call.call_id, None):
            call.answer.set_exception(RequestTimeout(call.peer, call.kind, call.timeout_s))
            self._send(call.peer, encode_cancel(call.call_id))

    def _lost(self, peer: str, reason: str) -> None:
        self._forget(peer, reason)
        with self._bugs:
            for callback in self._peer_lost:
                callback(peer, reason)

    def _forget(self, peer: str, reason: str) -> None:
        self._fail_calls(peer, reason)
        self._seen.pop(peer, None)
        for waiter in [w for w in self._waiters.values() if w.sender == peer]:
            self._stop_waiting(waiter)

    def _fail(self, error: Exception) -> None:
        """End the task that entered the mesh, unless it is ending already."""
        if not self._closed:
            self._closed = True
            self._tasks.create_task(_raise(error), name="mesh.bug")

    def _fail_calls(self, peer: str | None, reason: str) -> None:
        for call in [c for c in self._calls.values() if peer in (None, c.peer)]:
            del self._calls[call.call_id]
            if not call.answer.done():
                call.answer.set_exception(PeerUnreachable(call.peer, reason))

    # What leaves.

    def _refuse(self, sender: str, call_id: int, kind: str, refusal: Refusal, detail: str) -> None:
        if refusal in (Refusal.INVALID, Refusal.FAILED):
            log.warning(
                "mesh.request_refused", peer=sender, kind=kind, reason=refusal.value, detail=detail
            )
        self._send(sender, encode_refusal(call_id, refusal.value, detail))

    def _send(self, peer: str, payload: bytes) -> None:
        """Send what nobody waits for: the other side has a deadline of its own."""
        try:
            self._transport.send(peer, payload)
        except PeerUnreachable as error:
            log.warning("mesh.message_dropped", peer=peer, reason=error.reason)


def _as_refusal(error: LibraError) -> tuple[Refusal, str]:
    if isinstance(error, RequestRefused):
        return error.refusal, error.detail
    return Refusal.FAILED, f"{type(error).__name__}: {error}"


def _as_error(sender: str, envelope: RefusalEnvelope) -> LibraError:
    try:
        return RequestRefused(Refusal(envelope.code), envelope.detail)
    except ValueError:
        return ProtocolError(sender, f"unknown refusal {envelope.code[:40]!r}")


async def _raise(error: Exception) -> None:
    raise error
