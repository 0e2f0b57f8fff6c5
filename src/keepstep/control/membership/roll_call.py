"""What launchers have said in one re-forming: who has halted, who is awaited, who is lost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from keepstep.control.membership.rendezvous import Launcher


class RollCall:
    """A new one is called at the beginning of each re-forming; it is empty while none is under way.

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
