"""What an entry of a flight-recorder dump says about the content of a call and the user's line that made it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

from keepstep.core.events import ELEMENTS, Op, item_bytes
from keepstep.core.libraries import LIBRARIES, site_text

# torch's names of element types in dumps that are not those of Python.
_ELEMENTS = {
    "byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64", "half": "float16",
    "float": "float32", "double": "float64", "complexhalf": "complex32", "complexfloat": "complex64",
    "complexdouble": "complex128",
}  # fmt: skip
_INSTALLED = ("site-packages", "dist-packages")
_BETWEEN = ("torch", "keepstep")  # whose frames are between the user's line and the call
_FROM_SOURCE = re.compile(
    r"/(torch)/(?:distributed|nn|autograd|utils|optim|_dynamo)/|/(torch)/_tensor\.py$"
    r"|/(keepstep)/(?:capture|checkpoint|integrations|session|worker)/"
)
_STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!(site|dist)-packages/)")
_MOST_FRAMES = 256
_MOST_SIZES = 64  # dimensions of a tensor
_MOST_ELEMENTS = 1 << 56
_MOST_LINES = 1 << 31  # of a file
_MOST_LETTERS = 1024  # of a file's name


@dataclass(frozen=True, slots=True)
class Content:
    """What a call moves, and from where it was made. ``element`` "": that is not known."""

    bytes: int = 0
    element: str = ""
    site: str = ""


def content_of(entry: Mapping[str, Any], op: Op) -> Content:
    """The content of an entry; what is not in it, or damaged, is left out."""
    site = _site(entry.get("frames"))
    if op is Op.BARRIER:
        return Content(site=site)
    brought, got = _elements_in(entry.get("input_sizes")), _elements_in(entry.get("output_sizes"))
    element = _element(entry.get("input_dtypes")) or _element(entry.get("output_dtypes"))
    if op in (Op.GATHER, Op.ALLTOALL):
        count = brought
    elif op is Op.SCATTER:
        count = got
    else:  # the whole buffer
        count = max((one for one in (brought, got) if one is not None), default=None)
    if count is None or not element:
        return Content(site=site)
    return Content(count * item_bytes(element), element, site)


def _elements_in(sizes: Any) -> int | None:
    """How many elements tensors of these sizes have; None where that is not told."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return None
    total = 0
    for size in cast("Sequence[Any]", sizes):
        numbers = cast("Sequence[Any]", size) if isinstance(size, (list, tuple)) else None
        if numbers is None or len(numbers) > _MOST_SIZES:
            return None
        if not all(isinstance(number, int) and 0 <= number < _MOST_ELEMENTS for number in numbers):
            return None
        total += math.prod(numbers)
    return total if total < _MOST_ELEMENTS else None


def _element(types: Any) -> str:
    """The type of the first tensor by its name in Python, "" for one without a known name."""
    if not isinstance(types, (list, tuple)) or not types:
        return ""
    first = cast("Sequence[Any]", types)[0]
    name = first.lower() if isinstance(first, str) else ""
    name = _ELEMENTS.get(name, name)
    return name if name in ELEMENTS else ""


def _site(frames: Any) -> str:
    """The innermost frame that belongs neither to torch, keepstep or the standard library, nor to ``LIBRARIES``."""
    through, inner = "", ""
    for frame in cast("Sequence[Any]", frames)[:_MOST_FRAMES] if isinstance(frames, (list, tuple)) else ():
        if not isinstance(frame, Mapping):
            return ""
        told = cast("Mapping[str, Any]", frame)
        file, line, name = _text(told.get("filename")), told.get("line"), _text(told.get("name"))
        package = _package(file)
        if package in LIBRARIES:
            through, inner = package, inner or name
        elif package not in _BETWEEN and not file.startswith("<") and not _STANDARD_LIBRARY.search(file):
            if not isinstance(line, int) or not 0 <= line < _MOST_LINES:
                return ""
            return site_text(file, line, name, through, inner)
    return ""


def _text(value: Any) -> str:
    return value[:_MOST_LETTERS] if isinstance(value, str) else ""


def _package(file: str) -> str:
    """The installed package that a file belongs to, "" for a file of the user's."""
    parts = PurePosixPath(file).parts
    for folder in _INSTALLED:
        if folder in parts:
            after = parts[parts.index(folder) + 1 :]
            return after[0] if len(after) > 1 else ""
    if found := _FROM_SOURCE.search(file):
        return next(filter(None, found.groups()))
    return parts[0] if len(parts) > 1 and not file.startswith(("/", ".")) else ""
