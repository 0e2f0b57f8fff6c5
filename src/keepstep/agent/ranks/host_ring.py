"""A ring as the agent judges by it: without what the NCCL shim wrote.

Those records are of the same operations that the probe records, once more and lower down, and they end when the call
has returned, not when the transfer has: taken for transfers they would spoil clocks, streams and waits. Who looks for
them (a saved ring, ``keepstep.ring.RingReader``) finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.core.events import Flag
from keepstep.core.summary import GroupInfo
from keepstep.ring import Batch, RingReader

BACKEND = "nccl"  # of a communicator in the ring's table; a process group's has the device, too: "cuda:nccl"
_ENQUEUED = int(Flag.ENQUEUED)


class HostRing(RingReader):
    """See the module. Its ``groups()`` has all, as they are known by their place."""

    def poll(self) -> Batch:
        batch = super().poll()
        return Batch(_judged(batch.started), _judged(batch.finished), batch.lost, batch.unfinished)

    def in_flight(self) -> Any:
        return _judged(super().in_flight())

    def streams(self) -> Any:
        rows: Any = super().streams()
        theirs = [place for place, group in enumerate(self.groups()) if group.backend == BACKEND]
        return rows[[group not in theirs for group in rows["group"].tolist()]] if theirs else rows


def process_groups(groups: Sequence[GroupInfo]) -> list[GroupInfo]:
    """Those of torch."""
    return [group for group in groups if group.backend != BACKEND]


def _judged(rows: Any) -> Any:
    enqueued = (rows["flags"] & _ENQUEUED) != 0
    return rows[~enqueued] if enqueued.any() else rows
