"""Records the operations of a process group: the table of methods, what each moves, and when each ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, wraps
from typing import Any, cast

from torch.distributed import ProcessGroup

from keepstep.capture.captured_groups import CapturedGroup, Groups
from keepstep.capture.internals import hidden
from keepstep.capture.native import Here
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Recorder
from keepstep.capture.reducer import REDUCED, ReducerWaits
from keepstep.capture.works import RecordedWork
from keepstep.core.events import WORLD_PEER, Flag, Kind, Op


class Caller(IntEnum):
    """The kind of caller, which decides who waits for the Work and how."""

    PYTHON = 0  # Python code waits through the Work; ``opts.asyncOp`` tells whether it does in the same call
    NATIVE = 1  # C++ code waits through the Work (functional collectives, coalesced broadcast)
    REDUCER = 2  # DDP's reducer waits for the Work's future, in C++


@dataclass(frozen=True, slots=True)
class Method:
    """What one method of ``ProcessGroup`` does, and which of its arguments tell how many bytes it moves."""

    op: Op
    tensors_at: int  # index of the argument whose bytes are counted; -1: the method moves nothing
    per_member: bool = False  # each member of the group brings or gets that many bytes
    kind: Kind = Kind.COLLECTIVE
    peer_at: int = -1  # index of the argument that holds the peer's group rank; -1: there is none

    def measure(self, size: int, args: tuple[Any, ...]) -> int:
        """Bytes that a call with ``args`` moves in a group of ``size`` members."""
        if self.tensors_at < 0:
            return 0
        nbytes = _nbytes(args[self.tensors_at])
        return size * nbytes if self.per_member else nbytes


def _nbytes(tensors: Any) -> int:
    if not isinstance(tensors, (list, tuple)):
        return tensors.nbytes
    total = 0
    for tensor in cast("list[Any]", tensors):
        total += _nbytes(tensor) if isinstance(tensor, (list, tuple)) else tensor.nbytes
    return total


# What counts as an operation's bytes: the whole buffer that the members share or move (input or output, whichever is
# the larger); for gather and scatter one member's part; for all-to-all what this rank sends. Every member counts the
# same. torch's old and new names of an operation stand side by side.
METHODS: dict[str, Method] = {
    "allreduce": Method(Op.ALLREDUCE, 0),
    "allreduce_coalesced": Method(Op.ALLREDUCE, 0),
    "broadcast": Method(Op.BROADCAST, 0),
    "reduce": Method(Op.REDUCE, 0),
    "allgather": Method(Op.ALLGATHER, 1, per_member=True),
    "allgather_coalesced": Method(Op.ALLGATHER, 1, per_member=True),
    "_allgather_base": Method(Op.ALLGATHER, 0),
    "all_gather_single": Method(Op.ALLGATHER, 0),
    "allgather_into_tensor_coalesced": Method(Op.ALLGATHER, 0),
    "all_gather_single_coalesced": Method(Op.ALLGATHER, 0),
    "reduce_scatter": Method(Op.REDUCE_SCATTER, 0, per_member=True),
    "_reduce_scatter_base": Method(Op.REDUCE_SCATTER, 1),
    "reduce_scatter_single": Method(Op.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": Method(Op.REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": Method(Op.REDUCE_SCATTER, 1),
    "gather": Method(Op.GATHER, 1),
    "scatter": Method(Op.SCATTER, 0),
    "alltoall_base": Method(Op.ALLTOALL, 1),
    "all_to_all_single": Method(Op.ALLTOALL, 1),
    "alltoall": Method(Op.ALLTOALL, 1),
    "barrier": Method(Op.BARRIER, -1),
    "monitored_barrier": Method(Op.BARRIER, -1),
    "send": Method(Op.SEND, 0, kind=Kind.P2P, peer_at=1),
    "recv": Method(Op.RECV, 0, kind=Kind.P2P, peer_at=1),
    "recv_anysource": Method(Op.RECV, 0, kind=Kind.P2P),
}


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
                    # The tensor is sparse, or torch is about to refuse these arguments.
                    nbytes, peer = 0, WORLD_PEER
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
            return reducer.take(work, operation) if ending is _REDUCER else RecordedWork(work, operation)

        return call
