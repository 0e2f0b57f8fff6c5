"""What always holds in a re-forming, by the number under which the source states it beside its fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Launcher
from keepstep.control.membership.roll_call import Occasion
from keepstep.control.membership.transitions import State


def check(reforming: Reforming) -> None:
    """Assert all of them; tests call it after each step."""
    assert not broken(reforming), f"{broken(reforming)} broken: {describe(reforming)}"


def broken(reforming: Reforming) -> list[str]:
    """The numbers of those that do not hold."""
    return [number for number, holds in INVARIANTS.items() if not holds(reforming)]


def describe(reforming: Reforming) -> str:
    """What a re-forming knows, for messages."""
    parts = (reforming._roll, reforming._absence, reforming._trial)
    return f"{reforming.state}, {reforming._occasion}, {'; '.join(str(vars(part)) for part in parts)}"


def _members(reforming: Reforming) -> set[Launcher]:
    return set(reforming._rendezvous.placements)


def _is_blank(reforming: Reforming) -> bool:
    roll, occasion = reforming._roll, reforming._occasion
    said = (roll.awaited, roll.lost, roll.halted, roll.unfit, roll.rigid)
    return reforming.state is not State.RUNNING or (occasion == Occasion() and not any(said))


def _has_one_place(reforming: Reforming) -> bool:
    members, roll = _members(reforming), reforming._roll
    halted = roll.halted.keys() & members
    count = len(roll.awaited) + len(roll.lost) + len(halted)
    return not reforming.under_way or (roll.awaited | roll.lost | halted == members and count == len(members))


def _are_exchanged_on_order(reforming: Reforming) -> bool:
    occasion = reforming._occasion
    is_order = bool(occasion.ordered_by) or not (occasion.exchange or occasion.unfit)
    return is_order and occasion.exchange.keys() == set(occasion.exchange.values())


INVARIANTS: Mapping[str, Callable[[Reforming], bool]] = {
    "R1": _is_blank,
    "R2": _has_one_place,
    "R3": lambda one: one._roll.unfit.keys() | one._roll.rigid.keys() <= _members(one),
    "R4": lambda one: not one.under_way or math.isinf(one._roll.deadline_s) == one.suspended,
    "R5": lambda one: 0 <= one.restarts <= one.incarnation,
    "R6": lambda one: one._absence._since_s.keys() <= _members(one),
    "R7": lambda one: one._absence._unheard <= one._absence._since_s.keys(),
    "R8": lambda one: not (one.under_way and one._absence.finished),
    "R9": _are_exchanged_on_order,
    "R10": lambda one: not one.suspended or one._occasion.is_held,
    "R11": lambda one: one._trial.newcomers <= _members(one),
    "R12": lambda one: (
        one.state is State.OVER or (one._waits_since_s is not None) == (one.state is State.WAITING)
    ),
}
