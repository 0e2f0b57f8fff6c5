"""How many descriptors this process may have open, and how many the controller of a job needs."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

_PER_NODE = 2  # one connection of the launcher, one of the agent
_BESIDE = 64  # for files, questions to launchers and connections that are not proven yet


def soft_limit() -> int:
    """Descriptors that this process may have open now."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def hard_limit() -> int:
    """Descriptors that this process may have open once it has raised its limit."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def raise_limit() -> int:
    """Raise the soft limit to the hard one; returns the former soft one, for programs to start with (`give_limit`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        give_limit(hard)
    return soft


def give_limit(soft: int) -> None:
    """Set the soft limit of this process, as far as the hard limit and the kernel allow."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def open_now() -> int:
    """Descriptors that this process has open; 0 when that cannot be read."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists the folder
    except OSError:
        return 0


def socket_inodes(pid: int | str = "self") -> dict[int, int]:
    """The inode of each socket that a process has open, by descriptor; empty if the process cannot be read."""
    folder, found = f"/proc/{pid}/fd", dict[int, int]()
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                kind, _, rest = os.readlink(f"{folder}/{name}").partition(":[")
                if kind == "socket":
                    found[int(name)] = int(rest[:-1])
    return found


def lack(nodes: int, hard: int) -> str:
    """Why the controller of so many nodes cannot run under this hard limit, and what to do; "" when it can."""
    needed = _PER_NODE * nodes + _BESIDE
    if needed <= hard:
        return ""
    return (
        f"{nodes:,} nodes need {needed:,} descriptors; the hard limit of this process is {hard:,}: "
        "raise it with ulimit -Hn or LimitNOFILE="
    )


def _number(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit
