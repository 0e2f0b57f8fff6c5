"""Records the operations of a process group: the table of methods, what each moves, and when each ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Any, cast

from torch.distributed import ProcessGroup

from keepstep.capture.groups import CapturedGroup, Groups
from keepstep.capture.internals import hidden
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Operation, Recorder
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
    if not isinstance(tensors, (list, tuple)):
        return tensors.nbytes
    total = 0
    for tensor in cast("list[Any]", tensors):
        total += _nbytes(tensor) if isinstance(tensor, (list, tuple)) else tensor.nbytes
    return total


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
    CALL = 1  # our own wait in the call: the caller said that it is about to wait
    WAIT = 2  # the return of the caller's wait
    REDUCER = 3  # whatever DDP's reducer waits for


# Flags and ending of a call; made here because an enum's "|" costs more than the record.
_DEVICE = (int(Flag.END_BY_WAIT | Flag.ON_DEVICE), Ending.RETURN)
_P2P = (int(Flag.END_BY_WAIT), Ending.WAIT)
_REDUCED = (REDUCED, Ending.REDUCER)
_ASYNC = (int(Flag.ASYNC | Flag.SYNC_KNOWN | Flag.END_BY_WAIT), Ending.WAIT)
_UNTOLD = (int(Flag.END_BY_WAIT), Ending.WAIT)
_SYNC = (int(Flag.SYNC_KNOWN), Ending.CALL)


_CALL, _REDUCER = Ending.CALL, Ending.REDUCER


def _untold(method: Method, caller: Caller) -> tuple[int, Ending] | None:
    """Flags and ending of a call on the host; None where its options tell."""
    if method.kind is Kind.P2P:
        return _P2P
    return {Caller.REDUCER: _REDUCED, Caller.NATIVE: _ASYNC}.get(caller)


def _told(args: tuple[Any, ...]) -> tuple[int, Ending]:
    """The same from the options, which come last; not in every version of torch."""
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

    def __init__(self, recorder: Recorder, groups: Groups, sites: Sites) -> None:
        self.reducer: ReducerWaits | None = None  # takes the Works of DDP's reducer
        self._recorder = recorder
        self._groups = groups
        self._here = sites.here
        self._calls: list[dict[str, Callable[..., Any]]] = [{} for _ in Caller]

    def install(self, patches: Patches) -> None:
        """Record every call that Python code makes on a native process group."""
        for name, method in METHODS.items():
            if name not in vars(ProcessGroup):
                continue  # each torch version has the old names, the new ones, or both
            patches.replace(
                ProcessGroup, name, lambda original, n=name, m=method: self._method(n, original, m)
            )

    def group_of(self, group: Any) -> int:
        """The ring's number of a native group."""
        return self._groups.capture(group, None).ident

    def call(self, name: str, group: Any, args: tuple[Any, ...], caller: Caller) -> Any:
        """Run the method ``name`` of a native group, recorded."""
        return self._calls[caller][name](group, *args)

    def _method(self, name: str, original: Any, method: Method) -> Any:
        """Binds to native groups only: a Python subclass must find torch's own method under its overrides."""
        for caller in Caller:
            self._calls[caller][name] = self.recorded(original, method, caller)
        return hidden(self._calls[Caller.PYTHON][name], original, ProcessGroup)

    def recorded(self, original: Any, method: Method, caller: Caller) -> Callable[..., Any]:
        """``original``, a method of ``ProcessGroup``, recorded when such a caller calls it."""
        recorder, groups, here, waited = self._recorder, self._groups, self._here, self._waited
        kind, op, measure, peer_at = int(method.kind), int(method.op), method.measure, method.peer_at
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
                try:
                    nbytes = measure(len(captured.members), given)
                    peer = captured.global_rank(given[peer_at]) if peer_at >= 0 else WORLD_PEER
                except (AttributeError, IndexError, RuntimeError, TypeError):
                    nbytes, peer = 0, WORLD_PEER  # sparse, or arguments that torch itself is about to refuse
                operation = start(kind, op, captured.ident, peer, nbytes, flags, here())
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
            return waited(work, operation, ending)

        return call

    def _waited(self, work: Any, operation: Operation, ending: Ending) -> Any:
        if ending is _REDUCER and self.reducer is not None:
            return self.reducer.take(work, operation)
        return RecordedWork(work, operation)
