"""Why the nodes of a job re-form: because something failed, or because it was ordered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from keepstep.control.membership.rendezvous import Launcher

LOST_CODE = 1  # exit code of a job whose first failure was the loss of a node
BY_HAND = "an operator ordered it"


@dataclass(frozen=True, slots=True)
class Cause:
    """What the job ends with if it may not begin again, and what is said of it."""

    exit_code: int
    text: str


_UNKNOWN = Cause(LOST_CODE, "a recovery was under way when the controller began again")


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
    failure: Cause | None = None

    @property
    def cause(self) -> Cause:
        """What a re-forming is for: an order if there is one, as what fails because of it is no cause; or a failure."""
        return Cause(LOST_CODE, self.ordered_by) if self.ordered_by else self.failure or _UNKNOWN

    def failed(self, exit_code: int, text: str) -> None:
        """Something has failed, and this is the occasion of the re-forming if nothing failed before."""
        self.failure = self.failure or Cause(exit_code, text)
