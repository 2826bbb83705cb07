"""Which hybrid slots train and which roll out. Pure."""

from collections.abc import Mapping

from services.coordinator.slot_state import Limits, Phase, Side, SlotState
from services.coordinator.slots import may_hold


def is_known(state: SlotState, now: float, limits: Limits) -> bool:
    """Whether it is known who is awake; before that, no split is decided."""
    tenants = state.rollout, state.train
    return any(tenant.awake for tenant in tenants) or not any(
        may_hold(tenant, now, limits) for tenant in tenants
    )


def next_wanted(
    states: Mapping[str, SlotState], train: int, now: float, limits: Limits
) -> dict[str, Side]:
    """Which slots are to change sides now, so that in the end `train` of them train.

    One after the other, so that the others go on meanwhile; one that is changing the wrong way
    turns around at once. Ties are decided by the order of the slots.
    """
    slots = list(states.values())
    if any(slot.wanted is None for slot in slots):
        known = all(is_known(slot, now, limits) for slot in slots)
        return _first_split(slots, train) if known else {}
    training = sum(slot.wanted is Side.TRAIN for slot in slots)
    if training == train:
        return {}
    towards = Side.TRAIN if training < train else Side.ROLLOUT
    candidates = [slot for slot in slots if slot.wanted is towards.other]
    if towards is Side.ROLLOUT:
        candidates.reverse()  # Back in the opposite order.
    turning = [slot for slot in candidates if slot.phase is not Phase.ACTIVE]
    if turning:
        return {turning[0].name: towards}
    moving = any(slot.phase in (Phase.DRAINING, Phase.LOADING) for slot in slots)
    return {} if moving else {candidates[0].name: towards}


def _first_split(slots: list[SlotState], train: int) -> dict[str, Side]:
    """Who is awake stays so; the others make up the numbers."""
    sides = {slot.name: Side.TRAIN if slot.train.awake else Side.ROLLOUT for slot in slots}
    missing = train - sum(side is Side.TRAIN for side in sides.values())
    free = [slot for slot in slots if not slot.train.awake and not slot.rollout.awake]
    for slot in free[: max(0, missing)]:
        sides[slot.name] = Side.TRAIN
    return sides
