"""Tells a process from a later one with the same number, and from one of another container."""

from __future__ import annotations

import os
from typing import Any


def process_mark(pid: int) -> dict[str, int]:
    """A process: its number, its start in clock ticks, its namespace of numbers. Raises OSError if it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    return {"pid": pid, "start_ticks": started, "pid_namespace": os.stat(f"/proc/{pid}/ns/pid").st_ino}


def is_alive(mark: Any) -> bool:
    """Whether the process of a mark, as it was read from a file of this host, still lives in this namespace.

    An earlier version left marks without a namespace.
    """
    try:
        now = process_mark(int(mark["pid"]))
        return now["start_ticks"] == mark["start_ticks"] and now | mark == now
    except (OSError, TypeError, KeyError, ValueError, IndexError):
        return False
