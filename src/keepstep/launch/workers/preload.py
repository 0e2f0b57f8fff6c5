"""The shim that records NCCL calls, as it is preloaded into watched workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from keepstep.launch.workers.rings import path_of

LD_PRELOAD = "LD_PRELOAD"
SHIM = "KEEPSTEP_NCCL_SHIM"
"""Variable of the launcher that is 0 where workers are to run without the shim."""
_SEPARATORS = " :"  # characters that end a path in LD_PRELOAD and cannot be quoted
_LIBRARY = "libkeepstep_nccl.so"


def shim() -> Path | None:
    """The shim's path; None where it was not built."""
    native = find_spec("keepstep.ring._native")
    path = Path(native.origin).with_name(_LIBRARY) if native and native.origin else None
    return path if path and path.exists() else None


def preload(environ: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """The variable that preloads ``library`` after what ``environ`` preloads: a sanitizer's runtime must come first.

    Empty where the library is not wanted, is preloaded already, or cannot be read.
    """
    before = environ.get(LD_PRELOAD, "")
    if library is None or environ.get(SHIM) == "0" or str(library) in before:
        return {}
    path = str(library)
    if any(character in path for character in _SEPARATORS):
        try:
            path = _by_descriptor(path)
        except OSError:
            return {}
    return {LD_PRELOAD: f"{before}:{path}" if before else path}


@cache
def _by_descriptor(path: str) -> str:
    """A path to the same file without separators in it, which is valid while this process lives."""
    return path_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
