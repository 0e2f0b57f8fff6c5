"""The kernel's log, read without ever waiting: ``/dev/kmsg``, or a file or FIFO with lines of the same form."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

KERNEL_LOG = "/dev/kmsg"
_DEVICE = os.makedev(1, 11)  # some containers have a link to their console in its place
_RECORD_BYTES = 8192  # more than a record of the kernel has
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Record:
    """A message of the kernel: when it was logged, by the kernel's own clock, and its first line."""

    at_s: float
    text: str


class KernelLog:
    """An open log. A file is read on as it grows."""

    def __init__(self, path: str = KERNEL_LOG, *, from_end: bool = False) -> None:
        """``from_end``: only what is logged from now on is read. Raises OSError where the log may not be read."""
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        status = os.fstat(self._file)
        self.is_kernels = stat.S_ISCHR(status.st_mode)
        """Whether it is the kernel's own, which gives one record at a time; else it is a file or a FIFO."""
        self.is_fifo = stat.S_ISFIFO(status.st_mode)
        if self.is_kernels and status.st_rdev != _DEVICE:
            os.close(self._file)
            raise OSError(errno.ENODEV, "it is another device", path)
        self._rest = b""
        if from_end:
            with suppress(OSError):  # a FIFO has no end
                os.lseek(self._file, 0, os.SEEK_END)

    def records(self, most: int) -> Iterator[Record]:
        """What is there and was not read yet, up to so many lines. Raises OSError where it may not be read."""
        for line in self._lines(most):
            # A record is "priority,sequence number,microseconds,flags;text", with details on further lines.
            head, _, text = line.partition(b";")
            fields = head.split(b",", 3)
            if len(fields) >= 3 and fields[2].isdigit():
                yield Record(int(fields[2]) * 1e-6, text.decode(errors="replace"))

    def close(self) -> None:
        """Let go of the log."""
        os.close(self._file)

    def _lines(self, most: int) -> Iterator[bytes]:
        for _ in range(most):
            if not self.is_kernels and b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                yield line
                continue
            try:
                data = os.read(self._file, _RECORD_BYTES if self.is_kernels else _READ_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the kernel has overwritten the record; the next read gets a newer one
                continue
            if not data:
                return
            if self.is_kernels:
                yield data.partition(b"\n")[0]
            else:
                self._rest = (self._rest + data)[-2 * _READ_BYTES :]
