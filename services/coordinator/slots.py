"""Whose the devices of a hybrid slot are, and how they change hands. Pure.

One state machine for both directions: `idle` (nobody holds the slot), `draining` (its holder was
told to yield), `loading` (the wanted tenant was told to take it, and has not the newest version
yet), `active`. What tenants say of themselves (fence, awake) wins over what is remembered, and all
orders may be lost, repeated or late: the fence decides. A tenant is told to take the slot only when
the other cannot hold it: it said so, was restarted, or has been unheard for so long that it must
have yielded by itself.
"""

from dataclasses import replace
from math import inf

from common.weights import NO_VERSION
from services.coordinator.slot_state import (
    Answered,
    Command,
    Event,
    Evict,
    Heard,
    Limits,
    Passed,
    Phase,
    Refused,
    Side,
    SlotState,
    Switched,
    Tell,
    Tenant,
    Times,
    Unanswered,
    Wanted,
)

RETRY_S = 0.5
"""Between two tellings of an order that was not answered."""


def advance(
    state: SlotState, event: Event, now: float, limits: Limits
) -> tuple[SlotState, list[Command]]:
    """Apply one event. What no longer applies changes nothing."""
    state = _noted(state, event, now)
    commands: list[Command] = []
    for _ in Phase:  # One event leads through each phase once at most.
        before = state
        state, more = _step(state, now, limits)
        commands += more
        if state == before:
            break
    return state, commands


def may_hold(tenant: Tenant, now: float, limits: Limits) -> bool:
    """Whether a tenant could be awake, for all that is known."""
    if now - tenant.heard_s > limits.silence_s:
        return False
    return not tenant.peer or tenant.awake or tenant.told > tenant.fence


# ── what an event says ───────────────────────────────────────────────────────────────────────


def _noted(state: SlotState, event: Event, now: float) -> SlotState:
    match event:
        case Wanted(side):
            state = replace(state, wanted=side)
        case Heard():
            state = _heard(state, event)
        case Answered() if state.tenant(event.side).peer == event.peer:
            state = _answered(state, event)
        case Refused(fence) if fence == state.fence and state.phase is Phase.LOADING:
            state = _idle(replace(state, refused=fence), now)
        case Unanswered(fence) | Refused(fence) if fence == state.fence:
            state = replace(state, pending=False, sent_s=now)
        case Passed(newest):
            state = replace(state, newest=newest)
        case _:
            pass
    return state


def _heard(state: SlotState, event: Heard) -> SlotState:
    """Within one incarnation the higher fence counts, and within one fence who is not awake."""
    known = state.tenant(event.side)
    if event.peer == state.evicted and event.awake:
        return state
    if event.peer != known.peer:
        known = Tenant(event.heard_s, event.peer, event.fence, event.awake, event.version)
    else:
        awake = event.awake if event.fence > known.fence else known.awake
        if event.fence == known.fence:
            awake = known.awake and event.awake
        known = replace(
            known,
            heard_s=max(known.heard_s, event.heard_s),
            fence=max(known.fence, event.fence),
            awake=awake,
            version=event.version,
        )
    evicted = "" if event.peer == state.evicted else state.evicted
    state = replace(state, top=max(state.top, event.fence), evicted=evicted)
    return _with(state, event.side, known)


def _answered(state: SlotState, event: Answered) -> SlotState:
    known = state.tenant(event.side)
    if event.fence > known.fence:
        known = replace(known, fence=event.fence, awake=event.take)
    elif event.fence == known.fence and not event.take:
        known = replace(known, awake=False)
    state = _with(state, event.side, known)
    phase = Phase.LOADING if event.take else Phase.DRAINING
    if event.fence != state.fence or state.phase is not phase:
        return state
    if event.take:
        return replace(state, pending=False, taken=True, needs=state.newest)
    return replace(state, pending=False, changing=Times(event.drain_s, event.release_s))


def _with(state: SlotState, side: Side, tenant: Tenant) -> SlotState:
    return replace(state, **{side.value: tenant})


# ── what follows from it ─────────────────────────────────────────────────────────────────────


def _step(state: SlotState, now: float, limits: Limits) -> tuple[SlotState, list[Command]]:
    match state.phase:
        case Phase.IDLE:
            return _from_idle(state, now, limits), []
        case Phase.DRAINING:
            return _while_draining(state, now, limits)
        case Phase.LOADING:
            return _while_loading(state, now, limits)
        case Phase.ACTIVE:
            return _leave_if_due(state, now, limits), []


def _from_idle(state: SlotState, now: float, limits: Limits) -> SlotState:
    if state.wanted is None:
        return state
    wanted, mine = state.wanted, state.tenant(state.wanted)
    theirs = state.tenant(wanted.other)
    if theirs.peer and may_hold(theirs, now, limits):  # It is awake, or may yet hear that it shall.
        return _draining(state, wanted.other, now)
    if mine.awake and mine.fence > state.refused and _present(mine, now, limits):
        return _loading(state, wanted, mine.fence, now)  # As it was told before.
    if may_hold(theirs, now, limits) or not _present(mine, now, limits):
        return state
    fence = state.top + 1
    return _loading(_with(state, wanted, replace(mine, told=fence)), wanted, fence, now)


def _while_draining(
    state: SlotState, now: float, limits: Limits
) -> tuple[SlotState, list[Command]]:
    tenant = state.tenant(state.holder)
    waited_s = now - state.since_s
    if tenant.fence > state.fence:  # Somebody else has told it something since.
        return _draining(state, state.holder, now), []
    if not may_hold(tenant, now, limits):
        if state.changing == Times():  # Not by its own word.
            state = replace(state, changing=Times(drain_s=waited_s))
        return _idle(state, now), []
    if waited_s > limits.draining_s and tenant.peer != state.evicted:
        return replace(state, evicted=tenant.peer), [Evict(tenant.peer)]
    return _told(state, now, take=False, deadline_s=max(0.0, limits.drain_s - waited_s))


def _while_loading(state: SlotState, now: float, limits: Limits) -> tuple[SlotState, list[Command]]:
    left = _leave_if_due(state, now, limits)
    if left is not state:
        return left, []
    load_s = now - state.since_s
    if load_s > limits.load_s:
        return _draining(state, state.holder, now), []
    if not state.taken:
        return _told(state, now, take=True)
    if state.tenant(state.holder).version < state.needs:
        return state, []
    return _active(state, now, load_s)


def _active(state: SlotState, now: float, load_s: float) -> tuple[SlotState, list[Command]]:
    side, changed = state.holder, state.last not in (None, state.holder)
    times = replace(state.changing, load_s=load_s)
    state = replace(
        state,
        phase=Phase.ACTIVE,
        since_s=now,
        last=side,
        switches=state.switches + changed,
        times=times if changed else state.times,
        changing=Times(),
    )
    return state, [Switched(side, state.fence, times)]


def _leave_if_due(state: SlotState, now: float, limits: Limits) -> SlotState:
    """The holder is asleep, gone, under other orders, or not wanted any more."""
    tenant = state.tenant(state.holder)
    if tenant.fence > state.fence or not may_hold(tenant, now, limits):
        return _idle(state, now)
    if state.wanted is not None and state.wanted is not state.holder:
        return _draining(state, state.holder, now)
    return state


def _told(
    state: SlotState, now: float, *, take: bool, deadline_s: float = 0.0
) -> tuple[SlotState, list[Command]]:
    """Send the order of this phase where it is due, again and again until it is answered."""
    tenant = state.tenant(state.holder)
    due = not state.pending and now - state.sent_s >= RETRY_S
    if not due or not tenant.peer or tenant.peer == state.evicted:
        return state, []
    order = Tell(state.holder, tenant.peer, state.fence, take, deadline_s)
    return replace(state, pending=True, sent_s=now), [order]


def _present(tenant: Tenant, now: float, limits: Limits) -> bool:
    return bool(tenant.peer) and now - tenant.heard_s <= limits.lease_s


def _idle(state: SlotState, now: float) -> SlotState:
    return replace(state, phase=Phase.IDLE, since_s=now, pending=False, taken=False)


def _draining(state: SlotState, holder: Side, now: float) -> SlotState:
    return replace(
        state,
        phase=Phase.DRAINING,
        holder=holder,
        since_s=now,
        fence=state.top + 1,
        top=state.top + 1,
        sent_s=-inf,
        pending=False,
        taken=False,
        changing=Times(),
    )


def _loading(state: SlotState, holder: Side, fence: int, now: float) -> SlotState:
    return replace(
        state,
        phase=Phase.LOADING,
        holder=holder,
        since_s=now,
        fence=fence,
        top=max(state.top, fence),
        sent_s=-inf,
        pending=False,
        taken=False,
        needs=NO_VERSION,
    )
