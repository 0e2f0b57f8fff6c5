"""Makes the set-up of process groups faster, and names groups differently in each incarnation.

Two waits are removed. torch's store asks the resolver for the name of each host that connects, one after the other,
before it serves the next. On one node, a rank that connects too early tries again only after half a second, which is
longer than a whole restart takes. If anything fails in here, torch sets up its groups as it would without keepstep.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from keepstep.core.group_names import NAMES_PER_INCARNATION

_PATIENCE_S = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.005
_LONGEST_BY_FILE_S = 0.05
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
# The kernel is asked by sock_diag (linux/inet_diag.h) for sockets of a family, a protocol, some states and a port.
_SOCK_DIAG, _DIAG_BY_FAMILY, _DUMP, _ERROR = 4, 20, 0x301, 2
_QUESTION = struct.Struct("=IHHII BBBBI 2s46x")
_ANSWER = struct.Struct("=IH")  # its size and kind


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
    """Wait until a socket of this host listens on ``port``; False if none does in time.

    Raises OSError where that cannot be found out.
    """
    deadline_s, wait_s, longest_s = time.monotonic() + patience_s, _FIRST_WAIT_S, _LONGEST_WAIT_S
    look = _listens
    while True:
        try:
            if look(port):
                return True
        except OSError:
            if look is _is_listed:
                raise
            look, longest_s = _is_listed, _LONGEST_BY_FILE_S
            continue
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(wait_s)
        wait_s = min(wait_s * 1.5, longest_s)


def _listens(port: int) -> bool:
    """Whether a socket listens on ``port``, by what the kernel tells of listening ones alone.

    A test connection would disturb its owner. Raises OSError where this kernel, or a sandbox, does not tell.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            header = _QUESTION.size, _DIAG_BY_FAMILY, _DUMP, 0, 0
            what = family, socket.IPPROTO_TCP, 0, 0, 1 << int(_LISTENS, 16)
            kernel.send(_QUESTION.pack(*header, *what, port.to_bytes(2, "big")))
            _, kind = _ANSWER.unpack_from(kernel.recv(4096))
        if kind == _ERROR:
            raise OSError("the kernel does not tell of its sockets")
        if kind == _DIAG_BY_FAMILY:
            return True
    return False


def _is_listed(port: int) -> bool:
    """Likewise by files, for which the kernel walks through all connections: that takes it 15 ms."""
    wanted = f":{port:04X}"
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), open(path) as file:
            for line in file:
                fields = line.split(None, 4)
                if fields[1].endswith(wanted) and fields[3] == _LISTENS:
                    return True
    return False
