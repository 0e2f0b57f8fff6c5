"""Finds the line of the user's code that led to an operation; the text of each line goes to the ring once."""

from __future__ import annotations

import os
import sysconfig
from types import FrameType

from keepstep.capture.native import Here
from keepstep.capture.recorder import Recorder

_STDLIB = sysconfig.get_paths()["stdlib"]
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def finder(recorder: Recorder, torch_folder: str) -> Here:
    """Finds the innermost line that belongs neither to torch, nor to keepstep, nor to the standard library.

    A call returns the id of that line in the ring, 0 if there is none. It skips the function that calls it.
    """

    def judge(name: str) -> bool:
        return (
            name.startswith((torch_folder, _OWN, "<"))
            or name.endswith("typing_extensions.py")  # its decorators wrap functions of torch
            or (name.startswith(_STDLIB) and "site-packages" not in name)
        )

    def enter(frame: FrameType) -> int:
        writer, code = recorder.writer, frame.f_code
        return 0 if writer is None else writer.site(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")

    return Here(judge, enter)
