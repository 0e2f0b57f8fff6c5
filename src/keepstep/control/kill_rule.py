"""May a hung process be ended? Pure: a kill needs evidence of no progress, since a verdict may come early."""

from __future__ import annotations

from keepstep.core.summary import RankState

_APART_S = 0.4  # two looks at a process that sleeps
_LONG = 10.0  # times the longest pause that it has shown


def evidence(first: RankState, last: RankState, stuck_s: float, limit_s: float) -> str:
    """Why a process that is to blame for a hang will not go on by itself; "": it may.

    Args:
        first: where it was when the hang was confirmed.
        last: where it is now.
        stuck_s: how long it has made no progress.
        limit_s: beyond the longest pause that the job has shown in this phase; 0: not known.
    """
    if not last.alive or last.progress != first.progress or stuck_s < limit_s:
        return ""
    if last.process_state == "T":
        return "its process is stopped"
    told = f"no progress for {stuck_s:.0f} s, where {limit_s:.1f} s are usual at most"
    if limit_s > 0 and stuck_s >= _LONG * limit_s:
        return told
    apart = last.now_s - first.now_s >= _APART_S
    asleep = first.process_state in ("S", "D") and last.process_state in ("S", "D")
    return f"asleep, {told}" if limit_s > 0 and apart and asleep else ""
