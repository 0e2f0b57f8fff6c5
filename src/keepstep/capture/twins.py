"""Recording twins, which C++ callers get in the place of a process group because they call no Python methods of it.

DDP's reducer, the coalesced broadcast and the functional collectives (DTensor, tensor parallelism, compiled graphs)
call a group in C++. A Python subclass of ``ProcessGroup`` with the same backends is called back by them; it passes each
call to the native group, recorded. Python code never sees a twin: it gets the native group wherever it asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from keepstep.capture.internals import (
    NATIVE_C10D,
    backends_of,
    hidden,
    holders,
    make_trampoline,
    share_backends,
)
from keepstep.capture.operations import Caller, Operations
from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Recorder
from keepstep.capture.reducer import ReducerWaits

# Methods that torch's C++ trampoline calls in Python; all others reach the same backends unrecorded.
OVERRIDABLE = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "send",
    "recv",
)

_BACKEND_TYPES = {
    "gloo": ProcessGroup.BackendType.GLOO,
    "mpi": ProcessGroup.BackendType.MPI,
    "ucc": ProcessGroup.BackendType.UCC,
}


class Twin(ProcessGroup):
    """Passes calls to the native group, recorded, and keeps it alive as the C++ caller would have done."""

    def __init__(self, native: Any, call: Callable[..., Any], caller: Caller) -> None:
        make_trampoline(self, native.rank(), native.size())
        self.native = native
        self.call = call
        self.caller = caller
        share_backends(native, self, _BACKEND_TYPES)


def _override(name: str) -> Callable[..., Any]:
    def override(self: Twin, *args: Any) -> Any:
        return self.call(name, self.native, args, self.caller)

    override.__name__ = name
    return hidden(override)


for _name in OVERRIDABLE:
    if _name in vars(ProcessGroup):
        setattr(Twin, _name, _override(_name))


class ReducerTwin(Twin):
    """The twin for DDP's reducer, whose ``allreduce`` costs as little as possible: it is called for every bucket."""

    def __init__(self, native: Any, call: Callable[..., Any], group: int, waits: ReducerWaits) -> None:
        super().__init__(native, call, Caller.REDUCER)

        @hidden
        def general(*args: Any) -> Any:
            return call("allreduce", native, args, Caller.REDUCER)

        self.allreduce = waits.call(native, group, general)


class Twins:
    """Gives twins to C++ callers, and the native groups back to Python."""

    def __init__(self, recorder: Recorder, operations: Operations) -> None:
        self._recorder = recorder
        self._operations = operations
        self._registered: dict[str, Twin] = {}  # keeps them alive, which torch's own registry does not

    def of(self, group: Any, caller: Caller) -> Any:
        """A twin of ``group``, or the group itself if it is not recorded or has backends that use a device."""
        if self._recorder.start is None or type(group) is not ProcessGroup:
            return group
        try:
            backends = set(backends_of(group).values())
            if not backends or not backends <= _BACKEND_TYPES.keys():
                return group  # C++ asks groups of other backends for their store, and a twin can have none
            call = self._operations.call
            if caller is Caller.REDUCER:
                return ReducerTwin(group, call, self._operations.group_of(group), self._operations.reducer)
            return Twin(group, call, caller)
        except Exception as error:
            self._recorder.stumbled(error)
            return group

    def install(self, patches: Patches) -> None:
        """Put twins where C++ callers get their groups. They stay there while recording is switched off."""
        patches.replace(dist, "Reducer", self._reducer)
        for name in ("_broadcast_coalesced", "_verify_params_across_processes"):
            patches.replace(dist, name, self._called_with_twin)
        for name, make in (
            ("_register_process_group", self._register),
            ("_unregister_process_group", self._unregister),
            ("_unregister_all_process_groups", self._unregister),
            ("_resolve_process_group", self._resolve),
        ):
            original = vars(NATIVE_C10D).get(name)
            if original is None:
                patches.missing.append(f"torch._C._distributed_c10d.{name}")
                continue
            ours = make(original)
            for module in holders(name, original):
                patches.replace(module, name, lambda _, ours=ours: ours)

    def _reducer(self, original: Any) -> Any:
        twins = self

        class Reducer(original):
            """DDP's reducer, which gets a twin of its group."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                own = {name: self._twin_of(argument) for name, argument in kwargs.items()}
                native: Any = super()
                native.__init__(*(self._twin_of(argument) for argument in args), **own)

            def _twin_of(self, argument: Any) -> Any:
                if type(argument) is not ProcessGroup:
                    return argument
                # C++ keeps a reference to the group that does not keep its Python object alive.
                self._twin = twins.of(argument, Caller.REDUCER)
                return self._twin

            if hasattr(original, "_update_process_group"):

                def _update_process_group(self, group: Any) -> None:
                    native: Any = super()
                    native._update_process_group(self._twin_of(group))

        Reducer.__module__ = original.__module__
        Reducer.__qualname__ = original.__qualname__
        return Reducer

    def _called_with_twin(self, original: Any) -> Any:
        def called(group: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self.of(group, Caller.NATIVE), *args, **kwargs)

        return called

    def _register(self, original: Any) -> Any:
        def register(name: str, group: Any) -> None:
            self._recorder.claim()
            twin = self.of(group, Caller.NATIVE)
            original(name, twin)
            if twin is not group:
                self._registered[name] = twin

        return register

    def _unregister(self, original: Any) -> Any:
        def unregister(*names: str) -> None:
            for name in names or list(self._registered):
                self._registered.pop(name, None)
            original(*names)

        return unregister

    def _resolve(self, original: Any) -> Any:
        def resolve(name: str) -> Any:
            group = original(name)
            return group.native if type(group) is Twin else group

        return resolve
