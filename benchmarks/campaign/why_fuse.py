"""A file system of files that are only written, served by this process over FUSE: it can be stopped, or say no.

    python -m benchmarks.campaign.why_fuse FOLDER BYTES

After BYTES bytes in all, further ones are refused as over the quota. Stopped (SIGSTOP), it is storage that does not
answer; killed, it is a mount whose server has gone. Needs root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import sys

_HEADER = struct.Struct("<IIQQIIII")  # length, operation, number, node, user, group, process, padding
_ANSWER = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_OPENED = struct.pack("<QII", 1, 1, 0)  # direct I/O: each write comes here
_ROOT = 1
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_MOST_BYTES = 1 << 17
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _WRITE, _STATFS = 1, 2, 3, 4, 14, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 18, 20, 25, 26, 27, 28, 29
_ACCESS, _CREATE, _INTERRUPT, _BATCH_FORGET = 34, 35, 36, 42
_WITHOUT_ANSWER = (_FORGET, _INTERRUPT, _BATCH_FORGET)


def mount(folder: str) -> int:
    """Mount on the folder; the descriptor over which the kernel asks.

    Raises:
        OSError: it cannot be mounted.
    """
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)  # without its driver nobody would let it go on
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"storage", folder.encode(), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    return device


class Storage:
    """Names, sizes, and how much may be written still."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._nodes: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}

    def answer(self, operation: int, node: int, body: bytes) -> bytes | int:
        """The answer's content, or the error's number."""
        if operation == _INIT:
            major_minor = struct.pack("<II", 7, 31)
            return major_minor + struct.pack("<IIHHIIHHI7I", 0, 0, 12, 9, _MOST_BYTES, 1, 32, 0, 0, *[0] * 7)
        if operation == _LOOKUP:
            found = self._nodes.get(body.rstrip(b"\0"))
            return errno.ENOENT if found is None else self._entry(found)
        if operation == _CREATE:
            name = body[16:].rstrip(b"\0")
            self._sizes[self._nodes.setdefault(name, len(self._nodes) + 2)] = 0
            return self._entry(self._nodes[name]) + _OPENED
        if operation in (_GETATTR, _SETATTR):
            return struct.pack("<QII", 1, 0, 0) + self._attributes(node)
        if operation in (_OPEN, _OPENDIR):
            return _OPENED
        if operation == _WRITE:
            return self._write(node, *struct.unpack_from("<8xQI", body))
        if operation == _STATFS:
            return struct.pack("<5Q4I24x", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0)
        known = (_READDIR, _RELEASE, _RELEASEDIR, _FSYNC, _FLUSH, _ACCESS)
        return b"" if operation in known else errno.ENOSYS

    def _write(self, node: int, offset: int, size: int) -> bytes | int:
        if size > self._left:
            return errno.EDQUOT
        self._left -= size
        self._sizes[node] = max(self._sizes.get(node, 0), offset + size)
        return struct.pack("<II", size, 0)

    def _entry(self, node: int) -> bytes:
        return _ENTRY.pack(node, 0, 1, 1, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o777 if node == _ROOT else stat.S_IFREG | 0o666
        size = self._sizes.get(node, 0)
        return _ATTRIBUTES.pack(node, size, size // 512, *[0] * 3, *[0] * 3, mode, 1, *[0] * 3, 4096, 0)


def serve(device: int, storage: Storage) -> None:
    """Answer until it is unmounted."""
    while True:
        try:
            asked = os.read(device, _MOST_BYTES + 4096)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            continue
        _, operation, number, node, *_ = _HEADER.unpack_from(asked)
        if operation in _WITHOUT_ANSWER:
            continue
        told = storage.answer(operation, node, asked[_HEADER.size :])
        content, refused = (b"", told) if isinstance(told, int) else (told, 0)
        try:
            os.write(device, _ANSWER.pack(_ANSWER.size + len(content), -refused, number) + content)
        except OSError:
            continue  # who asked has gone


if __name__ == "__main__":
    serving = mount(sys.argv[1])
    print("mounted", flush=True)
    serve(serving, Storage(int(sys.argv[2])))
