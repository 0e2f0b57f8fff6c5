"""Notes that a group of NCCL's was aborted, or that Python ends: then torch's flight recorder is not read any more.

The recorder keeps pointers to the CUDA events of calls that are not known to have ended, and looks at these events
whenever it is read. The backend that an abort leaves behind takes its events with it, open calls or not. Whoever goes
on in the same process with a new group (torchft does) would be ended by our reading. So an abort first waits for an
answer that is on its way, and so does the end of Python, which takes all groups. Whether calls were open cannot be told
from torch's counts, as one count is of collectives and messages alike.
"""

from __future__ import annotations

import atexit
from typing import Any

from torch.distributed import ProcessGroup

from keepstep.capture._answers import stop as stop_answers  # pyright: ignore[reportMissingModuleSource]
from keepstep.capture.internals import NATIVE_C10D, backends_of, hidden
from keepstep.capture.patches import Patches

_BACKEND = "nccl"  # the only one whose calls the recorder keeps with their events


class Aborts:
    """``happened``: whether a group of NCCL's was aborted in this process."""

    def __init__(self) -> None:
        self.happened = False

    def install(self, patches: Patches) -> None:
        """Take note of aborts of process groups and of their backends, and of the end of Python.

        Handlers that the script registers for that end run before ours: one that hangs can be asked about.
        """
        atexit.register(stop_answers)
        patches.replace(
            ProcessGroup, "abort", lambda original: hidden(self._noting(original), original, ProcessGroup)
        )
        patches.replace(NATIVE_C10D.Backend, "abort", self._noting)

    def _noting(self, original: Any) -> Any:
        def abort(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(group)
            return original(group, *args, **kwargs)

        return abort

    def _note(self, group: Any) -> None:
        try:
            is_group = isinstance(group, ProcessGroup)
            names = backends_of(group).values() if is_group else (str(group.name()).lower(),)
            self.happened = self.happened or _BACKEND in names
        except Exception:  # whatever it is: the abort must go on
            self.happened = True
        if self.happened:
            stop_answers()
