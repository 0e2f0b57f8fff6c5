"""What belongs to one re-forming alone: what it is for, and what launchers have said in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from keepstep.control.membership.reforming_orders import End
from keepstep.control.membership.rendezvous import Launcher
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.core.lost_connection import tells_of_another

_UNKNOWN_CODE = 1
BY_HAND = "an operator ordered it"
_UNKNOWN = End(_UNKNOWN_CODE, "a recovery was under way when the controller began again")


@dataclass(slots=True)
class Occasion:
    """The occasion of one re-forming; there is a blank one while none is under way."""

    # Who ordered it, in words. Empty for a restart: something failed, and ``--max-restarts`` counts it.
    ordered_by: str = ""

    # Who takes whose place, by the launcher that has it now.
    #
    # Invariant R9: places are exchanged on an order only, and those who give theirs up are those who take one.
    exchange: Mapping[Launcher, Launcher] = field(default_factory=dict[Launcher, Launcher])

    # Members whose nodes spares should have, and why, as far as an order says so.
    unfit: Mapping[Launcher, str] = field(default_factory=dict[Launcher, str])

    # An operator wants the job suspended before it goes on. It may be said of a restart, too, when a failure was faster
    # than the order.
    #
    # Invariant R10: it is so in every suspended job.
    is_held: bool = False

    # The first failure. Later ones of the incarnation that is being ended are part of it.
    failure: End | None = None

    @property
    def cause(self) -> End:
        """The job's end if it may not begin again: a failure; or an order, as what fails because of it is no cause."""
        return End(_UNKNOWN_CODE, self.ordered_by) if self.ordered_by else self.failure or _UNKNOWN

    def failed(self, exit_code: int, text: str) -> None:
        """Something has failed, and this is the occasion of the re-forming if nothing failed before."""
        self.failure = self.failure or End(exit_code or _UNKNOWN_CODE, text)

    def lost(self, nodes: str) -> None:
        """Nodes are lost: the occasion, too, where what failed before only tells of others."""
        if self.failure is None or tells_of_another(self.failure.reason):
            self.failure = End(TEMPORARY_FAILURE, f"{nodes} lost", kind="node-lost")


class RollCall:
    """Who has halted, is awaited, is lost. It is called anew when a re-forming begins, and empty while there is none.

    Invariant R2: each member is awaited, halted or lost, and only one of these. So when nobody is awaited any more,
    nothing of the old incarnation runs on any node that is not lost.
    """

    def __init__(
        self, members: Collection[Launcher] = (), unfit: Mapping[Launcher, str] | None = None
    ) -> None:
        # Members that have been told to halt and have not said yet that they have. One whose connection goes is awaited
        # again, as whether it still lives is to be seen.
        self.awaited = set(members)

        # Members whose places are vacant. One that comes back before its place is given away is awaited again.
        self.lost: set[Launcher] = set()

        # A free port of every launcher that has halted, spares included. Nobody else can be placed: whoever is placed
        # has said just before that nothing runs on its node.
        self.halted: dict[Launcher, int] = {}

        # Members whose nodes should be given to spares, and why: an order says so, or checks of the node do.
        #
        # Invariant R3: only members are unfit or rigid.
        self.unfit = dict(unfit or {})

        # Members that cannot go on in a job of another size with what their ranks have saved, and why.
        self.rigid: dict[Launcher, str] = {}

        # When members that are still awaited count as lost, and spares that have not answered count no more (seconds).
        #
        # Invariant R4: it is finite while a re-forming is under way, unless the job is suspended.
        self.deadline_s = math.inf

    def recall(self, member: Launcher, deadline_s: float) -> None:
        """A member is back and has to halt, for which it has until this deadline at least."""
        self.lost.discard(member)
        self.halted.pop(member, None)
        self.awaited.add(member)
        self.deadline_s = max(self.deadline_s, deadline_s)

    def went(self, launcher: Launcher, *, is_member: bool) -> None:
        """The connection of a launcher has gone: it cannot be placed before it says again that it has halted."""
        if self.halted.pop(launcher, None) is not None and is_member:
            self.awaited.add(launcher)

    def answered(self, member: Launcher, unfit: str, rigid: str) -> None:
        """A member has halted, and says why it is unfit or rigid, if it is."""
        self.lost.discard(member)
        self.awaited.discard(member)
        if unfit:
            self.unfit[member] = unfit
        if rigid:
            self.rigid[member] = rigid

    def vacate(self, lost: Collection[Launcher]) -> None:
        """These members are lost, so their places are vacant."""
        self.lost.update(lost)
        self.awaited.difference_update(lost)
        for member in lost:
            self.halted.pop(member, None)

    def is_awaited(self, spares: Collection[Launcher], now_s: float) -> bool:
        """Whether one of these spares has been told to halt, and has time left to answer."""
        return now_s < self.deadline_s and any(spare not in self.halted for spare in spares)
