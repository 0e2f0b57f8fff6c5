"""Records that a rank winds up: it ends its process groups, or its script is over and the interpreter ends.

What such a rank does takes as long as the machine makes it: the interpreter's last garbage collection alone took 2 s
with Megatron on two cores, and tens of seconds where those were starved.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from keepstep.capture.patches import Patches
from keepstep.capture.recorder import Operation, Recorder
from keepstep.core.events import Phase


class Teardown:
    """A phase that begins when the default group is destroyed, or the script is over, and ends with the process.

    It also ends where the process sets up its groups again. None is begun while an exception is on its way: others may
    wait for that rank, which has not come to its end.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._operation: Operation | None = None

    def install(self, patches: Patches) -> None:
        """Watch ``destroy_process_group``, under both of its names, and the end of the script."""
        for owner in (distributed_c10d, torch.distributed):
            patches.replace(owner, "destroy_process_group", self.recorded)
        # Handlers of `atexit` come after other threads have ended, and after the script's own handlers. Of these only
        # the name is private; concurrent.futures has its handler there, too.
        register: Callable[..., None] | None = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(self._script_is_over, os.getpid())

    def recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``destroy_process_group``, recorded if it is the default group that goes."""

        @wraps(original)
        def destroy(group: Any = None) -> Any:
            if group is None or group is distributed_c10d.GroupMember.WORLD:
                self._begin()
            try:
                return original(group)
            except BaseException:
                self.over()
                raise

        return destroy

    def over(self) -> None:
        """Note that this rank goes on. Never raises."""
        operation, self._operation = self._operation, None
        if operation is not None:
            operation()

    def forget(self) -> None:
        """Forget the phase, because its ring was given up."""
        self._operation = None

    def _begin(self) -> None:
        if self._operation is not None or sys.exc_info()[0] is not None:
            return
        try:
            self._operation = self._recorder.phase(Phase.TEARDOWN)
        except Exception as error:
            self._recorder.stumbled(error)

    def _script_is_over(self, process: int) -> None:
        if os.getpid() == process and getattr(sys, "last_type", None) is None:
            self._begin()
