"""Finds the line of the user's code that led to an operation; the text of each line goes to the ring once."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

from keepstep.capture.native import Here
from keepstep.capture.recorder import Recorder
from keepstep.core.libraries import LIBRARIES, site_text

_STDLIB = os.path.join(sysconfig.get_paths()["stdlib"], "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_USERS, _SKIPPED = 0, 1

_PACKAGES = tuple(LIBRARIES)


def library_of(name: str) -> str:
    """The imported package of ``LIBRARIES`` that a file belongs to, "" if to none."""
    for package in _PACKAGES:
        module = sys.modules.get(package)
        for folder in getattr(module, "__path__", ()):
            if name.startswith(os.path.join(folder, "")):
                return package
    return ""


def finder(recorder: Recorder, torch_folder: str) -> Here:
    """Finds the innermost line that belongs neither to torch, keepstep or the standard library, nor to ``LIBRARIES``.

    A call returns the id of that line in the ring, 0 if there is none; if all lines are of libraries, that of the
    innermost one. It skips the function that calls it.
    """

    torchs = os.path.join(torch_folder, "")

    def judge(name: str) -> int:
        if (
            name.startswith((torchs, _OWN, "<"))
            or name.endswith("typing_extensions.py")  # its decorators wrap functions of torch
            or (name.startswith(_STDLIB) and "site-packages" not in name)
        ):
            return _SKIPPED
        package = library_of(name)
        return _PACKAGES.index(package) + _SKIPPED + 1 if package else _USERS

    def enter(frame: FrameType, through: int, inner: CodeType | None) -> int:
        writer, code = recorder.writer, frame.f_code
        if writer is None:
            return 0
        package = _PACKAGES[through - _SKIPPED - 1] if through else ""
        function = inner.co_name if inner is not None else ""
        return writer.site(site_text(code.co_filename, frame.f_lineno, code.co_name, package, function))

    return Here(judge, enter)
