"""What a watched worker has preloaded: the shim that records its NCCL calls. Nobody else has it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

LD_PRELOAD = "LD_PRELOAD"
SHIM = "KEEPSTEP_NCCL_SHIM"
"""0 in the launcher's environment: workers go without it."""
_LIBRARY = "libkeepstep_nccl.so"


def shim() -> Path | None:
    """Where it was installed; None where it was not."""
    native = find_spec("keepstep.ring._native")
    path = Path(native.origin).with_name(_LIBRARY) if native and native.origin else None
    return path if path and path.exists() else None


def preload(environ: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """The environment that preloads ``library`` after what ``environ`` does.

    After it: a sanitizer's runtime must come first. Empty where it is not wanted, not there, there already, or under a
    path that cannot be told.
    """
    before = environ.get(LD_PRELOAD, "")
    if library is None or environ.get(SHIM) == "0" or str(library) in before:
        return {}
    if any(character in str(library) for character in " :"):  # they separate paths
        return {}
    return {LD_PRELOAD: f"{before}:{library}" if before else str(library)}
