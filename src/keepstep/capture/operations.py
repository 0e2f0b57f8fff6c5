"""Records the operations of a process group: the table of methods, what each moves, and when each ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import MethodType
from typing import Any, cast

from torch.distributed import ProcessGroup

from keepstep.capture.groups import CapturedGroup, Groups
from keepstep.capture.internals import hidden
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Operation, Recorder, Start
from keepstep.capture.reducer import REDUCED, ReducerWaits
from keepstep.capture.sites import Sites
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind, Op


class Caller(IntEnum):
    """Who calls, and so who waits for the Work and how."""

    PYTHON = 0  # waits through the Work it is given; ``opts.asyncOp`` tells whether in the same call
    NATIVE = 1  # C++ that waits through the Work (functional collectives, coalesced broadcast)
    REDUCER = 2  # DDP's reducer: waits for the Work's future, in C++


@dataclass(frozen=True, slots=True)
class Method:
    """One method of ``ProcessGroup``: ``measure(group_size, args)`` gives its bytes, the same on every member."""

    op: Op
    measure: Callable[[int, tuple[Any, ...]], int]
    kind: Kind = Kind.COLLECTIVE
    peer_at: int = -1  # index of the peer's group rank among the arguments


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, (list, tuple)):
        total = 0
        for tensor in tensors:  # pyright: ignore[reportUnknownVariableType]
            total += _nbytes(tensor)
        return total
    return tensors.nbytes


def _first(_: int, args: tuple[Any, ...]) -> int:
    return _nbytes(args[0])


def _second(_: int, args: tuple[Any, ...]) -> int:
    return _nbytes(args[1])


def _first_of_each_member(size: int, args: tuple[Any, ...]) -> int:
    return size * _nbytes(args[0])


def _second_of_each_member(size: int, args: tuple[Any, ...]) -> int:
    return size * _nbytes(args[1])


def _nothing(_: int, __: tuple[Any, ...]) -> int:
    return 0


# Bytes: the whole buffer that the members share or move (input or output, whichever is the larger); gather and scatter:
# one member's part; all-to-all: what this rank sends. Old and new names of the same operation stand side by side.
METHODS: dict[str, Method] = {
    "allreduce": Method(Op.ALLREDUCE, _first),
    "allreduce_coalesced": Method(Op.ALLREDUCE, _first),
    "broadcast": Method(Op.BROADCAST, _first),
    "reduce": Method(Op.REDUCE, _first),
    "allgather": Method(Op.ALLGATHER, _second_of_each_member),
    "allgather_coalesced": Method(Op.ALLGATHER, _second_of_each_member),
    "_allgather_base": Method(Op.ALLGATHER, _first),
    "all_gather_single": Method(Op.ALLGATHER, _first),
    "allgather_into_tensor_coalesced": Method(Op.ALLGATHER, _first),
    "all_gather_single_coalesced": Method(Op.ALLGATHER, _first),
    "reduce_scatter": Method(Op.REDUCE_SCATTER, _first_of_each_member),
    "_reduce_scatter_base": Method(Op.REDUCE_SCATTER, _second),
    "reduce_scatter_single": Method(Op.REDUCE_SCATTER, _second),
    "reduce_scatter_tensor_coalesced": Method(Op.REDUCE_SCATTER, _second),
    "reduce_scatter_single_coalesced": Method(Op.REDUCE_SCATTER, _second),
    "gather": Method(Op.GATHER, _second),
    "scatter": Method(Op.SCATTER, _first),
    "alltoall_base": Method(Op.ALLTOALL, _second),
    "all_to_all_single": Method(Op.ALLTOALL, _second),
    "alltoall": Method(Op.ALLTOALL, _second),
    "barrier": Method(Op.BARRIER, _nothing),
    "monitored_barrier": Method(Op.BARRIER, _nothing),
    "send": Method(Op.SEND, _first, Kind.P2P, 1),
    "recv": Method(Op.RECV, _first, Kind.P2P, 1),
    "recv_anysource": Method(Op.RECV, _first, Kind.P2P),
}


class Ending(IntEnum):
    """What tells that an operation is over.

    Never a future's callback if it can be helped: it runs on the backend's thread and takes the interpreter's lock from
    the training thread, which on a busy host costs milliseconds.
    """

    RETURN = 0  # the call's return: device backends, whose transfer is seen elsewhere
    WAIT = 1  # the return of the caller's wait
    REDUCER = 2  # whatever DDP's reducer waits for


# Flags and ending of a call; made here because an enum's "|" costs more than the record.
_DEVICE = (int(Flag.END_BY_WAIT), Ending.RETURN)
_P2P = (int(Flag.END_BY_WAIT), Ending.WAIT)
_REDUCED = (REDUCED, Ending.REDUCER)
_ASYNC = (int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT), Ending.WAIT)
_UNTOLD = (int(Flag.END_BY_WAIT), Ending.WAIT)
_SYNC = (int(Flag.SYNC_KNOWN), Ending.WAIT)


def _plan(
    captured: CapturedGroup, method: Method, args: tuple[Any, ...], caller: Caller
) -> tuple[int, Ending]:
    """Flags and ending of a call."""
    if not captured.host_only and not _on_host(captured, args):
        return _DEVICE
    if method.kind is Kind.P2P:
        return _P2P
    if caller is Caller.REDUCER:
        return _REDUCED
    if caller is Caller.NATIVE:
        return _ASYNC
    asynchronous = (
        getattr(args[-1], "asyncOp", None) if args else None
    )  # options come last; not in every version
    if asynchronous is None:
        return _UNTOLD
    return _ASYNC if asynchronous else _SYNC


def _on_host(captured: CapturedGroup, args: tuple[Any, ...]) -> bool:
    """Whether a group of several backends moves these tensors on the host."""
    tensors: Any = args[0] if args else None
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = cast("list[Any]", tensors)[0]
    device = getattr(cast(Any, tensors), "device", None)
    return device is not None and device.type in captured.host_devices


class Operations:
    """Makes the recorded form of each method of ``ProcessGroup``."""

    def __init__(self, recorder: Recorder, groups: Groups, sites: Sites) -> None:
        self.reducer: ReducerWaits | None = None  # takes the Works of DDP's reducer
        self._recorder = recorder
        self._groups = groups
        self._sites = sites
        self._calls: dict[str, Callable[..., Any]] = {}

    def install(self, patches: Patches) -> None:
        """Record every call that Python code makes on a native process group."""
        for name, method in METHODS.items():
            if name not in vars(ProcessGroup):
                continue  # each torch version has the old names, the new ones, or both
            patches.replace(
                ProcessGroup, name, lambda original, n=name, m=method: self._recorded(n, original, m)
            )

    def group_of(self, group: Any) -> int:
        """The ring's number of a native group."""
        return self._groups.of(group).ident

    def call(self, name: str, group: Any, args: tuple[Any, ...], caller: Caller) -> Any:
        """Run the method ``name`` of a native group, recorded."""
        return self._calls[name](group, args, {}, caller)

    def _recorded(self, name: str, original: Any, method: Method) -> _RecordedMethod:
        recorder, begin, finish = self._recorder, self._begin, self._finish

        def call(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: Caller) -> Any:
            start = recorder.start
            if start is None:
                return original(group, *args, **kwargs)
            try:
                operation, ending = begin(start, group, method, args, kwargs, caller)
            except Exception as error:
                recorder.stumbled(error)
                return original(group, *args, **kwargs)
            try:
                work = original(group, *args, **kwargs)
            except BaseException:
                operation.fail()
                raise
            return finish(work, operation, ending)

        self._calls[name] = call
        return _RecordedMethod(original, call)

    def _begin(
        self,
        start: Start,
        group: Any,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: Caller,
    ) -> tuple[Operation, Ending]:
        captured = self._groups.of(group)
        if kwargs:
            args = (*args, *kwargs.values())
        flags, ending = _plan(captured, method, args, caller)
        try:
            nbytes = method.measure(len(captured.members), args)
            peer = captured.global_rank(args[method.peer_at]) if method.peer_at >= 0 else WORLD_PEER
        except (AttributeError, IndexError, RuntimeError, TypeError):
            nbytes, peer = 0, WORLD_PEER  # sparse, or arguments that torch itself is about to refuse
        return start(method.kind, method.op, captured.ident, peer, nbytes, flags, self._sites.here()), ending

    def _finish(self, work: Any, operation: Operation, ending: Ending) -> Any:
        if work is None or ending is Ending.RETURN:
            operation()
            return work
        if ending is Ending.REDUCER and self.reducer is not None:
            return self.reducer.take(work, operation)
        return RecordedWork(work, operation)


class _RecordedMethod:
    """Binds to native groups only: a Python subclass must find torch's own method under its overrides."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original = original

        @hidden
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            return call(group, args, kwargs, Caller.PYTHON)

        method.__name__ = original.__name__
        method.__doc__ = original.__doc__
        self._method = method

    def __get__(self, group: Any, owner: Any = None) -> Any:
        if type(group) is ProcessGroup:
            return MethodType(self._method, group)
        return self._original.__get__(group, owner)
