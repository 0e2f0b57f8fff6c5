"""What NVIDIA's driver says of its GPUs' health: memory that failed, and what has to be done before they are used.

This needs ``nvidia-ml-py`` (the extra ``gpu``) and the driver's library; without them nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from ctypes import CDLL
from typing import Any

from keepstep.launch.node.checks import Found, Subject

_NO_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: a host without GPUs
_MISMATCH, _LOST = 18, 15  # NVML_ERROR_LIB_RM_VERSION_MISMATCH, NVML_ERROR_GPU_IS_LOST
# NVML_GPU_RECOVERY_ACTION_* of nvml.h: what is to be done, and whether nothing runs before it is.
_ACTIONS = {
    1: ("reset it", True),
    2: ("restart the node", True),
    3: ("end what uses it together with other GPUs", False),
    4: ("end what uses it, then reset it", False),
    5: ("restart the machine", True),
    6: ("reset its bus", True),
}


def health(subject: Subject, library: str = "libnvidia-ml.so.1") -> Iterator[Found]:
    """Find GPUs that are lost, that have to be reset, or whose memory has failed.

    Only what the driver says has to be mended makes the node unfit.
    """
    try:
        CDLL(library)
        import pynvml  # pyright: ignore[reportMissingTypeStubs]
    except (OSError, ImportError):
        return
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value not in _NO_DRIVER:
            advice = "restart the node" if error.value == _MISMATCH else "look at the driver"
            yield Found(f"node {subject.node}: the GPUs cannot be used: {error}; {advice}", unfit=True)
        return
    for number in range(nvml.nvmlDeviceGetCount()):
        for text, unfit in _of_gpu(nvml, number):
            yield Found(f"node {subject.node}: GPU {number}: {text}", unfit)
    with suppress(nvml.NVMLError):
        nvml.nvmlShutdown()


def _of_gpu(nvml: Any, number: int) -> Iterator[tuple[str, bool]]:
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(number)
    except nvml.NVMLError as error:
        lost = error.value == _LOST
        yield f"{error}; {'restart the node' if lost else 'look at the driver'}", lost
        return
    with suppress(nvml.NVMLError, AttributeError):  # older bindings do not know of it
        (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if field.nvmlReturn == 0 and (action := _ACTIONS.get(int(field.value.uiVal))):
            yield f"its driver wants it recovered; {action[0]}", action[1]
    with suppress(nvml.NVMLError):
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
        if failed:
            yield "a row of its memory failed and could not be remapped; have the GPU replaced", True
        elif pending:
            yield "rows of its memory wait to be remapped; reset it when nothing runs on it", False
    with suppress(nvml.NVMLError):
        sort, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if count := nvml.nvmlDeviceGetTotalEccErrors(gpu, sort, since):
            yield (
                f"{count} memory errors that were not corrected since its driver was loaded; reset it",
                False,
            )
