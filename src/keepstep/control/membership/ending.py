"""How the job ends: what it is told to end with, when that may be told, and when all its launchers have ended."""

from __future__ import annotations

from collections.abc import Collection

from keepstep.control.effects import Exit
from keepstep.control.membership.reforming_orders import End
from keepstep.control.membership.rendezvous import Launcher
from keepstep.wire.messages import Bye, Ended, Stop


def exit_code_of(end: End, located: int | None) -> int:
    """The exit code of a job that ends so. ``located``: that of the rank to blame, where that is known."""
    return end.exit_code if end.by_operator or end.kind else located or end.exit_code


class Ending:
    """How far the job's end has come. Many parts of the controller read it; the controller alone changes it.

    ``join_s``: for so long nodes that have to agree on who plays which rank are waited for; ``grace_s``: between the
    end of the job and that of its controller.
    """

    def __init__(self, join_s: float, grace_s: float) -> None:
        self.stop: Stop | None = None  # what the job is to end with
        self.is_told = False  # launchers have been told of `stop`, so that it cannot be changed
        self.over = False  # all launchers have ended
        self.under_way = False  # true once a stop was ordered or all launchers have ended
        # All that were ever placed, and their last words.
        self.launchers: dict[Launcher, Ended | Bye | None] = {}
        self._join_s, self._grace_s = join_s, grace_s
        self._over_s: float | None = None  # since when it is over, until the controller is told to exit
        self._withheld_since_s: float | None = None  # since when the electors have not agreed

    @property
    def exit_code(self) -> int | None:
        """The job's exit code; 0 where an operator stopped it, None while it goes on."""
        if not self.under_way:
            return None
        return 0 if self.stop is None or self.stop.by_operator else self.stop.exit_code

    def begin(self, stop: Stop, *, is_told: bool = False) -> None:
        """The job is to end with this; ``is_told``: an earlier controller told launchers so."""
        self.stop, self.under_way = stop, True
        self.is_told |= is_told

    def slept(self, seconds: float) -> None:
        """This process did not run for so many seconds: no elector could be heard meanwhile."""
        if self._withheld_since_s is not None:
            self._withheld_since_s += seconds

    def withheld(self, is_agreed: bool, now_s: float) -> bool:
        """Whether the job must end, as electors have not agreed on a rank table for too long. Call it at every tick."""
        if is_agreed:
            self._withheld_since_s = None
        elif self._withheld_since_s is None:
            self._withheld_since_s = now_s
        else:
            return self._cannot_agree(now_s) and self.stop is None
        return False

    def to_tell(self, agreed: Stop | None, now_s: float) -> Stop | None:
        """What launchers are to be told now, once: when it holds under any leader, or there can be none.

        ``agreed``: the end on which a quorum has agreed.
        """
        if self.stop is None or self.is_told or (agreed is None and not self._cannot_agree(now_s)):
            return None
        self.is_told = True
        self.stop = agreed or self.stop
        return self.stop

    def is_over(self, members: Collection[Launcher], is_settled: bool, now_s: float) -> bool:
        """Whether the last launcher has ended just now.

        ``members``: who is waited for; none: all that were ever placed. ``is_settled``: a quorum has kept the newest
        rank table; otherwise another leader may know of a later incarnation, or end it otherwise.
        """
        expected = members or self.launchers
        if self.over or any(self.launchers.get(one) is None for one in expected):
            return False
        if not self.is_told and (self.stop is not None or not is_settled):
            return False
        self.over, self.under_way, self._over_s = True, True, now_s
        return True

    def exit(self, now_s: float) -> Exit | None:
        """The controller's own exit, once, a while after the job's end."""
        if self._over_s is None or now_s - self._over_s < self._grace_s:
            return None
        self._over_s = None
        if self.stop is None:
            return Exit(0, "all launchers have ended")
        return Exit(self.stop.exit_code, self.stop.reason)

    def _cannot_agree(self, now_s: float) -> bool:
        since_s = self._withheld_since_s
        return since_s is not None and now_s - since_s >= self._join_s
