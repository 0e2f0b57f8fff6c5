"""When a node that hears nothing of the controller's host ends its workers. Pure: steps and the time in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepstep.launch.controller.member import Member

LONG_STILL_S = 60.0
_USUAL_TIMES = 4


class Standstill:
    """For how long no step was made, where that is longer than this job has ever paused between two."""

    def __init__(self) -> None:
        self._steps = 0
        self._since_s = 0.0
        self._longest_s = 0.0

    def look(self, steps: int, now_s: float) -> float:
        """Seconds; 0 while a step is made now and then, and before the first. To be asked about once a second.

        ``steps``: that all ranks here have made; a smaller number than before is another incarnation's.
        """
        if steps != self._steps:
            if 0 < self._steps < steps:
                self._longest_s = max(self._longest_s, now_s - self._since_s)
            self._steps, self._since_s = steps, now_s
        still_s = now_s - self._since_s
        return still_s if steps > 0 and still_s > _USUAL_TIMES * self._longest_s else 0.0


class CutOff:
    """A node whose place others may be given ends its workers soon.

    In a job that does not begin again there are no others, and training waits for no controller: there the host may be
    gone with ranks of its own, and without a last packet, so that nobody's collectives end. Its workers end once they
    stand still, too.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._standstill = Standstill()

    def look(self, steps: int, now_s: float) -> str:
        """Why the workers have to end; "" while they do not. ``steps``: that all ranks here have made."""
        still_s = self._standstill.look(steps, now_s)
        if self._member.is_cut_off(now_s):
            return self._member.missing if self._member.runs else ""
        if self._member.begins_again or still_s < LONG_STILL_S or not self._member.is_alone(now_s):
            return ""
        return f"no step for {still_s:.0f} s, and nothing comes from the controller's host"
