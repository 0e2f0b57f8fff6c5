"""Which process group of torch an NCCL communicator serves: the one whose call was open when it was called.

The probe records torch's calls, the shim NCCL's, which torch makes inside its own on the same thread. Calls from C++
(DDP's reducer) have none around them, so that a communicator is known by its others: broadcasts, barriers, the calls of
the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from keepstep.agent.ranks.event_buffer import Rows, chosen
from keepstep.core.events import Flag, Kind
from keepstep.core.summary import GroupInfo

_ENQUEUED, _P2P = int(Flag.ENQUEUED), int(Kind.P2P)


def served_groups(rows: Rows, groups: Sequence[GroupInfo]) -> Mapping[int, str]:
    """By communicator, as a place in ``groups``, the process group's name; without those of which calls disagree.

    ``rows``: a ring's records, the shim's among them, in order of tickets.
    """
    calls = chosen(rows, (rows["kind"] <= _P2P) & (rows["group"] >= 0) & (rows["group"] < len(groups)))
    is_nccls = (calls["flags"] & _ENQUEUED) != 0
    nccls, torchs = chosen(calls, is_nccls), chosen(calls, ~is_nccls)
    found: set[tuple[int, int]] = set()
    for thread in np.unique(nccls["thread"]):
        inner, outer = chosen(nccls, nccls["thread"] == thread), chosen(torchs, torchs["thread"] == thread)
        if not len(outer):
            continue
        place = np.searchsorted(outer["start_ns"], inner["start_ns"], "right") - 1
        ends = outer["end_ns"][place]
        inside = (place >= 0) & ((ends == 0) | (inner["start_ns"] <= ends))
        found.update(
            zip(inner["group"][inside].tolist(), outer["group"][place[inside]].tolist(), strict=True)
        )
    served: dict[int, set[str]] = {}
    for communicator, group in found:
        if groups[communicator].is_communicator and not groups[group].is_communicator:
            served.setdefault(communicator, set()).add(groups[group].name)
    return {communicator: min(names) for communicator, names in served.items() if len(names) == 1}
