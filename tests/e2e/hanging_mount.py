"""A file system whose server takes each request and answers none: who asks it is stuck in the kernel, even when killed.

So is a process under a GPU's driver that hangs, or on an NFS server that is gone (hard mounts).
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REQUEST = struct.Struct("<IIQQIIII")  # length, kind, number, node, user, group, process, padding
_ANSWER = struct.Struct("<IiQ")  # length, error, number
_BEGIN = 26  # the first request (linux/fuse.h)
_VERSION = struct.Struct("<IIIIHHII32x")  # 7.31, no flags
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def hanging_mount(folder: Path) -> Iterator[threading.Event]:
    """Mount it on a folder; the event is set once somebody is stuck in it. At the end who is stuck goes on.

    Raises OSError where there is no FUSE, or this user may not mount.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    is_asked = threading.Event()
    server = threading.Thread(target=_serve, args=(device, is_asked), daemon=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    try:
        if _libc.mount(b"hanging", os.fsencode(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), f"cannot mount on {folder}")
        server.start()
        yield is_asked
    finally:
        _libc.umount2(os.fsencode(folder), _DETACH | 1)  # force: all requests end
        os.close(device)


def _serve(device: int, is_asked: threading.Event) -> None:
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError:
            return
        _, kind, number, *_ = _REQUEST.unpack_from(request)
        if kind == _BEGIN:
            told = _VERSION.pack(7, 31, 0, 0, 8, 8, 1 << 16, 1)
            os.write(device, _ANSWER.pack(_ANSWER.size + len(told), 0, number) + told)
        else:
            is_asked.set()
