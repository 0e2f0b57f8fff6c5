"""The only place that touches torch's private names, so that a new torch version is met in one file."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils.data import dataloader

from keepstep.capture.native import Hidden

F = TypeVar("F", bound=Callable[..., Any])

NATIVE_C10D = cast(ModuleType, torch._C._distributed_c10d)
LOADER_ITERATOR: Any = dataloader._BaseDataLoaderIter

STAGE_MODULE = "torch.distributed.pipelining.stage"


def stage_class(module: ModuleType) -> Any:
    """The class of a pipeline stage, in ``STAGE_MODULE``."""
    return vars(module).get("_PipelineStageBase", type)


def as_torchs_own(ours: Any, original: Any) -> None:
    """Let the compiler take our function for the one it replaces: it leaves torch's own files alone, by their name."""
    code = getattr(
        original, "__code__", None
    )  # somebody else may have replaced it by anything that can be called
    if code is not None:
        ours.__code__ = ours.__code__.replace(co_filename=code.co_filename)


# Of the compiler's core, which loads nothing else of it; None in a torch that has it elsewhere.
_core = cast(Any, torch._C)
_eval_frame: Any = getattr(getattr(_core, "_dynamo", None), "eval_frame", None)
_set_eval_frame: Any = getattr(_eval_frame, "set_eval_frame", None)
_compiling_callback: Any = getattr(_eval_frame, "get_eval_frame_callback", None)


def _may_compile() -> object:
    return sys.modules.get("torch._dynamo")


COMPILING: Callable[[], object] = _may_compile if _compiling_callback is None else _compiling_callback
"""None unless the compiler looks at every function that is called now, to compile it."""


def hidden(ours: F, original: Any = None, owner: type | None = None) -> F:
    """``ours`` for callers inside a compiled module: the compiler looks neither at it nor at what it calls.

    It fails hard on process groups and Works of a Python class, which is what ours deal with. With an ``owner`` it
    binds to instances of just this class; to those of its subclasses ``original`` binds.
    """
    return cast(F, Hidden(ours, _compiling_callback, _set_eval_frame, original, owner))


def compile_callbacks() -> Any:
    """What tells the start and end of compilations; None until the script has imported the compiler."""
    module = sys.modules.get("torch._dynamo.callback")
    return None if module is None else vars(module).get("callback_handler")


def registered_members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group in group order, as torch knows them; empty when it does not."""
    ranks: dict[int, int] = distributed_c10d._world.pg_group_ranks.get(group, {})
    return tuple(sorted(ranks, key=ranks.__getitem__))


def backends_of(group: Any) -> dict[str, str]:
    """Device type -> backend name (lower case) of a process group."""
    return {device.type: str(group._get_backend(device).name()).lower() for device in group._device_types}


_allreduce: Any = ProcessGroup.allreduce  # torch's own


def whole_allreduce(group: Any) -> Callable[..., Any]:
    """``allreduce`` of a native group as torch makes it: an operator that is dispatched, which calls the backend."""
    return partial(_allreduce, group)


def direct_allreduce(group: Any) -> Callable[..., Any] | None:
    """The backend's own, which that operator calls, for a third of the time; None where there are several backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    if not backends or any(one is not backends[0] for one in backends):
        return None
    return getattr(backends[0], "allreduce", None)


OBSERVERS: tuple[Callable[[], object], ...] = tuple(
    found
    for module, name in (
        (torch._C, "_len_torch_dispatch_stack"),
        (cast(Any, torch._C)._autograd, "_profiler_enabled"),
        (NATIVE_C10D, "_allow_inflight_collective_as_graph_input"),
    )
    if callable(found := vars(cast(ModuleType, module)).get(name))
)
"""Each tells whether somebody looks at the operators that torch dispatches: modes, the profiler, the compiler."""


def share_backends(group: Any, twin: Any, types: dict[str, Any]) -> None:
    """Register the backends of ``group`` with ``twin`` too; ``types``: backend name -> torch's enum."""
    backends = backends_of(group)
    for name, backend in backends.items():
        device = torch.device(name)
        twin._register_backend(device, types[backend], group._get_backend(device))
    twin._set_default_backend(types[next(iter(backends.values()))])


def make_trampoline(self: ProcessGroup, rank: int, size: int) -> None:
    """Initialize a Python subclass of ``ProcessGroup`` that C++ calls back: only this constructor makes one."""
    cast(Any, ProcessGroup).__init__(self, rank, size)


def in_backward() -> bool:
    """Whether this thread runs inside the autograd engine."""
    return torch._C._current_graph_task_id() >= 0


after_gradients: Callable[[Callable[[], None]], None] = cast(Any, Variable)._execution_engine.queue_callback
"""Has the autograd engine call when the gradients of the backward in progress are computed."""


def holders(name: str, original: Any) -> list[ModuleType]:
    """torch's modules that hold ``original`` under its own name."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.") and vars(module).get(name) is original
    ]
