"""Records when a rank waits for DDP's gradients: the reducer waits in C++, where no Work sees it.

The reducer waits at the very end of a backward pass, in a final callback of the autograd engine. The probe queues a
callback of its own when the first bucket is reduced; it runs right before the reducer's, when the gradients are
computed. It waits for the same Works in the same order as the reducer will, and so sees each of them end. A Work that
fails is left to the reducer, which gets the same error. All this is in the native class ``Buckets``.
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
from keepstep.capture.methods import ELEMENT_BITS
from keepstep.capture.native import Buckets, Here
from keepstep.capture.recorder import Operation, Recorder
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind, Op, reduction_bits

REDUCED = int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT)
_REDUCED_BY_TYPE = {dtype: REDUCED | bits | reduction_bits("SUM") for dtype, bits in ELEMENT_BITS.items()}


class ReducerWaits:
    """Records the waits and ends of the operations that DDP's reducer begins."""

    def __init__(self, recorder: Recorder, here: Here) -> None:
        fields = int(Kind.COLLECTIVE), int(Op.ALLREDUCE), WORLD_PEER, REDUCED
        self.recorder = recorder
        self.buckets = Buckets(
            recorder, here, after_gradients, COMPILING, OBSERVERS, *fields, _REDUCED_BY_TYPE
        )

    def call(self, native: Any, group: int, general: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement for the ``allreduce`` of a native group, whose number in the ring is ``group``."""
        whole = whole_allreduce(native)
        return self.buckets.call(whole, direct_allreduce(native) or whole, group, general)

    def take(self, work: Any, operation: Operation) -> Any:
        """The Work to give to the reducer for an operation that it has just begun."""
        if not in_backward():
            return RecordedWork(work, operation)  # the reducer waits for it in the same call
        try:
            if self.buckets.plain:
                self.buckets.add(work, operation)
            else:  # in a backward inside another (re-entrant checkpoints) the probe's callback would run too early
                work.get_future().add_done_callback(operation)
        except Exception as error:
            self.recorder.stumbled(error)
            operation()
        return work
