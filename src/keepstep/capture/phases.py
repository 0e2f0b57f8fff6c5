"""Records what the rank is doing: optimizer step, backward, data loading, evaluation, checkpoint, garbage collection.

An optimizer phase does not prove that parameters changed: a step that GradScaler skips leaves no record, and a fused
optimizer leaves one even for a step that it skips.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from keepstep.capture import device_mark
from keepstep.capture.evaluation import Evaluation
from keepstep.capture.hold import COUNT, ORDER, Hold
from keepstep.capture.internals import (
    COMPILING,
    LOADER_ITERATOR,
    STAGE_MODULE,
    as_torchs_own,
    compile_callbacks,
    stage_class,
)
from keepstep.capture.native import Buckets, Oldest
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import NO_GROUP, PHASE, Operation, Recorder, harmless
from keepstep.core.events import WORLD_PEER, Phase
from keepstep.worker import milestones

# Enum members as plain integers, because looking one up costs more than writing a record.
_BACKWARD, _OPTIMIZER = int(Phase.BACKWARD), int(Phase.OPTIMIZER)
_COMPILE, _GC = int(Phase.COMPILE), int(Phase.GC)


class Phases:
    """The phases in progress, at most one of each kind: a phase that nests inside its own kind is counted once."""

    def __init__(self, recorder: Recorder, patches: Patches, buckets: Buckets) -> None:
        self.backwards = 0  # outermost backward passes that have begun so far
        self.recorder = recorder
        self._buckets = buckets
        self._patches = patches
        self._evaluation = Evaluation(recorder)
        self._hold = Hold(recorder)
        self._mark: device_mark.Mark | None = None
        self._backward: Operation | None = None
        self._stepped_in_backward = False
        self._optimized = False  # whether an optimizer of torch's has stepped
        # Id of the optimizer, `backwards` then, and record.
        self._step: tuple[int, int, Operation] | None = None
        self._open: dict[int, Operation] = {}
        self._modules = 0  # number of imported modules when `_look_for_more` last ran
        self._saving_watched = self._stages_watched = self._compiling_watched = False

    def install(self) -> None:
        """Hook every phase; hooks that this version of torch lacks are noted in ``patches.missing``."""
        patches = self._patches
        patches.replace(torch.autograd, "_engine_run_backward", self._run_backward)
        patches.register(lambda: register_optimizer_step_pre_hook(self._before_step).remove)
        patches.register(lambda: register_optimizer_step_post_hook(self._after_step).remove)
        patches.replace(DistributedDataParallel, "forward", self._spanning(Phase.MODEL, training=True))
        patches.replace(LOADER_ITERATOR, "__next__", self._spanning(Phase.DATA))
        patches.replace(torch.nn.Module, "eval", self._evaluation.eval)
        patches.replace(torch.nn.Module, "train", self._evaluation.train)
        patches.replace(torch, "save", self._spanning(Phase.CHECKPOINT))
        patches.replace(torch.serialization, "save", self._spanning(Phase.CHECKPOINT))
        patches.register(self._collection_callback)

    def renew(self) -> None:
        """Forget all phases in progress, because another incarnation begins in this process."""
        self.backwards, self._modules = 0, 0
        self._backward, self._step, self._stepped_in_backward = None, None, False
        self._optimized = False
        self._open.clear()
        self._buckets.begin()
        self._evaluation.forget()
        self._hold.renew()

    def _spanning(self, phase: Phase, training: bool = False) -> Callable[[Any], Any]:
        """Makes a function that records its calls as a phase, if the training thread makes them.

        ``training``: record only calls for which gradients are enabled, which leaves out evaluation and generation,
        and none inside a compiled module, where the compiler would trace the probe.
        """
        recorder, open_phases, evaluation = self.recorder, self._open, self._evaluation
        code, thread, wanted, compiling = int(phase), threading.get_ident, torch.is_grad_enabled, COMPILING

        def make(original: Any) -> Any:
            @wraps(original)
            def spanned(*args: Any, **kwargs: Any) -> Any:
                start = recorder.start
                if start is None or code in open_phases or thread() != recorder.thread:
                    return original(*args, **kwargs)
                if training and not (wanted() and compiling() is None):
                    return original(*args, **kwargs)
                if evaluation.operation is not None:
                    evaluation.end_if_over()
                operation = open_phases[code] = start(PHASE, code, NO_GROUP, WORLD_PEER, 0, 0, 0)
                try:
                    result = original(*args, **kwargs)
                except BaseException as error:
                    open_phases.pop(code, None)
                    if not isinstance(error, StopIteration):
                        operation.fail()  # what is interrupted has made no progress
                    operation()
                    raise
                open_phases.pop(code, None)
                operation()
                return result

            as_torchs_own(spanned, original)
            return spanned

        return make

    def _run_backward(self, original: Any) -> Any:
        recorder, evaluation, buckets = self.recorder, self._evaluation, self._buckets

        @wraps(original)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._backward is not None:
                was_plain, buckets.plain = buckets.plain, False
                try:
                    return original(*args, **kwargs)
                finally:
                    buckets.plain = was_plain
            start = recorder.start
            if start is None:
                return original(*args, **kwargs)
            if evaluation.operation is not None:
                evaluation.end_by_backward()
            self.backwards += 1
            operation = self._backward = start(PHASE, _BACKWARD, NO_GROUP, WORLD_PEER, 0, 0, 0)
            buckets.begin()
            try:
                result = original(*args, **kwargs)
                buckets.over()
                return result
            except BaseException:
                buckets.begin()  # drops its Works, which would keep their tensors and the group's connections alive
                operation.fail()
                raise
            finally:
                buckets.plain = False
                self._backward = None
                operation()
                if self._stepped_in_backward:  # an optimizer stepped once for each parameter
                    self._stepped_in_backward = False
                    self._record_step()

        return run_backward

    @harmless
    def end_step(self) -> None:
        """Record an optimizer step where a Session's step ends that was made without any optimizer of torch's."""
        if self._optimized or (self.recorder.start is None and not self.recorder.claim()):
            return
        if len(sys.modules) != self._modules:
            self._look_for_more()
        if self._evaluation.operation is not None:
            self._evaluation.end_by_backward()
        self.recorder.thread = threading.get_ident()
        self._record_step()

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        recorder = self.recorder
        try:
            if not self._optimized and milestones.is_made_up():
                return
            self._optimized = True
            if recorder.start is None and not recorder.claim():
                return
            if self._backward is not None:
                self._stepped_in_backward = True
                return
            if self._step is not None:
                known, backwards, abandoned = self._step
                if known != id(optimizer) and backwards == self.backwards:
                    return  # this optimizer is stepped inside the step of another one
                abandoned.fail()  # its step raised, so the post-hook never ran
                self._step = None
            if len(sys.modules) != self._modules:
                self._look_for_more()
            if self._evaluation.operation is not None:
                self._evaluation.end_by_backward()
            recorder.thread = threading.get_ident()
            if recorder.start is not None:
                operation = recorder.start(PHASE, _OPTIMIZER, NO_GROUP, WORLD_PEER, 0, 0, 0)
                self._step = id(optimizer), self.backwards, operation
        except Exception as error:
            recorder.stumbled(error)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._step is not None and self._step[0] == id(optimizer):
            operation = self._step[2]
            self._step = None
            self._end_step(operation)

    def _end_step(self, operation: Operation) -> None:
        operation()
        if self._mark is not None:
            try:
                self._mark(operation.seq)
            except Exception:  # CUDA has failed: the script is to find that out by itself
                self._mark = None
        words = self._hold.words
        words[COUNT] = operation.seq
        if words[ORDER]:
            self._hold.look(operation.seq)

    def _record_step(self) -> None:
        """Record one optimizer step that has no length of its own."""
        operation = self.recorder.phase(Phase.OPTIMIZER)
        if operation is not None:
            self._end_step(operation)

    def _look_for_more(self) -> None:
        """Hook what the script has imported since the last call; also run at the first optimizer step."""
        self._modules = len(sys.modules)
        self._evaluation.trained = True
        self._hold.open()
        self._mark = self._mark or device_mark.find()
        self._watch_saving()
        self._watch_stages()
        self._watch_compiling()

    def _watch_saving(self) -> None:
        """Hook distributed checkpoints once the script has imported them; importing them here would be slow."""
        if self._saving_watched:
            return
        saver = sys.modules.get("torch.distributed.checkpoint.state_dict_saver")
        package = sys.modules.get("torch.distributed.checkpoint")
        if saver is None or package is None or "save" not in vars(package):
            return
        self._saving_watched = True
        # Scripts that imported ``save`` by name before this moment still call the inner function.
        self._patches.replace(saver, "_save_state_dict", self._spanning(Phase.CHECKPOINT))
        for owner in (saver, package):
            for name in ("save", "async_save"):
                self._patches.replace(owner, name, self._spanning(Phase.CHECKPOINT))

    def _watch_stages(self) -> None:
        """Record the forward passes of pipeline stages once the script has imported them."""
        module = sys.modules.get(STAGE_MODULE)
        if self._stages_watched or module is None:
            return
        self._stages_watched = True
        forward = self._spanning(Phase.MODEL, training=True)
        self._patches.replace(stage_class(module), "forward_one_chunk", forward)

    def _watch_compiling(self) -> None:
        """Record compilations, which may take minutes, once the script has imported the compiler."""
        handler = compile_callbacks()
        if self._compiling_watched or handler is None:
            return
        self._compiling_watched = True

        def register() -> Callable[[], None]:
            begin, end = self._compiling, self._compiled
            handler.register_start_callback(begin)
            handler.register_end_callback(end)

            def remove() -> None:
                handler.remove_start_callback(begin)
                handler.remove_end_callback(end)

            return remove

        self._patches.register(register)

    @harmless
    def _compiling(self, *_: Any) -> None:
        """Note that the training thread begins to compile; torch 2.7 gives no argument."""
        if _COMPILE not in self._open and threading.get_ident() == self.recorder.thread:
            operation = self.recorder.phase(Phase.COMPILE)
            if operation is not None:
                self._open[_COMPILE] = operation

    @harmless
    def _compiled(self, *_: Any) -> None:
        operation = self._open.pop(_COMPILE, None)
        if operation is not None:
            operation()

    def _collection_callback(self) -> Callable[[], None]:
        callback = Oldest(self._collecting)
        gc.callbacks.append(callback)

        def remove() -> None:
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

        return remove

    def _collecting(self, when: str, info: dict[str, int]) -> None:
        operation = self._open.pop(_GC, None)
        if operation is not None:
            operation()
        if when == "start":
            started = self.recorder.phase(Phase.GC)
            if started is not None:
                self._open[_GC] = started
