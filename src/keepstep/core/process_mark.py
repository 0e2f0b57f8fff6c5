"""Tells a process from a later one with the same number or of another container, and machines that have one name."""

from __future__ import annotations

import os
from typing import Any


def process_mark(pid: int) -> dict[str, int]:
    """A process: its number, its start in clock ticks, its namespace of numbers. Raises OSError if it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19])
    return {"pid": pid, "start_ticks": started, "pid_namespace": os.stat(f"/proc/{pid}/ns/pid").st_ino}


def machine_mark() -> str:
    """What this machine, or container, does not share with others: the boot of its kernel, and its namespaces.

    "" where that cannot be read.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("uts", "pid", "net")]
    except OSError:
        return ""
    return "-".join([boot[:36], *(f"{one:x}" for one in spaces)])


def is_alive(mark: Any) -> bool:
    """Whether the process of a mark, as it was read from a file of this host, still lives in this namespace.

    An earlier version left marks without a namespace.
    """
    try:
        now = process_mark(int(mark["pid"]))
        return now["start_ticks"] == mark["start_ticks"] and now | mark == now
    except (OSError, TypeError, KeyError, ValueError, IndexError):
        return False
