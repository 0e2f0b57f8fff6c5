"""When a job that has fewer nodes than it may have takes in nodes that have come."""

from __future__ import annotations

from keepstep.control.membership.pauses import Pause, Pauses
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.core.ranges import fold_nodes

_TOGETHER_S = 5.0  # quiet time after the last node has come, so that several nodes cost one pause
_SEAL_S = 1800.0  # for every rank to seal a step that more nodes can begin with; nobody waits for an answer


class Growth:
    """Wants a pause for newcomers, once all ranks have sealed a step that all of them can begin with."""

    def __init__(self, rendezvous: Rendezvous, reforming: Reforming, pauses: Pauses) -> None:
        self._rendezvous, self._reforming, self._pauses = rendezvous, reforming, pauses
        self._seen: tuple[list[Launcher], int] = ([], 0)
        self._since_s = 0.0
        self._wanted: tuple[int, Pause] | None = None  # in which incarnation a pause was wanted last

    @property
    def newcomers(self) -> list[Launcher]:
        """Launchers that would be taken in now."""
        return [] if self._reforming.under_way else self._rendezvous.newcomers

    def tick(self, now_s: float) -> None:
        """Time passes while the job trains."""
        newcomers, incarnation = seen = (self.newcomers, self._reforming.incarnation)
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        if not newcomers or now_s - self._since_s < _TOGETHER_S or self._pauses.objection("restart"):
            return
        if self._wanted is not None and self._wanted[0] == incarnation and self._wanted[1].is_impossible:
            return
        why = f"{fold_nodes(one.node for one in newcomers)} can be taken in"
        pause = Pause("grow", now_s + _SEAL_S, set(self._rendezvous.placements), why=why, alike=True)
        self._wanted = (incarnation, pause)
        self._pauses.want(pause)
