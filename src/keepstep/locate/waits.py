"""Was anybody seen to wait? Without that, who holds the job up cannot be told from who waits for it."""

from __future__ import annotations

from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import table_of
from keepstep.locate._device_calls import device_groups


def waits_recorded(evidence: Evidence) -> bool:
    """Whether the slow iterations show how long ranks waited for each other.

    They do not where an operation ran on a group whose ends are not recorded: what its ranks waited in it is unknown.
    """
    rows = table_of(evidence.after)
    if not len(rows) or not rows.column("blocked_s").max() > 0:
        return False
    if rows.column("ahead_s").min() >= 0:
        return True  # they were measured on the GPU
    unseen = {name for name, group in evidence.groups.items() if not group.records_waits}
    if not unseen:
        return True
    return not any(stream.group in unseen for row in rows.newest_steps() for stream in row.streams)


def waits_seen(evidence: Evidence) -> bool:
    """Whether a rank is known to be in an operation now that has not ended: it waits for somebody, or its device does.

    What the ring has in flight on a group of a device is a call that has not returned, and may not wait for anybody.
    """
    device = device_groups(evidence.states, evidence.groups)
    return any(
        flight.group not in device.names or flight not in given.in_flight
        for given, state in zip(evidence.states, device.states, strict=True)
        if state.alive
        for flight in state.in_flight
    )


def hidden_waits(evidence: Evidence) -> frozenset[int]:
    """The ranks that may themselves wait for others unseen.

    They have begun operations whose ends are not recorded, and of which torch's flight recorder does not tell, either.
    """
    device = device_groups(evidence.states, evidence.groups)
    begun = {
        state.rank
        for state in evidence.states
        if any(stream.started > 0 and stream.group in device.names for stream in state.streams)
    }
    told = {state.rank for state in evidence.states if state.device is not None and state.device.is_whole}
    return frozenset(begun - (told & device.told)) | device.mute
