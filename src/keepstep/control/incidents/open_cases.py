"""The cases that are open, and whether the job stands still because of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.control.incidents.corrupt_case import CorruptCase
from keepstep.control.incidents.crash_case import CrashCase
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.slow_case import SlowCase
from keepstep.control.membership.ending import Ending
from keepstep.control.membership.reforming import Reforming


@dataclass(slots=True)
class OpenCases:
    """There may be several slowdowns at once, and several states that are wrong, but only one hang and one crash."""

    ending: Ending
    reforming: Reforming
    slow: list[SlowCase] = field(default_factory=list[SlowCase])
    hang: HangCase | None = None
    crash: CrashCase | None = None
    corrupt: list[CorruptCase] = field(default_factory=list[CorruptCase])

    def all(self) -> list[SlowCase | HangCase | CrashCase | CorruptCase]:
        """All cases that are not closed."""
        cases = (*self.slow, self.hang, self.crash, *self.corrupt)
        return [case for case in cases if case is not None and not case.closed]

    def sweep(self) -> None:
        """Forget cases that are closed."""
        self.slow[:] = [case for case in self.slow if not case.closed]
        self.corrupt[:] = [case for case in self.corrupt if not case.closed]
        if self.hang is not None and self.hang.closed:
            self.hang = None
        if self.crash is not None and self.crash.closed:
            self.crash = None

    def ends(self, incarnation: int) -> bool:
        """Whether the job ends, or this incarnation: by a crash that is not known to be of an earlier one."""
        crashed = self.crash is not None and not 0 <= self.crash.incarnation < incarnation
        return crashed or self.ending.under_way

    def standstill(self) -> str:
        """Why no rank can be held, and nothing be ordered, now; "" while the job runs."""
        if self.crash is not None or self.ending.under_way:
            return "the job is ending"
        if self.reforming.under_way:
            return "its workers are being ended" if not self.reforming.suspended else "the job is suspended"
        return "the job hangs" if self.hang is not None else ""
