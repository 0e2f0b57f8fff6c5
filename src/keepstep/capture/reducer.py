"""When a rank waits for DDP's gradients, and when they have come: the reducer waits in C++, where no Work tells it.

It does so at the very end of a backward, in a final callback of the autograd engine. Ours, queued when the first bucket
is reduced, runs right before it: there the gradients are computed, and what is not yet reduced is waited for. We wait
for the same Works in the same order, a moment before the reducer does, and so see each end; a Work that fails is left
to the reducer, which meets the same error. ``Buckets`` does all this; it is native.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from keepstep.capture._native import Buckets  # pyright: ignore[reportMissingModuleSource]
from keepstep.capture.internals import COMPILING, after_gradients, in_backward
from keepstep.capture.recorder import Operation, Recorder
from keepstep.capture.sites import Sites
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind, Op

REDUCED = int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT)

_allreduce = ProcessGroup.allreduce  # torch's own


class ReducerWaits:
    """Stamps waits and ends of the reducer's operations."""

    def __init__(self, recorder: Recorder, sites: Sites) -> None:
        fields = int(Kind.COLLECTIVE), int(Op.ALLREDUCE), WORLD_PEER, REDUCED
        self.recorder = recorder
        self.buckets = Buckets(recorder, sites.here, after_gradients, COMPILING, _allreduce, *fields)

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
