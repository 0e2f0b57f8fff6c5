"""How much memory this process can have: the machine's, and what the limits of its control groups leave of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.control_groups import PROC, ROOT, folders

# Above ``high`` a group is slowed to a crawl.
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
_NO_LIMIT = 1 << 60  # version 1 says "none" with a number of about 2^63
_UNKNOWN = 1 << 62  # bytes, where the machine's memory cannot be read


@dataclass(frozen=True, slots=True)
class Bound:
    """Memory of the machine or, with ``group``, of a control group that this process is in."""

    total_bytes: int
    available_bytes: int  # not used by any process; cached files count as available
    group: Path | None = None


def bounds(proc: Path = PROC, root: Path = ROOT) -> tuple[Bound, ...]:
    """The machine's memory, then that of every group with a limit; the tightest counts.

    ``proc``: where /proc is. ``root``: the folder below which mount points are.
    """
    try:
        sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE))
    except OSError:
        sizes = {}
    total, available = (int(sizes.get(name, _UNKNOWN >> 10)) << 10 for name in ("MemTotal", "MemAvailable"))
    return (Bound(total, available), *_groups(proc, root))


def total_bytes() -> int:
    """Memory that all processes in this process's control groups can have together."""
    return min(bound.total_bytes for bound in bounds())


def available_bytes() -> int:
    """Memory that this process can have without taking it from another."""
    return min(bound.available_bytes for bound in bounds())


def _groups(proc: Path, root: Path) -> Iterator[Bound]:
    for upwards in folders("memory", proc=proc, root=root):
        for folder in upwards:
            if folder != upwards[0] and _number(folder / "memory.use_hierarchy") == 0:
                break  # a group of version 1 that does not account for the groups inside it
            limit = min((_number(folder / name) for name in _LIMITS), default=_NO_LIMIT)
            if limit >= _NO_LIMIT:
                continue
            used = min(_number(folder / name) for name in _USED)
            used = 0 if used >= _NO_LIMIT else max(used - _cached_bytes(folder), 0)
            yield Bound(limit, max(limit - used, 0), folder)


def _number(file: Path) -> int:
    """The number in a file; no limit for ``max``, or where it cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return _NO_LIMIT


def _cached_bytes(group: Path) -> int:
    """Bytes of cached files of a group and the groups inside it; not of shared memory, which cannot be dropped."""
    try:
        counts = dict(re.findall(r"^(\w+) (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE))
    except OSError:
        return 0
    names = ("inactive_file", "active_file")
    return sum(int(counts.get(f"total_{name}", counts.get(name, 0))) for name in names)
