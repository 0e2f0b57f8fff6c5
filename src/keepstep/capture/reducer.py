"""When a rank waits for DDP's gradients, and when they have come: the reducer waits in C++, where no Work tells it.

It does so at the very end of a backward, in a final callback of the autograd engine. Ours, queued when the first bucket
is reduced, runs right before it: there the gradients are computed, and what is not yet reduced is waited for. We wait
for the same Works in the same order, a moment before the reducer does, and so see each end; a Work that fails is left
to the reducer, which meets the same error.
"""

from __future__ import annotations

from typing import Any

from keepstep.capture.internals import after_gradients, in_backward
from keepstep.capture.phases import Phases
from keepstep.capture.recorder import Operation, Recorder, harmless
from keepstep.capture.sites import Sites
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind, Op

REDUCED = int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT)
_COLLECTIVE, _ALLREDUCE = int(Kind.COLLECTIVE), int(Op.ALLREDUCE)


class ReducerWaits:
    """Stamps waits and ends of the reducer's operations."""

    def __init__(self, recorder: Recorder, phases: Phases, sites: Sites) -> None:
        self.recorder = recorder
        self._phases = phases
        self._sites = sites
        self._site = 0  # of the backward in progress
        self._queued_in = 0  # number of the backward our callback was queued in
        self._reducing: list[tuple[Any, Operation]] = []
        phases.gradients_reduced = self._backward_over

    def begin(self, group: int, nbytes: int) -> Operation | None:
        """Start the record of a bucket's all-reduce in a plain backward; None where the general way must be taken.

        The way of nearly every call, and on a host whose caches have gone cold each Python function costs.
        """
        start, phases = self.recorder.start, self._phases
        if start is None or not phases.in_plain_backward:
            return None
        if self._queued_in != phases.backwards:
            self._queue()
        return start(_COLLECTIVE, _ALLREDUCE, group, WORLD_PEER, nbytes, REDUCED, self._site)

    def began(self, work: Any, operation: Operation) -> None:
        """Its all-reduce is under way."""
        self._reducing.append((work, operation))
        try:
            self._end_completed()
        except Exception as error:
            self.recorder.stumbled(error)

    def take(self, work: Any, operation: Operation) -> Any:
        """The Work to hand to the reducer for an operation it has just begun."""
        if not in_backward():
            return RecordedWork(work, operation)  # waited for in the call itself
        try:
            if self._phases.in_plain_backward:
                if self._queued_in != self._phases.backwards:
                    self._queue()
                self.began(work, operation)
            else:  # a backward inside another (re-entrant checkpoints): our callback would come too early
                work.get_future().add_done_callback(operation)
        except Exception as error:
            self.recorder.stumbled(error)
            operation()
        return work

    def _queue(self) -> None:
        after_gradients(self._gradients_computed)
        self._queued_in = self._phases.backwards
        self._site = self._sites.here()
        self._reducing.clear()

    def _end_completed(self) -> None:
        """Ends what is complete by now, oldest first: the end is then known to within a bucket."""
        reducing = self._reducing
        while reducing and reducing[0][0].is_completed():
            operation = reducing.pop(0)[1]
            operation.waiting()
            operation()

    @harmless
    def _gradients_computed(self) -> None:
        self._end_completed()
        for _, operation in self._reducing:
            operation.waiting()
        for work, operation in self._reducing:
            try:
                work.wait()
            except Exception:
                operation.fail()
                return
            operation()

    @harmless
    def _backward_over(self) -> None:
        for _, operation in self._reducing:
            operation()
        self._reducing.clear()
