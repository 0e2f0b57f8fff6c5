"""Whether aborts of NCCL are seen in this process. Nobody is told of one, and what it leaves is no state of a step."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from torch.distributed import distributed_c10d

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ABORTING = ("1", "2")  # what has torch's watchdog abort the communicators of what is late or has failed


def why_unseen() -> str:
    """Why a step that an aborted collective has fed could be kept; "": aborts are seen, or torch's watchdog makes none.

    They are seen by the NCCL shim (``native/nccl_gate.hpp``), unless it is not loaded, or NCCL is linked statically.
    """
    if os.environ.get(HANDLING) not in _ABORTING or not _calls_nccl():
        return ""
    shim: Any = ctypes.CDLL(None)
    if hasattr(shim, "keepstep_gate_sees") and shim.keepstep_gate_sees() & 0xFF:  # a bool of C is a byte
        return ""
    return (
        "what torch's watchdog aborts is not seen here, so a step may be what an aborted collective has left: "
        f"set {HANDLING}=3"
    )


def _calls_nccl() -> bool:
    """Whether a group of NCCL's was used: its first operation makes a communicator, which the shim sees."""
    groups: Any = distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
    return any(map(_calls, groups))


def _calls(group: Any) -> bool:
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return any(one.name().lower() == "nccl" and one._get_sequence_number_for_group() for one in backends)
    except Exception:  # groups of other libraries have what they like, and a save must not fail by them
        return False
