"""Makes the set-up of process groups faster, and names groups differently in each incarnation.

Two waits are removed. torch's store asks the resolver for the name of each host that connects, one after the other,
before it serves the next. On one node, a rank that connects too early tries again only after half a second, which is
longer than a whole restart takes. If anything fails in here, torch sets up its groups as it would without keepstep.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from keepstep.core.group_names import NAMES_PER_INCARNATION

_PATIENCE_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


def set_names(incarnation: int) -> None:
    """From now on, give groups names that differ from those of other incarnations and are the same on all ranks.

    Users are shown them as in the first one (``core.group_names.shown_name``).
    """
    names = vars(importlib.import_module("torch.distributed.distributed_c10d"))
    with suppress(AttributeError, KeyError):
        names["_world"].group_count = incarnation * NAMES_PER_INCARNATION


def install() -> None:
    """Change torch's set-up of groups. Called at the end of ``import torch``."""
    set_names(int(os.environ.get("KEEPSTEP_INCARNATION", "0")))
    with suppress(Exception):
        from keepstep.worker import _numeric_peers  # pyright: ignore[reportMissingModuleSource]

        _numeric_peers.install()
    # `torch.distributed.rendezvous` as an attribute is a function, so the module must be imported by its name.
    names = vars(importlib.import_module("torch.distributed.rendezvous"))
    made: Callable[..., Any] | None = names.get("_create_c10d_store")
    if made is None or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return

    @wraps(made)
    def create_store(hostname: str, port: int, rank: int, *args: Any, **kwargs: Any) -> Any:
        if rank > 0:
            with suppress(Exception):
                wait_for_listener(port)
        return made(hostname, port, rank, *args, **kwargs)

    names["_create_c10d_store"] = create_store


def wait_for_listener(port: int, patience_s: float = _PATIENCE_S) -> bool:
    """Wait until a socket of this host listens on ``port``; False if none does in time."""
    deadline_s, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
    while not _listens(port):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
    return True


def _listens(port: int) -> bool:
    """Whether a socket listens on ``port``, by the kernel's list: a test connection would disturb its owner."""
    wanted = f":{port:04X}"
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), open(path) as file:
            for line in file:
                fields = line.split(None, 4)
                if fields[1].endswith(wanted) and fields[3] == _LISTENS:
                    return True
    return False
