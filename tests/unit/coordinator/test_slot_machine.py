"""The pure state machine of hybrid slots, against two tenants that keep the rules of one."""

import itertools
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.fence import Order, Verdict, judge
from services.coordinator.slot_orders import ORDER_LEASES
from services.coordinator.slot_split import next_wanted
from services.coordinator.slot_state import (
    Answered,
    Evict,
    Heard,
    Limits,
    Passed,
    Phase,
    Refused,
    Side,
    SlotState,
    Tell,
    Tenant,
    Unanswered,
    Wanted,
    new_slot,
)
from services.coordinator.slots import advance

NOTHING = Order(-1, take=False)
LIMITS = Limits(lease_s=3.0, drain_s=4.0, load_s=30.0)
SIDES = list(Side)


@dataclass
class ModelTenant:
    """One process that follows `common.tenant`, without the waiting."""

    side: Side
    life: int = 1
    seen: Order = NOTHING
    lapsed: bool = False
    holds: bool = False
    version: int = -1
    contact_s: float = -inf
    coordinator: int = 0
    to_do: list[Order] = field(default_factory=list[Order])

    @property
    def peer(self) -> str:
        return f"{self.side}/{self.life}"

    @property
    def awake(self) -> bool:
        return self.holds or (self.seen.take and not self.lapsed)

    def heard(self) -> Heard:
        return Heard(self.side, self.peer, self.seen.fence, self.awake, self.version, heard_s=0.0)

    def restart(self) -> None:
        fresh = ModelTenant(self.side, self.life + 1)
        self.__dict__.update(fresh.__dict__)


@dataclass(frozen=True)
class Sent:
    """An order on its way, or its answer."""

    coordinator: int
    sent_s: float
    order: Tell


class Slots(RuleBasedStateMachine):
    """Messages are delivered in any order, twice or never; anybody may die at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.coordinator = 1
        self.state: SlotState = new_slot("s", -inf)
        self.tenants = {side: ModelTenant(side) for side in SIDES}
        self.orders: list[Sent] = []
        self.beats: list[tuple[Heard, float]] = []
        self.evicted: set[str] = set()
        self.fence_before: dict[str, int] = {}
        self.wanted = Side.ROLLOUT
        self.feed(Wanted(self.wanted))

    def feed(self, event: object) -> None:
        self.state, commands = advance(self.state, event, self.now, LIMITS)  # type: ignore[arg-type]
        for command in commands:
            if isinstance(command, Tell):
                self.orders.append(Sent(self.coordinator, self.now, command))
            elif isinstance(command, Evict):
                self.evicted.add(command.peer)

    # ── what may happen ──────────────────────────────────────────────────────────────────────

    @rule(side=st.sampled_from(SIDES))
    def want(self, side: Side) -> None:
        self.wanted = side
        self.feed(Wanted(side))

    @rule(side=st.sampled_from(SIDES))
    def beat(self, side: Side) -> None:
        self.beats.append((self.tenants[side].heard(), self.now))

    @precondition(lambda self: self.beats)
    @rule(data=st.data(), answered=st.booleans(), keep=st.booleans())
    def hear(self, data: st.DataObject, answered: bool, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.beats) - 1))
        heard, sent_s = self.beats[index] if keep else self.beats.pop(index)
        self._hear(heard, sent_s, answered=answered)

    def _hear(self, heard: Heard, sent_s: float, *, answered: bool) -> None:
        tenant = self.tenants[heard.side]
        if heard.peer != tenant.peer or (heard.peer in self.evicted and heard.awake):
            return  # The connection of a dead process is gone; the evicted is not listened to.
        self.feed(replace(heard, heard_s=self.now))
        if answered:
            tenant.contact_s = max(tenant.contact_s, sent_s)
            tenant.coordinator = self.coordinator

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), keep=st.booleans(), answered=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool, answered: bool) -> None:
        index = data.draw(st.integers(0, len(self.orders) - 1))
        sent = self.orders[index] if keep else self.orders.pop(index)
        self._deliver(sent, answered=answered)

    def _deliver(self, sent: Sent, *, answered: bool) -> None:
        """To its receiver, unless its caller has given up: the mesh cancels it then."""
        order, tenant = sent.order, self.tenants[sent.order.side]
        if self.now - sent.sent_s > ORDER_LEASES * LIMITS.lease_s or order.peer != tenant.peer:
            return
        fresh = self.now - tenant.contact_s <= LIMITS.lease_s
        if sent.coordinator != tenant.coordinator or (order.take and not fresh):
            event: object = Unanswered(order.fence)
        else:
            event = self._follow(tenant, Order(order.fence, order.take))
        if answered and event is not None and sent.coordinator == self.coordinator:
            self.feed(event)

    def _follow(self, tenant: ModelTenant, order: Order) -> object:
        verdict = judge(tenant.seen, order, lapsed=tenant.lapsed)
        if verdict is Verdict.STALE:
            return Refused(order.fence)
        if verdict is Verdict.NEW:
            tenant.seen, tenant.lapsed = order, False
            tenant.to_do.append(order)
        if order in tenant.to_do:
            return None  # Not answered yet; asked again later.
        return Answered(tenant.side, tenant.peer, order.fence, order.take)

    @rule(side=st.sampled_from(SIDES))
    def work(self, side: Side) -> None:
        self._work(self.tenants[side])

    def _work(self, tenant: ModelTenant) -> None:
        if tenant.to_do:
            order = tenant.to_do.pop(0)
            if order == tenant.seen and not tenant.lapsed:
                tenant.holds = order.take
                tenant.version = tenant.version if order.take else -1

    @rule()
    def give_up_asking(self) -> None:
        """The reply does not come in time."""
        self.feed(Unanswered(self.state.fence))

    @rule(side=st.sampled_from(SIDES))
    def apply(self, side: Side) -> None:
        if self.tenants[side].holds:
            self.tenants[side].version = 1

    @rule(side=st.sampled_from(SIDES))
    def die(self, side: Side) -> None:
        self.tenants[side].restart()

    @rule()
    def restart_coordinator(self) -> None:
        self.coordinator += 1
        self.state = new_slot("s", self.now)
        self.evicted.clear()
        self.feed(Wanted(self.wanted))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        """Tenants watch their clocks more often than time passes here."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            for tenant in self.tenants.values():
                silent_s = self.now - tenant.contact_s
                if tenant.awake and silent_s > 2 * LIMITS.lease_s:
                    tenant.lapsed = True
                if tenant.awake and silent_s >= 3 * LIMITS.lease_s:
                    tenant.restart()  # It could not free the devices otherwise.
            self.feed(Passed(1))

    @precondition(lambda self: any(t.lapsed and t.holds for t in self.tenants.values()))
    @rule()
    def lapse(self) -> None:
        for tenant in self.tenants.values():
            if tenant.lapsed:
                tenant.holds, tenant.version = False, -1

    # ── what must hold ───────────────────────────────────────────────────────────────────────

    @invariant()
    def never_two_hold_the_devices(self) -> None:
        assert not all(tenant.holds for tenant in self.tenants.values())

    @invariant()
    def fences_only_grow(self) -> None:
        for tenant in self.tenants.values():
            assert tenant.seen.fence >= self.fence_before.get(tenant.peer, -1)
            self.fence_before[tenant.peer] = tenant.seen.fence

    def teardown(self) -> None:
        """Once nothing goes wrong any more, the slot arrives where it is wanted."""
        for _ in range(300):
            self.wait(0.5)
            for side in SIDES:
                self._hear(self.tenants[side].heard(), self.now, answered=True)
            orders, self.orders = self.orders, []
            for sent in orders:
                self._deliver(sent, answered=True)
            self.give_up_asking()
            self.lapse()
            for side in SIDES:
                self._work(self.tenants[side])
                self.apply(side)
                self.never_two_hold_the_devices()
        assert (self.state.phase, self.state.holder) == (Phase.ACTIVE, self.wanted)
        assert [side for side in SIDES if self.tenants[side].holds] == [self.wanted]


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_whatever_happens_one_holds_the_slot_and_the_wanted_one_in_the_end = pytest.mark.slow(
    Slots.TestCase
)


# ── the split ────────────────────────────────────────────────────────────────────────────────


def slot(name: str, side: Side | None, phase: Phase = Phase.ACTIVE) -> SlotState:
    """On its side, and nobody awake where none is given."""
    state = replace(new_slot(name, -inf), wanted=side, phase=phase)
    return state if side is None else replace(state, holder=side)


def awake(state: SlotState, side: Side) -> SlotState:
    return replace(state, **{side.value: Tenant(0.0, "peer", 1, awake=True)})


def wanted(*slots: SlotState, train: int) -> dict[str, Side]:
    return next_wanted({slot.name: slot for slot in slots}, train, 0.0, LIMITS)


def test_a_split_is_decided_once_it_is_known_who_is_awake() -> None:
    fresh, restarted = slot("a", None), new_slot("b", 0.0)
    assert wanted(fresh, restarted, train=1) == {}
    assert wanted(fresh, awake(restarted, Side.TRAIN), train=1) == {
        "a": Side.ROLLOUT,
        "b": Side.TRAIN,
    }
    assert wanted(fresh, slot("b", None), train=1) == {"a": Side.TRAIN, "b": Side.ROLLOUT}


def test_slots_change_sides_one_after_the_other() -> None:
    a, b = slot("a", Side.ROLLOUT), slot("b", Side.ROLLOUT)
    assert wanted(a, b, train=2) == {"a": Side.TRAIN}
    moving = slot("a", Side.TRAIN, Phase.DRAINING)
    assert wanted(moving, b, train=2) == {}
    assert wanted(slot("a", Side.TRAIN), b, train=2) == {"b": Side.TRAIN}
    assert wanted(slot("a", Side.TRAIN), b, train=1) == {}


def test_a_slot_that_changes_the_wrong_way_turns_around_at_once() -> None:
    there, moving = slot("a", Side.TRAIN), slot("b", Side.TRAIN, Phase.LOADING)
    assert wanted(there, moving, train=1) == {"b": Side.ROLLOUT}


def test_the_last_to_leave_is_the_first_to_return() -> None:
    slots = [slot(name, Side.TRAIN) for name in "abc"]
    assert wanted(*slots, train=2) == {"c": Side.ROLLOUT}


def test_a_slot_without_tenants_does_not_stop_the_others() -> None:
    stuck, other = slot("a", Side.TRAIN, Phase.IDLE), slot("b", Side.ROLLOUT)
    assert wanted(stuck, other, train=2) == {"b": Side.TRAIN}


# ── a tenant's own rules ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("take", "lapsed"), list(itertools.product([True, False], repeat=2)))
def test_only_the_newest_order_counts(take: bool, lapsed: bool) -> None:
    seen = Order(5, take)
    assert judge(seen, Order(6, not take), lapsed=lapsed) is Verdict.NEW
    assert judge(seen, Order(4, take), lapsed=lapsed) is Verdict.STALE
    assert judge(seen, Order(5, not take), lapsed=lapsed) is Verdict.STALE
    expected = Verdict.STALE if take and lapsed else Verdict.SAME
    assert judge(seen, seen, lapsed=lapsed) is expected
