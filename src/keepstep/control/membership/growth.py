"""When a job that has fewer nodes than it may have takes in those that have come."""

from __future__ import annotations

from keepstep.control.membership.operator_orders import Operating
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.core.ranges import fold_nodes

_TOGETHER_S = 5.0  # nodes that come one after the other cost one beginning, not each its own


class Growing:
    """Says when; `Operating` does it at the next step that all ranks have sealed."""

    def __init__(self, rendezvous: Rendezvous, reforming: Reforming, operating: Operating) -> None:
        self._rendezvous, self._reforming, self._operating = rendezvous, reforming, operating
        self._seen: tuple[list[Launcher], int] = ([], 0)
        self._since_s = 0.0

    @property
    def newcomers(self) -> list[Launcher]:
        """Who would be taken in now."""
        return [] if self._reforming.under_way else self._rendezvous.newcomers

    def tick(self, now_s: float) -> None:
        """Time passes while the job trains."""
        seen = (self.newcomers, self._reforming.incarnation)
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        if not seen[0] or self._operating.is_growing or now_s - self._since_s < _TOGETHER_S:
            return
        self._operating.grow(f"{fold_nodes(one.node for one in seen[0])} can be taken in", now_s)
