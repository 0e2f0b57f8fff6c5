"""Groups that no other incarnation's are taken for, and a quick way to them, without waiting for what nobody needs.

Names of those that connect: the store would ask the resolver for each, one after the other, before it serves the next.
On one node, torch's second try after it came too early: half a second, longer than a whole restart takes.
Whatever goes wrong here, torch goes on as it would without.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

_PATIENCE_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05
_LISTENS = "0A"


_NAMES_PER_INCARNATION = 1_000_000


def set_names(incarnation: int) -> None:
    """Groups made from here on have names that those of no other incarnation have; the same on all ranks."""
    names = vars(importlib.import_module("torch.distributed.distributed_c10d"))
    with suppress(AttributeError, KeyError):
        names["_world"].group_count = incarnation * _NAMES_PER_INCARNATION


def install() -> None:
    """Called at the end of ``import torch``."""
    set_names(int(os.environ.get("KEEPSTEP_INCARNATION", "0")))
    with suppress(Exception):
        from keepstep.worker import _numeric_peers  # pyright: ignore[reportMissingModuleSource]

        _numeric_peers.install()
    names = vars(
        importlib.import_module("torch.distributed.rendezvous")
    )  # the package has a function of that name
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
    """Until some socket of this host listens on ``port``; whether one does."""
    deadline_s, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
    while not _listens(port):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
    return True


def _listens(port: int) -> bool:
    """By the kernel's list: a connection, even one that is closed at once, would be another's to handle."""
    wanted = f":{port:04X}"
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), open(path) as file:
            for line in file:
                fields = line.split(None, 4)
                if fields[1].endswith(wanted) and fields[3] == _LISTENS:
                    return True
    return False
