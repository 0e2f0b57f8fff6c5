"""Says which processes have memory of this machine's GPUs, once for each line that comes.

A program of its own, run by its path, because a driver may hang, and then whoever called it cannot even be killed. It
makes no CUDA context. An answer is a line of JSON: for each GPU its free bytes (-1: unknown) and a list of ``[process,
bytes]``, without those GPUs that tell nothing. Where the driver cannot be asked at all it ends.
"""

from __future__ import annotations

import ctypes
import json
import sys

LIBRARY = "libnvidia-ml.so.1"
_OK = 0
_MOST = 1024
_LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")


class Process(ctypes.Structure):
    """``nvmlProcessInfo_t`` of nvml.h."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Memory(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def holders(nvml: ctypes.CDLL) -> dict[int, tuple[int, list[tuple[int, int]]]]:
    """By number of the GPU, its free bytes, the processes that have a context there, and the bytes that each has."""
    ask = next((getattr(nvml, name) for name in _LISTS if hasattr(nvml, name)), None)
    gpus, found = ctypes.c_uint(), dict[int, tuple[int, list[tuple[int, int]]]]()
    if ask is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus)) != _OK:
        return found
    for number in range(gpus.value):
        handle, count, those, memory = ctypes.c_void_p(), ctypes.c_uint(_MOST), (Process * _MOST)(), Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) != _OK:
            continue
        if ask(handle, ctypes.byref(count), those) != _OK:
            continue
        is_known = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == _OK
        listed = [(one.pid, one.memory) for one in those[: count.value]]
        found[number] = (memory.free if is_known else -1, listed)
    return found


def main() -> None:
    """Answer until there is nobody left who asks."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return
    if nvml.nvmlInitWithFlags(0) != _OK:
        return
    for _ in sys.stdin:
        print(json.dumps(holders(nvml)), flush=True)


if __name__ == "__main__":
    main()
