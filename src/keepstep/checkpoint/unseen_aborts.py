"""Whether aborts of NCCL are seen in this process. Nobody is told of one, and what it leaves is no state of a step."""

from __future__ import annotations

import ctypes
import functools
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
    if (sees := _sees()) and sees() & 0xFF:  # a bool of C is a byte
        return ""
    return (
        "what torch's watchdog aborts is not seen here, so a step may be what an aborted collective has left: "
        f"set {HANDLING}=3 (--in-place sets 2)"
    )


@functools.cache
def _sees() -> Any:
    """The shim's function that tells whether it has seen a communicator; None where there is no shim."""
    return getattr(ctypes.CDLL(None), "keepstep_gate_sees", None)


def _calls_nccl() -> bool:
    """Whether a collective of NCCL's was called: the first one makes a communicator, which the shim sees."""
    return any(map(_calls, list(distributed_c10d._world.pg_map)))  # pyright: ignore[reportPrivateUsage]


def _calls(group: Any) -> bool:
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        ours = [one for one in backends if one.name().lower() == "nccl"]
    except Exception:  # groups of other libraries have what they like, and a save must not fail by them
        return False
    try:
        return any(one._get_sequence_number_for_group() for one in ours)
    except Exception:
        return bool(ours)
