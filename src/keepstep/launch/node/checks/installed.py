"""What is installed on the node: its GPUs, and versions of driver, NCCL, CUDA and torch. Nothing of it is loaded."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version_tuple

from keepstep import __version__
from keepstep.core.regular_files import read_regular

DRIVER = Path("/proc/driver/nvidia")
_MOST_BYTES = 1 << 16
_MOST_GPUS = 64
_MOST_CHARACTERS = 60  # longest name of a version or model
_MODULE = re.compile(r"Kernel Module\b(?: for \S+)?\s+(\d[\w.-]*)")
_ASSIGNED = r"^{name}\b[^=\n]*=\s*['\"]([^'\"\n]*)['\"]"
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def versions(driver: Path = DRIVER) -> tuple[tuple[str, str], ...]:
    """Name and version of each thing that is there: keepstep, Python, torch, CUDA and NCCL beside it, the driver."""
    torch = _torch()
    found = {
        "keepstep": __version__,
        "Python": ".".join(python_version_tuple()[:2]),
        "torch": _assigned(torch, "__version__"),
        "CUDA": _assigned(torch, "cuda"),
        "NCCL": _nccl(),
        "driver": (_MODULE.search(_text(driver / "version")) or ("", ""))[1],
    }
    return tuple((name, text[:_MOST_CHARACTERS]) for name, text in found.items() if text)


def gpus(driver: Path = DRIVER) -> tuple[str, ...]:
    """The models of the node's NVIDIA GPUs, in the order of their PCI addresses."""
    with suppress(OSError):
        folders = sorted((driver / "gpus").iterdir())[:_MOST_GPUS]
        found = (re.search(r"^Model:\s*(\S.*)$", _text(one / "information"), re.MULTILINE) for one in folders)
        return tuple(one[1].strip()[:_MOST_CHARACTERS] if one else "?" for one in found)
    return ()


def _torch() -> str:
    """The text of torch's file of versions, which says more than its package does; "" without torch."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return ""
    return _text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""


def _assigned(text: str, name: str) -> str:
    found = re.search(_ASSIGNED.format(name=re.escape(name)), text, re.MULTILINE)
    return found[1] if found else ""


def _nccl() -> str:
    for name in _NCCL:
        with suppress(PackageNotFoundError):
            return version(name)
    return ""


def _text(file: Path) -> str:
    try:
        return read_regular(file, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
