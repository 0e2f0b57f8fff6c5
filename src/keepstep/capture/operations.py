"""Records the operations of a process group, each from its call to its end."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial, wraps
from typing import Any, cast

from torch.distributed import ProcessGroup

from keepstep.capture.captured_groups import CapturedGroup, Groups
from keepstep.capture.internals import hidden
from keepstep.capture.methods import METHODS, Method
from keepstep.capture.native import Here
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Recorder
from keepstep.capture.reducer import REDUCED, ReducerWaits
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind


class Caller(IntEnum):
    """The kind of caller, which decides who waits for the Work and how."""

    PYTHON = 0  # Python code waits through the Work; ``opts.asyncOp`` tells whether it does in the same call
    NATIVE = 1  # C++ code waits through the Work (functional collectives, coalesced broadcast)
    REDUCER = 2  # DDP's reducer waits for the Work's future, in C++


class Ending(IntEnum):
    """The event that ends the record of an operation.

    A future's callback is avoided: it runs on the backend's thread and takes the interpreter's lock from the training
    thread, which on a busy host costs milliseconds.
    """

    RETURN = 0  # the call returns; used for device backends, whose transfers are recorded elsewhere
    CALL = 1  # a wait that the probe adds to the call returns; used if the caller is about to wait anyway
    WAIT = 2  # the caller's wait returns
    REDUCER = 3  # the wait of DDP's reducer is over


# Flags and ending for each way to call an operation; precomputed because an enum's "|" costs more than the record.
_DEVICE = (int(Flag.END_BY_WAIT | Flag.ON_DEVICE), Ending.RETURN)
_REDUCED = (REDUCED, Ending.REDUCER)
_ASYNC = (int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT), Ending.WAIT)
_UNTOLD = (int(Flag.END_BY_WAIT), Ending.WAIT)
_SYNC = (int(Flag.SYNC_KNOWN), Ending.CALL)
_CALL, _REDUCER = Ending.CALL, Ending.REDUCER


def _untold(method: Method, caller: Caller) -> tuple[int, Ending] | None:
    """Flags and ending of a call that moves data on the host; None if its options decide."""
    if method.kind is Kind.P2P:
        return _UNTOLD
    return {Caller.REDUCER: _REDUCED, Caller.NATIVE: _ASYNC}.get(caller)


def _told(args: tuple[Any, ...]) -> tuple[int, Ending]:
    """Flags and ending by the call's options, its last argument; some versions of torch leave ``asyncOp`` out."""
    asynchronous = getattr(args[-1], "asyncOp", None) if args else None
    return _UNTOLD if asynchronous is None else _ASYNC if asynchronous else _SYNC


def _on_host(captured: CapturedGroup, args: tuple[Any, ...]) -> bool:
    """Whether a group of several backends moves these tensors on the host."""
    tensors: Any = args[0] if args else None
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = cast("list[Any]", tensors)[0]
    device = getattr(cast(Any, tensors), "device", None)
    return device is not None and device.type in captured.host_devices


class Operations:
    """Makes the recorded form of each method of ``ProcessGroup``."""

    def __init__(self, recorder: Recorder, groups: Groups, here: Here, reducer: ReducerWaits) -> None:
        self.reducer = reducer  # takes the Works that DDP's reducer waits for
        self._recorder = recorder
        self._groups = groups
        self._here = here
        self._calls: list[dict[str, Callable[..., Any]]] = [{} for _ in Caller]

    def install(self, patches: Patches) -> None:
        """Record every call that Python code makes on a native process group."""
        for name, method in METHODS.items():
            if name not in vars(ProcessGroup):
                continue  # each torch version has the old names, the new ones, or both
            patches.replace(ProcessGroup, name, partial(self._method, name, method))

    def group_of(self, group: Any) -> int:
        """The number under which the ring knows a native group."""
        return self._groups.capture(group, None).ident

    def call(self, name: str, group: Any, args: tuple[Any, ...], caller: Caller) -> Any:
        """Call the method ``name`` of a native group, and record it."""
        return self._calls[caller][name](group, *args)

    def _method(self, name: str, method: Method, original: Any) -> Any:
        """The recorded method, for native groups only: a Python subclass must find torch's own under its overrides."""
        for caller in Caller:
            self._calls[caller][name] = self.recorded(original, method, caller)
        return hidden(self._calls[Caller.PYTHON][name], original, ProcessGroup)

    def recorded(self, original: Any, method: Method, caller: Caller) -> Callable[..., Any]:
        """``original``, a method of ``ProcessGroup``, with a record of every call that this kind of caller makes."""
        recorder, groups, here, reducer = self._recorder, self._groups, self._here, self.reducer
        kind, op, measure, peer_at = int(method.kind), int(method.op), method.measure, method.peer_at
        content_of, uneven = method.content, method.uneven
        untold = _untold(method, caller)

        @wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            start = recorder.start
            if start is None:
                return original(group, *args, **kwargs)
            try:
                captured = groups.known.get(id(group)) or groups.capture(group, None)
                given = (*args, *kwargs.values()) if kwargs else args
                if captured.host_only or _on_host(captured, given):
                    flags, ending = untold or _told(given)
                else:
                    flags, ending = _DEVICE
                # Bytes of a call whose content is not known are not compared.
                content = 0 if uneven and flags == _DEVICE[0] else content_of(given)
                try:
                    nbytes = measure(len(captured.members), given)
                    peer = captured.global_rank(given[peer_at]) if peer_at >= 0 else WORLD_PEER
                except (AttributeError, IndexError, RuntimeError, TypeError):
                    # The tensor is sparse, or torch is about to refuse these arguments.
                    nbytes, peer, content = 0, WORLD_PEER, 0
                operation = start(kind, op, captured.ident, peer, nbytes, flags | content, here())
            except Exception as error:
                recorder.stumbled(error)
                return original(group, *args, **kwargs)
            try:
                work = original(group, *args, **kwargs)
                if ending is _CALL and work is not None:
                    operation.waiting()
                    work.wait()
            except BaseException:
                operation.fail()
                raise
            if work is None or ending <= _CALL:
                operation()
                return work
            return reducer.take(work, operation) if ending is _REDUCER else RecordedWork(work, operation)

        return call
