"""Requests and replies between the processes of a run, on any transport.

A caller awaits `request`; the peer's handler answers, refuses, or the deadline passes. The mesh
promises: every wait ends; a handler runs at most once for one call, however often the transport
delivers it; a handler for which nobody waits any more is cancelled; a lost peer fails its calls at
once. It does not retry: that is the caller's, with an idempotency key where it matters.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from common.executions import Executions, SeenCalls
from common.messages.base import Message, Request
from common.transport.base import Transport

log = structlog.get_logger()

R = TypeVar("R", bound=Message)
Handler = Callable[[str, Any], Message | Awaitable[Message]]


@dataclass(eq=False, slots=True)
class _Call:
    """A request of ours that is not answered yet."""

    call_id: int
    peer: str
    kind: str
    timeout_s: float
    reply_type: type[Message]
    answer: asyncio.Future[Message]


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
        self._seen = SeenCalls()
        self._bugs = _BugCarrier(self._fail)
        self._open = False

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
        self._deadlines = DeadlineWheel(self._loop, self._time_out)
        self._tasks = asyncio.TaskGroup()
        self._executions = Executions(self._tasks, self, self._close_intake)
        await self._transport.__aenter__()
        await self._tasks.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the network; raise what a handler failed with, as an exception group."""
        self._close_intake()
        self._fail_calls(None, "this process leaves the mesh")
        self._executions.close()
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            self._deadlines.close()
            await self._transport.__aexit__(kind, error, traceback)

    def serve(
        self,
        request_type: type[Request[R]],
        handler: Callable[[str, Any], R | Awaitable[R]],
    ) -> None:
        """Answer requests of one type with `handler(sender identity, request)`.

        A plain function is called at once, for everything that arrived together before the loop
        goes on; what a coroutine function returns becomes a task. A handler refuses by raising
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
        """Ask a peer and wait for its reply. Cancelling the wait cancels the handler.

        Args:
            peer: Identity of a connected peer.
            request: What is asked.
            timeout_s: Limit of the wait and of the handler.
            key: Idempotency key: the peer executes one kind and key of this process once, and
                answers later calls with the same reply. Refusals are not kept.

        Raises:
            RequestTimeout: no reply in time; the peer may still have acted.
            PeerUnreachable: there is no connection, or it was lost while waiting.
            ProtocolError: the reply cannot be understood.
            RequestRefused: the handler refused or failed.
        """
        call_id, kind = next(self._call_ids), type(request).__name__
        self._transport.send(peer, encode_request(call_id, request, float(timeout_s), key))
        answer: asyncio.Future[Message] = self._loop.create_future()
        call = _Call(call_id, peer, kind, timeout_s, request.reply_type, answer)
        self._calls[call_id] = call
        slot = self._deadlines.add(call, timeout_s)
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
                if not self._open:
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
            self._seen.add(sender, envelope.call_id)  # The request itself may come later.
            self._executions.cancel_call(sender, envelope.call_id)
        else:
            self._on_answer(sender, envelope)

    def _on_answer(self, sender: str, envelope: ReplyEnvelope | RefusalEnvelope) -> None:
        call = self._calls.get(envelope.call_id)
        if call is None or call.peer != sender or call.answer.done():
            return  # Too late, a repetition, or not theirs to answer.
        del self._calls[call.call_id]
        if isinstance(envelope, RefusalEnvelope):
            call.answer.set_exception(_as_error(sender, envelope))
            return
        try:
            call.answer.set_result(validate(call.reply_type, envelope.body))
        except ValidationError as error:
            reason = f"reply to {call.kind}: {explain(error)}"
            log.warning("mesh.message_dropped", peer=sender, reason=reason)
            call.answer.set_exception(ProtocolError(sender, reason))

    def _on_request(self, sender: str, asked: RequestEnvelope) -> None:
        if not self._seen.add(sender, asked.call_id):
            return
        key = (sender, asked.kind, asked.key) if asked.key else None
        if key and self._executions.join(key, asked):
            return
        try:
            handler, request = self._understand(asked)
            outcome = handler(sender, request)
        except LibraError as error:
            self.refuse(sender, asked.call_id, asked.kind, error)
            return
        if not isinstance(outcome, Message):
            self._executions.start(sender, asked, key, outcome)
            return
        self.reply(sender, asked.call_id, outcome)
        if key:
            self._executions.keep(key, outcome)

    def _understand(self, asked: RequestEnvelope) -> tuple[Handler, Message]:
        served = self._handlers.get(asked.kind)
        if served is None:
            raise RequestRefused(Refusal.INVALID, f"{asked.kind} is not served here")
        request_type, handler = served
        try:
            return handler, validate(request_type, asked.body)
        except ValidationError as error:
            raise RequestRefused(Refusal.INVALID, explain(error)) from error

    # What leaves.

    def reply(self, sender: str, call_id: int, reply: Message) -> None:
        """Answer a call. For `Executions`."""
        self._send(sender, encode_reply(call_id, reply))

    def refuse(self, sender: str, call_id: int, kind: str, error: LibraError) -> None:
        """Answer a call with a refusal. For `Executions`."""
        refusal, detail = Refusal.FAILED, f"{type(error).__name__}: {error}"
        if isinstance(error, RequestRefused):
            refusal, detail = error.refusal, error.detail
        if refusal in (Refusal.INVALID, Refusal.FAILED):
            log.warning(
                "mesh.request_refused", peer=sender, kind=kind, reason=refusal.value, detail=detail
            )
        self._send(sender, encode_refusal(call_id, refusal.value, detail))

    def _send(self, peer: str, payload: bytes) -> None:
        """Send what nobody here waits for: the other side has a deadline of its own."""
        try:
            self._transport.send(peer, payload)
        except PeerUnreachable as error:
            log.warning("mesh.message_dropped", peer=peer, reason=error.reason)

    # What ends.

    def _time_out(self, call: _Call) -> None:
        if self._calls.pop(call.call_id, None) and not call.answer.done():
            call.answer.set_exception(RequestTimeout(call.peer, call.kind, call.timeout_s))
            self._send(call.peer, encode_cancel(call.call_id))

    def _lost(self, peer: str, reason: str) -> None:
        self._forget(peer, reason)
        with self._bugs:
            for callback in self._peer_lost:
                callback(peer, reason)

    def _forget(self, peer: str, reason: str) -> None:
        self._fail_calls(peer, reason)
        self._seen.forget(peer)
        self._executions.forget(peer)

    def _fail_calls(self, peer: str | None, reason: str) -> None:
        for call in [c for c in self._calls.values() if peer in (None, c.peer)]:
            del self._calls[call.call_id]
            if not call.answer.done():
                call.answer.set_exception(PeerUnreachable(call.peer, reason))

    def _close_intake(self) -> None:
        self._open = False

    def _fail(self, error: Exception) -> None:
        """Raise in the task that entered the mesh, unless it is ending already."""
        if self._open:
            self._close_intake()
            self._tasks.create_task(_raise(error), name="mesh.bug")


def _as_error(sender: str, envelope: RefusalEnvelope) -> LibraError:
    try:
        return RequestRefused(Refusal(envelope.code), envelope.detail)
    except ValueError:
        return ProtocolError(sender, f"unknown refusal {envelope.code[:40]!r}")


async def _raise(error: Exception) -> None:
    raise error
