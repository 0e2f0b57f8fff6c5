"""Which line of the user's code led to an operation; each line's text goes to the ring once."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

from keepstep.capture.recorder import Recorder

MAX_FRAMES = 48  # deeper than any framework nests between the user's line and a collective
MAX_KNOWN = 8192  # bounds our memory in a program that makes code as it runs

_STDLIB = sysconfig.get_paths()["stdlib"]
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Sites:
    """Finds the innermost line that belongs neither to torch, nor to us, nor to the standard library."""

    def __init__(self, recorder: Recorder, torch_folder: str) -> None:
        self._recorder = recorder
        self._torch = torch_folder
        self._foreign: dict[str, bool] = {}
        # By identity: a code object's own hash reads all its bytecode. Each entry keeps its code alive.
        self._known: dict[tuple[int, int], tuple[int, CodeType]] = {}

    def here(self) -> int:
        """Site id of the caller's user code; 0 when there is none."""
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        foreign = self._foreign
        for _ in range(MAX_FRAMES):
            code = frame.f_code
            is_foreign = foreign.get(code.co_filename)
            if is_foreign is None:
                is_foreign = self._judge(code.co_filename)
            if not is_foreign:
                known = self._known.get((id(code), frame.f_lasti))
                return self._enter(frame) if known is None else known[0]
            outer = frame.f_back
            if outer is None:
                return 0
            frame = outer
        return 0

    def _judge(self, name: str) -> bool:
        is_foreign = (
            name.startswith((self._torch, _OWN, "<"))
            or name.endswith("typing_extensions.py")  # its decorators stand around torch's functions
            or (name.startswith(_STDLIB) and "site-packages" not in name)
        )
        if len(self._foreign) < MAX_KNOWN:
            self._foreign[name] = is_foreign
        return is_foreign

    def _enter(self, frame: FrameType) -> int:
        writer = self._recorder.writer
        if writer is None or len(self._known) >= MAX_KNOWN:
            return 0
        code = frame.f_code
        site = writer.site(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        self._known[id(code), frame.f_lasti] = site, code
        return site
