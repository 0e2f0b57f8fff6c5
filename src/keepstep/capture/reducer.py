"""When a rank waits for DDP's gradients, and when they have come: the reducer waits in C++, where no Work tells it.

It does so at the very end of a backward, in a final callback of the autograd engine. Ours, queued when the first bucket
is reduced, runs right before it: there the gradients are computed, and what is not yet reduced is waited for. We wait
for the same Works in the same order, a moment before the reducer does, and so see each end; a Work that fails is left
to the reducer, which meets the same error. ``Buckets`` does all this; it is native.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.capture.internals import (
    COMPILING,
    OBSERVERS,
    after_gradients,
    direct_allreduce,
    in_backward,
    whole_allreduce,
)
from keepstep.capture.native import Buckets
from keepstep.capture.recorder import Operation, Recorder
from keepstep.capture.sites import Sites
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind, Op

REDUCED = int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT)


class ReducerWaits:
    """Stamps waits and ends of the reducer's operations."""

    def __init__(self, recorder: Recorder, sites: Sites) -> None:
        fields = int(Kind.COLLECTIVE), int(Op.ALLREDUCE), WORLD_PEER, REDUCED
        self.recorder = recorder
        self.buckets = Buckets(recorder, sites.here, after_gradients, COMPILING, OBSERVERS, *fields)

    def call(self, native: Any, group: int, general: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of the ``allreduce`` of a native group; ``group``: its number in the ring."""
        whole = whole_allreduce(native)
        return self.buckets.call(whole, direct_allreduce(native) or whole, group, general)

    def take(self, work: Any, operation: Operation) -> Any:
        """The Work to hand to the reducer for an operation it has just begun."""
        if not in_backward():
            return RecordedWork(work, operation)  # waited for in the call itself
        try:
            if self.buckets.plain:
                self.buckets.add(work, operation)
            else:  # a backward inside another (re-entrant checkpoints): our callback would come too early
                work.get_future().add_done_callback(operation)
        except Exception as error:
            self.recorder.stumbled(error)
            operation()
        return work
