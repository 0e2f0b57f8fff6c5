"""Records when a rank evaluates: from ``model.eval()`` until the model trains again.

``eval()`` is also called on teachers, on frozen batch norms and on models built for later, so it counts only for a
module that was in training mode in a process that has stepped an optimizer. A module that is still in evaluation mode
when the next backward runs is frozen, not evaluated, and is never taken for an evaluation again.
"""

from __future__ import annotations

import threading
import weakref
from functools import wraps
from typing import Any

from keepstep.capture.recorder import Operation, Recorder, harmless
from keepstep.core.events import Phase


class Evaluation:
    """Detects the evaluation in progress, if there is one."""

    def __init__(self, recorder: Recorder) -> None:
        self.trained = False  # whether an optimizer has stepped
        self.recorder = recorder
        self.operation: Operation | None = None  # the record of the evaluation in progress
        self._evaluated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._frozen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._in_train = False

    def forget(self) -> None:
        """Forget all models, because another incarnation begins in this process."""
        self.operation, self.trained = None, False
        self._evaluated.clear()
        self._frozen.clear()

    def eval(self, original: Any) -> Any:
        """Makes an ``nn.Module.eval`` that begins an evaluation."""

        @wraps(original)
        def evaluate(module: Any) -> Any:
            if self.trained and self.recorder.start is not None and not self._in_train:
                self._enter(module)
            return original(module)

        return evaluate

    def train(self, original: Any) -> Any:
        """Makes an ``nn.Module.train`` that ends an evaluation; its calls to itself for submodules do not count."""

        @wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            if self._in_train or not self.trained or threading.get_ident() != self.recorder.thread:
                return original(module, mode)
            self._in_train = True
            try:
                return original(module, mode)
            finally:
                self._in_train = False
                if mode:
                    self.end_if_over()

        return train

    @harmless
    def end_if_over(self) -> None:
        """End the evaluation if all evaluated models are back in training mode or gone."""
        if self.operation is None:
            return
        modules = list(self._evaluated)
        if not modules or any(module.training for module in modules):
            self._end()

    @harmless
    def end_by_backward(self) -> None:
        """End the evaluation because gradients are computed; models still in evaluation mode count as frozen."""
        if self.operation is None:
            return
        for module in list(self._evaluated):
            if not module.training:
                self._frozen.add(module)
        self._end()

    @harmless
    def _enter(self, module: Any) -> None:
        if not module.training or module in self._frozen or threading.get_ident() != self.recorder.thread:
            return
        self._evaluated.add(module)
        if self.operation is None:
            self.operation = self.recorder.phase(Phase.EVALUATION)

    def _end(self) -> None:
        operation, self.operation = self.operation, None
        self._evaluated.clear()
        if operation is not None:
            operation()
