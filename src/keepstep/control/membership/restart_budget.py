"""What the restarts of a job of several nodes were for, so that its budgets hold: one cause for each incarnation.

Soft: launchers say their failures again to a controller that begins anew; a node that was lost takes its own along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from keepstep.control.effects import Tell
from keepstep.control.membership.reforming_orders import Order
from keepstep.core.budgets import Cause, Limits, Refusal, comes_first, pause_s, refusal
from keepstep.detect.error_kind import kind_of
from keepstep.wire.messages import Failed

_MOST = 256  # causes that are kept, one for each incarnation


class StoragePause:
    """The pause in which storage may be mended, before the restart for its error."""

    def __init__(self) -> None:
        self._incarnation = -1
        self._until_s = 0.0

    def waits(self, pause_s: float, incarnation: int, now_s: float) -> list[Order] | None:
        """What to tell while the pause lasts, from the first call for an incarnation on; None once it is over."""
        if not pause_s:
            return None
        if incarnation == self._incarnation:
            return [] if now_s < self._until_s else None
        self._incarnation, self._until_s = incarnation, now_s + pause_s
        return [Tell(f"the job begins again in {pause_s:.0f} s, as storage may be mended until then")]


class Spending:
    """The causes of all restarts. ``unix_s``: Unix time of a moment on the controller's clock."""

    def __init__(self, limits: Limits, unix_s: Callable[[float], float]) -> None:
        self._limits, self._unix_s = limits, unix_s
        self._causes: dict[int, Cause] = {}  # by the incarnation that ended because of it

    def failed(self, node: str, failed: Failed, now_s: float) -> None:
        """Workers of a node failed, now or earlier."""
        at_s = failed.unix_s or self._unix_s(now_s)
        error = failed.message.removeprefix(f"rank {failed.rank}: ")
        kind = kind_of(error)
        said = (failed.rank, failed.step, error, failed.by_keepstep, kind[1] if kind else "")
        self._add(failed.incarnation, Cause(at_s, node, *said))

    def lost(self, node: str, incarnation: int, now_s: float) -> None:
        """A node is lost, which ends this incarnation."""
        self._add(incarnation, Cause(self._unix_s(now_s), node, error=f"node {node} lost"))

    def forget(self, incarnation: int) -> None:
        """What failed in this incarnation failed because a pause had ended other ranks: it is no cause."""
        self._causes.pop(incarnation, None)

    def refused(self, incarnation: int, unfit: Collection[str] = ()) -> Refusal | None:
        """Why the job may not begin again after this incarnation.

        ``unfit``: nodes that are known to be. What ends an incarnation on one of them says nothing of the others.
        """
        if incarnation not in self._causes:
            return None
        ended = sorted(one for one in self._causes if one <= incarnation)
        found, last = refusal(self._limits, [self._causes[one] for one in ended]), self._causes[incarnation]
        return replace(found, node=last.node) if found is not None and last.node in unfit else found

    def node_of(self, incarnation: int) -> str:
        """The node whose failure ended this incarnation; empty where that is not known."""
        return self._causes[incarnation].node if incarnation in self._causes else ""

    def pause_s(self, incarnation: int) -> float:
        """How long to wait before the restart for what ended this incarnation."""
        if incarnation not in self._causes:
            return 0.0
        ended = sorted(one for one in self._causes if one <= incarnation)
        return pause_s([self._causes[one] for one in ended])

    def _add(self, incarnation: int, cause: Cause) -> None:
        known = self._causes.get(incarnation)
        self._causes[incarnation] = cause if known is None else comes_first(known, cause)
        if len(self._causes) > _MOST:
            del self._causes[min(self._causes)]
