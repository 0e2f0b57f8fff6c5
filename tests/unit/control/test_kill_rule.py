"""When a process that is to blame for a hang may be ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.control.kill_rule import evidence
from keepstep.core.summary import RankState

LIMIT_S = 4.0
ASLEEP = RankState(2, True, 7, 1, 90.0, 100, 91.0, 100.0, process_state="S", process=77)
LATER = replace(ASLEEP, now_s=100.5)


@pytest.mark.parametrize(
    ("first", "last", "stuck_s", "limit_s", "why"),
    [
        (ASLEEP, LATER, 9.0, LIMIT_S, "asleep, no progress"),
        (ASLEEP, LATER, 3.0, LIMIT_S, ""),  # a pause as long as others that it has shown
        (ASLEEP, ASLEEP, 9.0, LIMIT_S, ""),  # one look only
        (ASLEEP, LATER, 9.0, 0.0, ""),  # no pause is known to compare with
        (ASLEEP, replace(LATER, progress=101), 9.0, LIMIT_S, ""),
        (ASLEEP, replace(LATER, process_state="R"), 9.0, LIMIT_S, ""),  # it computes, perhaps for long
        (ASLEEP, replace(LATER, process_state="R"), 40.0, LIMIT_S, "no progress for 40 s"),
        (replace(ASLEEP, process_state="T"),) * 2 + (4.5, LIMIT_S, "stopped"),
        (replace(ASLEEP, process_state="t"),) * 2 + (9.0, LIMIT_S, ""),  # a debugger holds it
        (ASLEEP, replace(LATER, alive=False, process_state=""), 9.0, LIMIT_S, ""),
    ],
)
def test_evidence(first: RankState, last: RankState, stuck_s: float, limit_s: float, why: str) -> None:
    found = evidence(first, last, stuck_s, limit_s)
    assert (why in found) if why else found == ""
