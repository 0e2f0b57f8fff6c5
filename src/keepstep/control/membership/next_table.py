"""Which launchers have a place in the next rank table, and which of those that had one have none any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from keepstep.control.membership.incarnations import Incarnations
from keepstep.control.membership.occasion import Occasion
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.roll_call import RollCall
from keepstep.control.membership.trial import Trial
from keepstep.wire.messages import Placement


@dataclass(frozen=True, slots=True)
class Plan:
    """The next rank table, and whom it has no place for: lost members, unfit ones, newcomers that were on trial."""

    table: dict[Launcher, Placement]
    vacant: list[Launcher]
    excluded: dict[Launcher, str]
    retreat: list[Launcher]


class NextTable:
    """Makes plans once all launchers have halted. ``takes_in``: newcomers can be given the state of other nodes."""

    def __init__(
        self, rendezvous: Rendezvous, incarnations: Incarnations, trial: Trial, *, takes_in: bool
    ) -> None:
        self._rendezvous, self._incarnations, self._trial = rendezvous, incarnations, trial
        self._takes_in = takes_in

    def plan(self, roll: RollCall, occasion: Occasion, excluded: dict[Launcher, str]) -> Plan | None:
        """A plan for as many nodes as before: without newcomers on trial if possible, else without unfit members.

        None: a place stays vacant.
        """
        may_retreat = not occasion.ordered_by and not self.rigid(roll)
        retreat = self.ranked(self._trial.newcomers - roll.lost) if may_retreat else []
        plan = self._plan(roll, occasion, excluded, retreat, shrink=True) if retreat else None
        plan = plan or self._plan(roll, occasion, excluded)
        if plan is None and excluded:
            plan = self._plan(roll, occasion, {})  # an unfit node is better than none
        return plan

    def smaller(self, roll: RollCall, occasion: Occasion) -> Plan | None:
        """A plan without the places that would stay vacant; None: the job cannot have so few nodes."""
        return self._plan(roll, occasion, {}, shrink=True)

    def is_replaceable(self, unfit: Collection[Launcher], roll: RollCall) -> bool:
        """Whether there are spares for these members and all lost ones; the controller's host cannot be replaced."""
        ready = sum(spare in roll.halted for spare in self._rendezvous.spares)
        hosts = any(self._rendezvous.hosts_controller(one) for one in unfit)
        return bool(unfit) and not hosts and len(unfit) + len(roll.lost) <= ready

    def rigid(self, roll: RollCall) -> str:
        """Why a job of another size cannot go on with what its ranks hold."""
        return next((why for one, why in roll.rigid.items() if one not in roll.lost), self._trial.rigid)

    def may_shrink(self, roll: RollCall) -> bool:
        """Whether the job may go on with fewer nodes than it has."""
        return self._rendezvous.least < len(self._rendezvous.placements) and not self.rigid(roll)

    def may_grow(self, roll: RollCall) -> bool:
        """Whether the job may go on with more nodes than it has."""
        return self._takes_in and not self.rigid(roll)

    def ranked(self, members: Iterable[Launcher]) -> list[Launcher]:
        """Members in the order of their node ranks."""
        table = self._rendezvous.placements
        return sorted(members, key=lambda member: table[member].node_rank)

    def _plan(
        self,
        roll: RollCall,
        occasion: Occasion,
        excluded: dict[Launcher, str],
        retreat: list[Launcher] | None = None,
        *,
        shrink: bool = False,
    ) -> Plan | None:
        vacant = self.ranked(roll.lost)
        leaving = [*vacant, *(retreat or excluded)]
        is_whole = not leaving and occasion.exchange.keys() <= self._rendezvous.placements.keys()
        table = self._rendezvous.next_table(
            leaving,
            roll.halted,
            *self._incarnations.following(is_pause=bool(occasion.ordered_by)),
            shrink=shrink,
            grow=self.may_grow(roll) and not shrink,
            exchange=occasion.exchange if is_whole else {},
        )
        if table is None:
            return None
        excluded = {one: why for one, why in excluded.items() if one not in table}
        return Plan(table, vacant, excluded, retreat or [])
