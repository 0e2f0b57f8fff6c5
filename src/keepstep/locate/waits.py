"""Was anybody seen to wait? Without that, who holds the job up cannot be told from who waits for it."""

from __future__ import annotations

from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import table_of


def waits_recorded(evidence: Evidence) -> bool:
    """Whether the slow iterations show how long ranks waited for each other.

    They do not where an operation ran on a group whose ends are not recorded: what its ranks waited in it is unknown.
    """
    rows = table_of(evidence.after)
    if not len(rows) or not rows.column("blocked_s").max() > 0:
        return False
    unseen = {name for name, group in evidence.groups.items() if not group.records_waits}
    if not unseen:
        return True
    return not any(stream.group in unseen for row in rows.newest_steps() for stream in row.streams)


def waits_seen(evidence: Evidence) -> bool:
    """Whether a rank is in an operation now whose end would be recorded: it waits for somebody."""
    return any(
        (group := evidence.groups.get(flight.group)) is None or group.records_waits
        for state in evidence.states
        if state.alive
        for flight in state.in_flight
    )


def hidden_waits(evidence: Evidence) -> frozenset[int]:
    """The ranks that may themselves wait for others unseen: they have begun operations whose ends are not recorded."""
    unseen = {name for name, group in evidence.groups.items() if not group.records_waits}
    return frozenset(
        state.rank
        for state in evidence.states
        if unseen and any(stream.started > 0 and stream.group in unseen for stream in state.streams)
    )
