"""The only place that touches torch's private names, so that a new torch version is met in one file."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch.autograd import Variable
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils.data import dataloader

NATIVE_C10D = cast(ModuleType, torch._C._distributed_c10d)
LOADER_ITERATOR: Any = dataloader._BaseDataLoaderIter


def registered_members(group: Any) -> tuple[int, ...]:
    """Global ranks of a group in group order, as torch knows them; empty when it does not."""
    ranks: dict[int, int] = distributed_c10d._world.pg_group_ranks.get(group, {})
    return tuple(sorted(ranks, key=ranks.__getitem__))


def backends_of(group: Any) -> dict[str, str]:
    """Device type -> backend name (lower case) of a process group."""
    return {device.type: str(group._get_backend(device).name()).lower() for device in group._device_types}


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


def after_gradients(call: Callable[[], None]) -> None:
    """Have the autograd engine call when the gradients of the backward in progress are computed."""
    cast(Any, Variable)._execution_engine.queue_callback(call)


def holders(name: str, original: Any) -> list[ModuleType]:
    """torch's modules that hold ``original`` under its own name."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.") and vars(module).get(name) is original
    ]
