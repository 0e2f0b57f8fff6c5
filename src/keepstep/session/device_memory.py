"""Whether the GPU still has the memory that a training took, beside what a script holds of it over a restart."""

from __future__ import annotations

from typing import Any

import torch

from keepstep.checkpoint.memory.cache import gib


class DeviceMemory:
    """What the training of an incarnation takes of its GPU, by torch's allocator."""

    def __init__(self) -> None:
        self._at_first = 0  # bytes that were allocated when the incarnation began

    def begin(self) -> None:
        """Note that an incarnation begins."""
        if cuda := _cuda():
            self._at_first = cuda.memory_allocated()
            cuda.reset_peak_memory_stats()

    def lacking(self) -> str:
        """What is held of the training that is over, if the next one would not fit beside it, in words; else "".

        Called when all that is ours has been let go of.
        """
        cuda = _cuda()
        if cuda is None or cuda.memory_allocated() <= self._at_first:
            return ""
        _forget_workspaces()
        held, at_first = cuda.memory_allocated(), self._at_first
        room = cuda.mem_get_info()[0] + cuda.memory_reserved() - held
        if held <= at_first or room >= cuda.max_memory_allocated() - at_first:
            return ""
        return f"{gib(held - at_first)} of its GPU's memory, of which {gib(room)} is left"


def _forget_workspaces() -> None:
    """Free what cuBLAS keeps from call to call; it comes back as it is needed."""
    forget: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if forget is not None:
        forget()


def _cuda() -> Any:
    """The module, where this process uses a GPU."""
    return torch.cuda if torch.cuda.is_initialized() else None
