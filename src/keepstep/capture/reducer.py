"""When a rank waits for DDP's gradients: the reducer waits in C++, where no Work tells it.

It does so at the very end of a backward, in a final callback of the autograd engine. Ours, queued when the first bucket
is reduced, runs right before it: there the gradients are computed, and what is not yet reduced is waited for.

The futures' callbacks race with the training thread for the interpreter's lock: when the backward is over the reducer
has seen every future complete, so a callback that has not come by then must not make the end any later.
"""

from __future__ import annotations

from keepstep.capture.internals import after_gradients, in_backward
from keepstep.capture.phases import Phases
from keepstep.capture.recorder import Operation


class ReducerWaits:
    """Stamps the start of the wait on the reducer's operations that are still in flight when gradients are done."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._queued_in = 0  # number of the backward our callback was queued in
        self._reducing: list[Operation] = []
        phases.gradients_ready = self._backward_over

    def add(self, operation: Operation) -> None:
        """Take an operation that the reducer has just begun."""
        # Inside a nested backward (re-entrant activation checkpoints) the callback would run too early.
        if not self._phases.in_plain_backward or not in_backward():
            return
        if self._queued_in != self._phases.backwards:
            self._queued_in = self._phases.backwards
            self._reducing.clear()
            after_gradients(self._gradients_done)
        self._reducing.append(operation)

    def _gradients_done(self) -> None:
        for operation in self._reducing:
            if not operation.ended:
                operation.waiting()

    def _backward_over(self) -> None:
        for operation in self._reducing:
            operation()
        self._reducing.clear()
