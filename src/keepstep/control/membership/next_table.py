"""The next rank table: its incarnation, who has a place in it, who of them is on trial, and who has none any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.roll_call import Occasion, RollCall
from keepstep.wire.messages import Placement

_BARRED_S = 600.0  # for which a node with which the job did not train is not taken in again


class Incarnations:
    """Numbers of incarnations, taken from the rank table so that every controller of the job counts alike."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

        # The highest incarnation that a launcher has told of. It is higher than the table's when the table is older
        # than the job, and where the launcher of one node has restarted its workers by itself.
        self._told = 0

        # The highest incarnation that some launcher has confirmed stopped. It is higher than `current` when a leader
        # before us had it halted before it was placed: that number is spent, as launchers start nothing of it any more.
        #
        # Invariant R5: every incarnation but the first is either a restart or a pause, so neither outnumbers them all.
        self._stopped = 0

    @property
    def current(self) -> int:
        """The incarnation that runs, or is being ended."""
        return max(self._told, self._rendezvous.incarnation)

    @property
    def restarts(self) -> int:
        """How many incarnations, the first one apart, began because something had failed."""
        return self.current - self._rendezvous.pauses

    def told(self, incarnation: int) -> None:
        """A member says that it plays this incarnation."""
        self._told = max(self._told, incarnation)

    def stopped(self, incarnation: int) -> None:
        """A launcher says that it runs nothing of this incarnation or earlier ones, and will start nothing of them."""
        self._stopped = max(self._stopped, incarnation)

    def following(self, *, is_pause: bool) -> tuple[int, int]:
        """The number of the next incarnation, and how many incarnations up to it were no restarts."""
        unplaced = max(0, self._stopped - self.current)
        return self.current + unplaced + 1, self._rendezvous.pauses + unplaced + is_pause


class Trial:
    """What depends on whether the job trains: whether its newcomers stay, and whether it may have another size."""

    def __init__(self) -> None:
        # Members with which the job has not trained yet. A failure before it does leaves them out again.
        #
        # Invariant R11: all of them are members.
        self.newcomers: frozenset[Launcher] = frozenset()

        # Why the job could not have had another size when it was placed. It still cannot, though those who have just
        # come say nothing of the kind: they hold no state yet.
        self.rigid = ""

        # Nodes that were left out again, until when they are not taken in (seconds). They are spares meanwhile.
        self._barred: dict[str, float] = {}

    def begin(self, newcomers: Iterable[Launcher], rigid: str) -> None:
        """The job was placed with these newcomers; ``rigid``: why it could not have had another size, if so."""
        self.newcomers, self.rigid = frozenset(newcomers), rigid or self.rigid

    def passed(self) -> None:
        """All ranks have made a step, so nothing is on trial any more."""
        self.newcomers, self.rigid = frozenset(), ""

    def bar(self, launchers: Iterable[Launcher], now_s: float) -> None:
        """The job did not train with these newcomers: their nodes are not taken in for a while."""
        self._barred.update((one.node, now_s + _BARRED_S) for one in launchers)

    def barred(self, now_s: float) -> frozenset[str]:
        """Nodes that are not to be taken in now."""
        self._barred = {node: until_s for node, until_s in self._barred.items() if now_s < until_s}
        return frozenset(self._barred)


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

    def plan(
        self, roll: RollCall, occasion: Occasion, excluded: dict[Launcher, str], refused: dict[Launcher, str]
    ) -> Plan | None:
        """A plan for as many nodes as before: without newcomers on trial if possible, else without unfit members.

        ``refused``: the job does not begin again with these. None: a place stays vacant.
        """
        may_retreat = not occasion.ordered_by and not self.rigid(roll)
        retreat = self.ranked(self._trial.newcomers - roll.lost) if may_retreat else []
        retreats = retreat and refused.keys() <= set(retreat)
        plan = self._plan(roll, occasion, excluded, retreat, shrink=True) if retreats else None
        plan = plan or self._plan(roll, occasion, excluded)
        if plan is None and excluded != refused:
            plan = self._plan(roll, occasion, refused)  # an unfit node is better than none
        return plan

    def smaller(self, roll: RollCall, occasion: Occasion, refused: dict[Launcher, str]) -> Plan | None:
        """A plan without the places that would stay vacant; None: the job cannot have so few nodes."""
        return self._plan(roll, occasion, refused, shrink=True)

    def is_replaceable(self, unfit: Collection[Launcher], roll: RollCall) -> bool:
        """Whether there are spares for these members and all lost ones; the controller's host cannot be replaced."""
        ready = sum(spare in roll.halted for spare in self._rendezvous.spares)
        return bool(unfit) and not self.hosts(unfit) and len(unfit) + len(roll.lost) <= ready

    def hosts(self, members: Collection[Launcher]) -> bool:
        """Whether the controller is on one of these nodes."""
        return any(self._rendezvous.hosts_controller(one) for one in members)

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
