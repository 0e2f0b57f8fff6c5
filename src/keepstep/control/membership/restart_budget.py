"""What the restarts of a job of several nodes were for, so that its budgets hold: one cause for each incarnation.

Soft: launchers say their failures again to a controller that begins anew; a node that was lost takes its own along.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.budgets import Cause, Limits, Refusal, comes_first, refusal
from keepstep.wire.messages import Failed

_MOST = 256  # causes that are kept, one for each incarnation


class Spending:
    """The causes of all restarts. ``unix_s``: Unix time of a moment on the controller's clock."""

    def __init__(self, limits: Limits, unix_s: Callable[[float], float]) -> None:
        self._limits, self._unix_s = limits, unix_s
        self._causes: dict[int, Cause] = {}  # by the incarnation that ended because of it

    def failed(self, node: str, failed: Failed, now_s: float) -> None:
        """Workers of a node failed, now or earlier."""
        at_s = failed.unix_s or self._unix_s(now_s)
        error = failed.message.removeprefix(f"rank {failed.rank}: ")
        self._add(failed.incarnation, Cause(at_s, node, failed.rank, failed.step, error, failed.by_keepstep))

    def lost(self, node: str, incarnation: int, now_s: float) -> None:
        """A node is lost, which ends this incarnation."""
        self._add(incarnation, Cause(self._unix_s(now_s), node, error=f"node {node} lost"))

    def forget(self, incarnation: int) -> None:
        """What failed in this incarnation failed because a pause had ended other ranks: it is no cause."""
        self._causes.pop(incarnation, None)

    def refused(self, incarnation: int) -> Refusal | None:
        """Why the job may not begin again after this incarnation."""
        if incarnation not in self._causes:
            return None
        ended = sorted(one for one in self._causes if one <= incarnation)
        return refusal(self._limits, [self._causes[one] for one in ended])

    def _add(self, incarnation: int, cause: Cause) -> None:
        known = self._causes.get(incarnation)
        self._causes[incarnation] = cause if known is None else comes_first(known, cause)
        if len(self._causes) > _MOST:
            del self._causes[min(self._causes)]
