"""When a node ends its workers because it hears nothing of the controller's host. Pure: steps and the time in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepstep.launch.controller.member import Member

LONG_STILL_S = 60.0
_USUAL_TIMES = 4


class Standstill:
    """For how long no step was made, where that is much longer than any pause that this job has made before."""

    def __init__(self) -> None:
        self._steps = 0
        self._since_s = 0.0
        self._longest_s = 0.0

    def look(self, steps: int, now_s: float) -> float:
        """Seconds without a step; 0 before the first one, and while the pause is a usual one. Called once a second.

        ``steps``: that all ranks of this node have made; a smaller number than before is another incarnation's.
        """
        if steps != self._steps:
            if 0 < self._steps < steps:
                self._longest_s = max(self._longest_s, now_s - self._since_s)
            self._steps, self._since_s = steps, now_s
        still_s = now_s - self._since_s
        return still_s if steps > 0 and still_s > _USUAL_TIMES * self._longest_s else 0.0


class CutOff:
    """Decides when a node that is cut off ends its workers.

    In a job that may begin again that is soon, since another node may be given this one's place. In a job that does
    not, training goes on without a controller. But its host may have died without a last packet, so that collectives
    with the host's ranks never end: there workers end once they also stand still.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._standstill = Standstill()

    def look(self, steps: int, now_s: float) -> str:
        """Why the workers have to end; "" while they do not. ``steps``: that all ranks of this node have made."""
        still_s = self._standstill.look(steps, now_s)
        if self._member.is_cut_off(now_s):
            return self._member.missing if self._member.runs else ""
        if self._member.begins_again or still_s < LONG_STILL_S or not self._member.is_alone(now_s):
            return ""
        return f"no step for {still_s:.0f} s, and nothing comes from the controller's host"
