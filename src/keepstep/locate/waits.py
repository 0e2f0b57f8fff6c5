"""Was anybody seen to wait? Without that, who holds the job up cannot be told from who waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keepstep.core.iteration_table import column, newest_steps
from keepstep.core.summary import GroupInfo, IterationSummary, RankState


def waits_recorded(rows: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]) -> bool:
    """Whether these iterations show how long ranks waited for each other.

    They do not where an operation ran on a group whose ends are not recorded: what its ranks waited in it is unknown.
    """
    if not len(rows) or not column(rows, "blocked_s").max() > 0:
        return False
    unseen = {name for name, group in groups.items() if not group.records_waits}
    if not unseen:
        return True
    return not any(stream.group in unseen for row in newest_steps(rows) for stream in row.streams)


def waits_seen(states: Sequence[RankState], groups: Mapping[str, GroupInfo]) -> bool:
    """Whether a rank is in an operation now whose end would be recorded: it waits for somebody."""
    return any(
        (group := groups.get(flight.group)) is None or group.records_waits
        for state in states
        if state.alive
        for flight in state.in_flight
    )
