"""Finds the line of the user's code that led to an operation; the text of each line goes to the ring once."""

from __future__ import annotations

import os
import sysconfig
from types import FrameType

from keepstep.capture.native import Here
from keepstep.capture.recorder import Recorder

_STDLIB = sysconfig.get_paths()["stdlib"]
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Sites:
    """Finds the innermost line that belongs neither to torch, nor to keepstep, nor to the standard library.

    ``here()`` returns the id of that line in the ring, 0 if there is none. It skips the function that calls it.
    """

    def __init__(self, recorder: Recorder, torch_folder: str) -> None:
        self._recorder = recorder
        self._torch = torch_folder
        self.here = Here(self._judge, self._enter)

    def _judge(self, name: str) -> bool:
        return (
            name.startswith((self._torch, _OWN, "<"))
            or name.endswith("typing_extensions.py")  # its decorators wrap functions of torch
            or (name.startswith(_STDLIB) and "site-packages" not in name)
        )

    def _enter(self, frame: FrameType) -> int:
        writer = self._recorder.writer
        code = frame.f_code
        return 0 if writer is None else writer.site(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
