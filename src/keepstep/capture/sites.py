"""Which line of the user's code led to an operation; each line's text goes to the ring once."""

from __future__ import annotations

import os
import sysconfig
from types import FrameType

from keepstep.capture.native import Here
from keepstep.capture.recorder import Recorder

_STDLIB = sysconfig.get_paths()["stdlib"]
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Sites:
    """Finds the innermost line that belongs neither to torch, nor to us, nor to the standard library.

    ``here()``: its site id, 0 when there is none; the function that asks is not looked at.
    """

    def __init__(self, recorder: Recorder, torch_folder: str) -> None:
        self._recorder = recorder
        self._torch = torch_folder
        self.here = Here(self._judge, self._enter)

    def _judge(self, name: str) -> bool:
        return (
            name.startswith((self._torch, _OWN, "<"))
            or name.endswith("typing_extensions.py")  # its decorators stand around torch's functions
            or (name.startswith(_STDLIB) and "site-packages" not in name)
        )

    def _enter(self, frame: FrameType) -> int:
        writer = self._recorder.writer
        code = frame.f_code
        return 0 if writer is None else writer.site(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
