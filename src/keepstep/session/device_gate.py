"""The gate on the training's stream before each optimizer step, by which an aborted collective of NCCL feeds none."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep.capture import internals


class DeviceGate:
    """The gate of the NCCL shim (``native/nccl_gate.hpp``), where this process has the shim.

    ``stands``: whether a gate could be put before the newest optimizer step on a GPU.
    """

    def __init__(self) -> None:
        self.stands = False
        shim: Any = ctypes.CDLL(None)
        self._shim: Any = shim if hasattr(shim, "keepstep_gate_put") else None
        if self._shim is not None and internals.CURRENT_DEVICE and internals.CURRENT_STREAM:
            shim.keepstep_gate_put.argtypes = (ctypes.c_void_p,)
            shim.keepstep_gate_put.restype = ctypes.c_bool
            register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        cuda: Any = sys.modules.get("torch.cuda")
        if self._shim is not None and cuda is not None and cuda.is_initialized():
            assert internals.CURRENT_DEVICE
            assert internals.CURRENT_STREAM
            self.stands = self._shim.keepstep_gate_put(internals.CURRENT_STREAM(internals.CURRENT_DEVICE()))

    def close(self) -> None:
        """Have no optimizer step run on the device until `open`, or for a second."""
        if self.stands:
            self._shim.keepstep_gate_close()

    def open(self) -> None:
        """Let all go on that waits, whatever is aborted until `renew`. It is spoilt: no snapshot of it is sealed.

        Also where the newest step stands behind no gate, as on a GPU that has failed: those before may.
        """
        if self._shim is not None:
            self._shim.keepstep_gate_open()

    def renew(self) -> None:
        """Note that the groups are whole again, so that what comes now is not spoilt."""
        if self._shim is not None:
            self._shim.keepstep_gate_renew()
