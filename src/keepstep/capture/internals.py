"""All uses of torch's private names, kept in one file so that a new version of torch needs changes only here."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils.data import dataloader

from keepstep.capture.native import Hidden

F = TypeVar("F", bound=Callable[..., Any])

NATIVE_C10D = cast(ModuleType, torch._C._distributed_c10d)
LOADER_ITERATOR: Any = dataloader._BaseDataLoaderIter

# The number of this thread's GPU, and the handle of its present stream by that; None: this version lacks them.
CURRENT_DEVICE: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
CURRENT_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

STAGE_MODULE = "torch.distributed.pipelining.stage"


def stage_class(module: ModuleType) -> Any:
    """The base class of pipeline stages in ``STAGE_MODULE``."""
    return vars(module).get("_PipelineStageBase", type)


def as_torchs_own(ours: Any, original: Any) -> None:
    """Give our function file and name of the one that it replaces, because the compiler skips torch's own files.

    In a traceback it is at the first line of the original: lines of ours would show other lines of that file.
    """
    # Another library may have replaced the original by a callable of any kind.
    code = getattr(original, "__code__", None)
    if code is not None:
        ours.__code__ = ours.__code__.replace(
            co_filename=code.co_filename,
            co_name=code.co_name,
            co_firstlineno=code.co_firstlineno,
            co_linetable=_on_one_line(ours.__code__),
        )


def _on_one_line(code: CodeType) -> bytes:
    """A table of line numbers by which all of the code is on its first line; in the form of this Python."""
    size = len(code.co_code)
    if sys.version_info < (3, 11):  # pairs: bytes of code, and by how many lines they are further on
        spans = [min(254, size - begin) for begin in range(0, size, 254)]
        return bytes(number for span in spans for number in (span, 0))
    # An entry has a byte with a form (13: no columns) and up to 8 units, and a byte for the lines.
    units = size // 2
    spans = [min(8, units - begin) for begin in range(0, units, 8)]
    return bytes(number for span in spans for number in (0x80 | 13 << 3 | (span - 1), 0))


# Functions of the compiler's core, whose use does not load the rest of it; None if this torch has none there.
_core = cast(Any, torch._C)
_eval_frame: Any = getattr(getattr(_core, "_dynamo", None), "eval_frame", None)
_set_eval_frame: Any = getattr(_eval_frame, "set_eval_frame", None)
_compiling_callback: Any = getattr(_eval_frame, "get_eval_frame_callback", None)


def with_own_reference(function: Callable[[], object]) -> Callable[[], object]:
    """``function``, whose results do not own the reference that Python gives up after use; these do.

    Else each call would take a reference from None, or from the compiler's callback, and at 0 the process crashes.
    """
    take = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

    def owned() -> object:
        found = function()
        take(found)
        return found

    return owned


if _compiling_callback is not None and torch.__version__.startswith("2.7."):
    _compiling_callback = with_own_reference(_compiling_callback)


def _may_compile() -> object:
    return sys.modules.get("torch._dynamo")


COMPILING: Callable[[], object] = _may_compile if _compiling_callback is None else _compiling_callback
"""Returns None unless the compiler is tracing the functions that this thread calls now."""


def hidden(ours: F, original: Any = None, owner: type | None = None) -> F:
    """Wraps ``ours`` so that the compiler traces neither it nor the functions it calls.

    The compiler raises errors on process groups and Works that are Python classes, which ours handle. If there is an
    ``owner``, the result binds only to instances of exactly this class; instances of its subclasses get ``original``.
    """
    return cast(F, Hidden(ours, _compiling_callback, _set_eval_frame, original, owner))


def compile_callbacks() -> Any:
    """The object of torch that takes callbacks for compilations; None until the script has imported the compiler."""
    module = sys.modules.get("torch._dynamo.callback")
    return None if module is None else vars(module).get("callback_handler")


def registered_members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group in group order, as torch has registered them; empty if it has not."""
    ranks: dict[int, int] = distributed_c10d._world.pg_group_ranks.get(group, {})
    return tuple(sorted(ranks, key=ranks.__getitem__))


def backends_of(group: Any) -> dict[str, str]:
    """Backend names of a process group, in lower case, by device type."""
    return {device.type: str(group._get_backend(device).name()).lower() for device in group._device_types}


def timeout_of(group: Any) -> float:
    """The shortest time in seconds after which a collective of a process group fails; 0 where torch does not tell."""
    with suppress(AttributeError, RuntimeError, TypeError, ValueError):
        backends = [group._get_backend(device) for device in group._device_types]
        return min(float(one.options._timeout.total_seconds()) for one in backends)
    return 0.0


TORCH_LIBRARY = "libtorch_python.so"
"""What it depends on has all functions of torch."""

NATIVE_DUMPS = (
    "_ZN4c10d20dump_nccl_trace_jsonB5cxx11Ebb",
    "_ZN4c10d18dump_fr_trace_jsonB5cxx11Ebb",
)
"""``std::string c10d::dump_..._json(bool includeCollectives, bool onlyActive)``, as C++ names them."""


def native_dumps() -> tuple[int, ...]:
    """The addresses of torch's functions that `recorded_calls` calls, in its order; none where they are not told.

    The recorder that they read is never destroyed, and they need nothing of Python.
    """
    try:
        library = ctypes.CDLL(TORCH_LIBRARY, os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # A torch of another make has no library of this name.
        return ()
    functions = [getattr(library, name) for name in NATIVE_DUMPS if hasattr(library, name)]
    return tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in functions)


_SELF_RECORDED = ("ProcessGroupNCCL", "ProcessGroupGloo")


def recorded_calls() -> bytes:
    """What torch's flight recorder holds, as JSON without stacks; empty where this torch keeps none."""
    for name in (
        "_dump_nccl_trace_json",
        "_dump_fr_trace_json",
    ):  # Gloo's and other backends' calls are in the latter
        dump = vars(NATIVE_C10D).get(name)
        if dump is not None:
            found: bytes = dump(includeCollectives=True, onlyActive=False)
            if b'"collective_seq_id"' in found:
                return found
    return b""


def record_calls(group: Any) -> Any:
    """Have torch's flight recorder keep the calls of a group whose backend does not by itself ("nccl2").

    Returns what keeps it doing so; None where there is nothing to do.
    """
    hook = vars(NATIVE_C10D).get("FlightRecorderHook")
    recorded = tuple(vars(NATIVE_C10D)[name] for name in _SELF_RECORDED if name in vars(NATIVE_C10D))
    backends = [group._get_backend(device) for device in group._device_types]
    if hook is None or not backends or any(isinstance(one, recorded) for one in backends):
        return None
    return hook.attach(group)


def time_calls() -> None:
    """Have torch's flight recorder note from now on when a device begins a call, on all groups that can tell it."""
    for group in list(distributed_c10d._world.pg_map):
        with suppress(AttributeError, RuntimeError):  # Gloo's cannot
            cast(Any, group)._enable_collectives_timing()


_allreduce: Any = ProcessGroup.allreduce  # torch's own, before the probe replaces it


def whole_allreduce(group: Any) -> Callable[..., Any]:
    """The ``allreduce`` of a native group, through torch's dispatched operator, which then calls the backend."""
    return partial(_allreduce, group)


def direct_allreduce(group: Any) -> Callable[..., Any] | None:
    """The backend's own ``allreduce``, which takes a third of the time; None if the group has several backends."""
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
"""Functions that tell whether a dispatch mode, the profiler or the compiler observes torch's operators now."""


def share_backends(group: Any, twin: Any, types: dict[str, Any]) -> None:
    """Register the backends of ``group`` with ``twin`` too; ``types``: backend name -> torch's enum."""
    backends = backends_of(group)
    for name, backend in backends.items():
        device = torch.device(name)
        twin._register_backend(device, types[backend], group._get_backend(device))
    twin._set_default_backend(types[next(iter(backends.values()))])


def make_trampoline(self: ProcessGroup, rank: int, size: int) -> None:
    """Initialize a Python subclass of ``ProcessGroup`` by the only constructor after which C++ calls its methods."""
    cast(Any, ProcessGroup).__init__(self, rank, size)


def in_backward() -> bool:
    """Whether this thread runs a backward pass inside the autograd engine."""
    return torch._C._current_graph_task_id() >= 0


after_gradients: Callable[[Callable[[], None]], None] = cast(Any, Variable)._execution_engine.queue_callback
"""Queues a callback that the autograd engine runs once the gradients of the current backward pass are computed."""


def holders(name: str, original: Any) -> list[ModuleType]:
    """The modules of torch that contain ``original`` under the name ``name``."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.") and vars(module).get(name) is original
    ]
