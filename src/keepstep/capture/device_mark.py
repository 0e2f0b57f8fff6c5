"""Tells the NCCL shim of the boundaries of iterations, so that it can measure them on the GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from keepstep.capture import internals

Mark = Callable[[int], None]


def find() -> Mark | None:
    """What is to be called with the number of each optimizer step that has ended, on the thread that made it.

    None: this process has no GPU in use, or not the shim. A call takes about a microsecond, and up to 5 ms more where
    another thread of Python is busy, as it has to take the interpreter's lock again. It waits only where the GPU has as
    much to do as CUDA lets wait for it, which is what a GPU that hangs comes to.
    """
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return None
    try:
        # Without the interpreter's lock, as a call that waits must not hold up all other threads.
        tell = ctypes.CDLL(None).keepstep_device_mark
        device, stream = internals.CURRENT_DEVICE, internals.CURRENT_STREAM
    except AttributeError:
        return None
    if device is None or stream is None:
        return None
    tell.argtypes, tell.restype = (ctypes.c_uint64, ctypes.c_void_p), None

    def mark(number: int) -> None:
        tell(number, stream(device()))

    return mark
