"""The answering half of the mesh: handlers that run, who waits for them, and what is remembered.

An execution is one coroutine handler as a task. Calls wait for it, each until its own budget is
used up; an idempotency key lets several calls wait for the same one, and keeps its reply for those
that come later. When nobody waits any more the handler is cancelled.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from inspect import iscoroutine
from typing import Protocol

from common.codec import RequestEnvelope
from common.deadlines import DeadlineWheel
from common.errors import LibraError, Refusal, RequestRefused
from common.messages.base import Message

RUNNING_MAX = 4096
"""Handlers that run at once; more are refused. Each may hold a message of megabytes."""
SEEN_CALLS_MIN = 1024
"""Call ids remembered per peer; a transport repeats a message within far fewer."""
CACHED_REPLIES_MAX = 4096
CACHED_REPLY_AGE_S = 300.0
"""Longer than any caller goes on retrying with the same key."""

Key = tuple[str, str, str]
"""Sender, kind, idempotency key. Two senders that choose the same key mean two things."""


class Answers(Protocol):
    """How outcomes travel back."""

    def reply(self, sender: str, call_id: int, reply: Message) -> None:
        """Answer a call."""
        ...

    def refuse(self, sender: str, call_id: int, kind: str, error: LibraError) -> None:
        """Answer a call with a refusal."""
        ...


@dataclass(eq=False, slots=True)
class _Execution:
    """A coroutine handler at work."""

    kind: str
    key: Key | None
    work: Awaitable[Message]
    waiters: "dict[_Waiter, None]" = field(default_factory=dict["_Waiter", None])
    task: asyncio.Task[None] | None = None


@dataclass(eq=False, slots=True)
class _Waiter:
    """One call of a peer that waits for an execution."""

    sender: str
    call_id: int
    execution: _Execution
    slot: "dict[_Waiter, None]"
    """Of its deadline."""


class SeenCalls:
    """The last call ids of each peer: at least `SEEN_CALLS_MIN` of them."""

    def __init__(self) -> None:
        self._ids: dict[str, tuple[set[int], set[int]]] = {}

    def add(self, sender: str, call_id: int) -> bool:
        """Remember an id; False when it was remembered already."""
        recent, older = self._ids.get(sender) or self._turn_over(sender, set())
        if call_id in recent or call_id in older:
            return False
        if len(recent) >= SEEN_CALLS_MIN:
            recent, _ = self._turn_over(sender, recent)
        recent.add(call_id)
        return True

    def forget(self, sender: str) -> None:
        """The peer is gone; it never comes back with the same calls."""
        self._ids.pop(sender, None)

    def _turn_over(self, sender: str, recent: set[int]) -> tuple[set[int], set[int]]:
        self._ids[sender] = set(), recent
        return self._ids[sender]


class ReplyCache:
    """Replies by idempotency key, bounded by count and age."""

    def __init__(self) -> None:
        self._replies: OrderedDict[Key, tuple[float, Message]] = OrderedDict()

    def get(self, key: Key, now: float) -> Message | None:
        """The reply, if it was given lately."""
        self._forget_old(now)
        entry = self._replies.get(key)
        return entry[1] if entry else None

    def put(self, key: Key, reply: Message, now: float) -> None:
        """Keep a reply."""
        self._replies[key] = now, reply
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._replies:
            made, _ = next(iter(self._replies.values()))
            if len(self._replies) <= CACHED_REPLIES_MAX and now - made < CACHED_REPLY_AGE_S:
                return
            self._replies.popitem(last=False)


class Executions:
    """All coroutine handlers of one process."""

    def __init__(
        self, tasks: asyncio.TaskGroup, answers: Answers, failed: Callable[[], None]
    ) -> None:
        """Prepare.

        Args:
            tasks: Where handlers run; what they raise unexpectedly leaves it.
            answers: How outcomes travel back.
            failed: Called at once when a handler raised unexpectedly.
        """
        self._tasks, self._answers, self._failed = tasks, answers, failed
        self._loop = asyncio.get_running_loop()
        self._budgets = DeadlineWheel(self._loop, self._stop_waiting)
        self._running: dict[_Execution, None] = {}
        self._keyed: dict[Key, _Execution] = {}
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._replies = ReplyCache()
        self._closing = False

    def join(self, key: Key, asked: RequestEnvelope) -> bool:
        """Answer from the cache, or wait for the execution that runs under the key."""
        if reply := self._replies.get(key, self._loop.time()):
            self._answers.reply(key[0], asked.call_id, reply)
            return True
        if execution := self._keyed.get(key):
            self._wait(execution, key[0], asked)
            return True
        return False

    def keep(self, key: Key, reply: Message) -> None:
        """Give the same reply to later calls with this key."""
        self._replies.put(key, reply, self._loop.time())

    def start(
        self, sender: str, asked: RequestEnvelope, key: Key | None, work: Awaitable[Message]
    ) -> None:
        """Run a handler as a task, unless too many run already."""
        if len(self._running) >= RUNNING_MAX:
            if iscoroutine(work):
                work.close()
            error = RequestRefused(Refusal.OVERLOADED, f"{RUNNING_MAX} handlers run")
            self._answers.refuse(sender, asked.call_id, asked.kind, error)
            return
        execution = _Execution(asked.kind, key, work)
        self._running[execution] = None
        if key:
            self._keyed[key] = execution
        self._wait(execution, sender, asked)
        name = f"{asked.kind} of {sender}"
        execution.task = self._tasks.create_task(self._execute(execution), name=name)
        execution.task.add_done_callback(lambda _: self._end(execution))

    def cancel_call(self, sender: str, call_id: int) -> None:
        """The caller does not wait any more. Unknown calls are fine."""
        if waiter := self._waiters.get((sender, call_id)):
            self._stop_waiting(waiter)

    def forget(self, sender: str) -> None:
        """The peer is gone, and its calls with it."""
        for waiter in [w for w in self._waiters.values() if w.sender == sender]:
            self._stop_waiting(waiter)

    def close(self) -> None:
        """Cancel every handler. Callers are told to ask again: another process may take over."""
        self._closing = True
        for execution in list(self._running):
            self._cancel(execution)
        self._budgets.close()

    async def _execute(self, execution: _Execution) -> None:
        try:
            reply = await execution.work
        except LibraError as error:
            self._refuse_waiters(execution, error)
        except asyncio.CancelledError:
            if self._closing:
                error = RequestRefused(Refusal.NOT_READY, "the process is stopping")
            else:
                error = RequestRefused(Refusal.FAILED, "the handler was cancelled")
            self._refuse_waiters(execution, error)
            raise
        except Exception:
            self._failed()
            raise
        else:
            if execution.key:
                self.keep(execution.key, reply)
            for waiter in execution.waiters:
                self._answers.reply(waiter.sender, waiter.call_id, reply)

    def _refuse_waiters(self, execution: _Execution, error: LibraError) -> None:
        for waiter in execution.waiters:
            self._answers.refuse(waiter.sender, waiter.call_id, execution.kind, error)

    def _end(self, execution: _Execution) -> None:
        if iscoroutine(execution.work):
            execution.work.close()  # Never started if its task was cancelled before its first step.
        del self._running[execution]
        for waiter in list(execution.waiters):
            self._remove(waiter)
        self._unkey(execution)

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
        """The budget is used up or the caller is gone. The last one cancels the handler."""
        self._remove(waiter)
        if not waiter.execution.waiters:
            self._cancel(waiter.execution)

    def _cancel(self, execution: _Execution) -> None:
        """Cancel a handler. A repetition of its key from now on is executed anew."""
        self._unkey(execution)
        if execution.task:
            execution.task.cancel()

    def _unkey(self, execution: _Execution) -> None:
        if execution.key and self._keyed.get(execution.key) is execution:
            del self._keyed[execution.key]
