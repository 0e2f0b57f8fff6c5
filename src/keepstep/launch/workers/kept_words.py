"""What one rank writes in one incarnation: shown on the console as it came, kept in two bounded files.

The worker writes into a memfd, so it never waits for anybody; or into a terminal, from which the bytes get there. They
are read from there, and what has been read is freed. How far that went is held by the positions of the two descriptors:
who takes them over can go on.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

from keepstep.core.own_folders import open_file, write_whole
from keepstep.launch.workers.terminals import read_into

HEAD_BYTES = 256 << 10
"""So many of the first bytes are kept."""
END_BYTES = 1 << 20
"""At least so many of the last bytes are kept, and up to twice as many."""
BACKLOG_BYTES = 16 << 20
"""So many bytes wait for a console that takes none; older ones are not shown."""
_MOST_BACKLOG_BYTES = 256 << 20  # likewise for one that takes them, but more slowly than the worker writes
_READ_BYTES = 1 << 18
_AT_ONCE_BYTES = 1 << 22  # So much of one stream is read before it is the next one's turn.
_PAGE_BYTES = 4096
_SAFE_BYTES = 256  # A terminal that is ready takes so many bytes at once.
_REFUSED_S = 0.03
_SHORTLY_S = 0.001  # a terminal that is ready may refuse a newline, which needs room for two
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.EIO)
_FREED_AT_ONCE_BYTES = 64 << 10
_KEEP_SIZE_PUNCH_HOLE = 1 | 2  # linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


def new_memory() -> tuple[int, int, int]:
    """A memfd with descriptors to free it, to read it and to append to it. Raises OSError."""
    memory = os.memfd_create("keepstep-words", os.MFD_CLOEXEC)
    opened = [memory]
    try:
        opened.append(os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    memory, reader, writer = opened
    return memory, reader, writer


def can_be_kept() -> bool:
    """Whether the kernel offers what is needed: memfds that can be freed in part, and leases, in ``/proc``."""
    try:
        memory, reader, writer = new_memory()
    except OSError:
        return False
    try:
        os.ftruncate(memory, _PAGE_BYTES)
        if not (_free(memory, 0, _PAGE_BYTES) and is_written(reader)):
            return False
        os.close(writer)
        writer = -1
        return not is_written(reader)
    finally:
        for descriptor in (memory, reader, writer):
            if descriptor >= 0:
                os.close(descriptor)


def is_written(reader: int) -> bool:
    """Whether any process can still write into a memfd that was made by ``new_memory``."""
    try:
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # refused while there is a writer
        fcntl.fcntl(reader, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def end_of(reader: int, most_bytes: int) -> bytes:
    """The last bytes that were written."""
    size = os.fstat(reader).st_size
    return os.pread(reader, most_bytes, max(0, size - most_bytes))


class Console:
    """A descriptor on which bytes are shown, unless it would have us wait."""

    def __init__(self, descriptor: int) -> None:
        # A pipe that is ready takes PIPE_BUF bytes without blocking; a regular file takes anything.
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._most_bytes = _READ_BYTES if is_file else select.PIPE_BUF
        if os.isatty(descriptor):
            # It is opened for us alone, so that it does not block: the user's shell is not to see that.
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
            except OSError:
                self._most_bytes = _SAFE_BYTES
        self.is_terminal, self._descriptor = os.isatty(descriptor), descriptor
        self._waiter = select.poll()
        self._waiter.register(descriptor, select.POLLOUT)
        self.is_gone = False  # nobody reads there any more
        self._again_s = 0.0  # until then it takes nothing: it has refused some

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    @property
    def ready(self) -> bool:
        """Whether it takes bytes now."""
        return self.is_gone or (time.monotonic() >= self._again_s and bool(self._waiter.poll(0)))

    def write(self, data: bytes) -> int:
        """Write what it takes now; returns how many bytes, or all where nobody reads them."""
        done = 0
        while done < len(data) and not self.is_gone:
            if not self.ready:
                return done
            try:
                done += os.write(self._descriptor, data[done : done + self._most_bytes])
            except OSError as error:
                self.is_gone = error.errno in _GONE
                if not self.is_gone:  # a full disk or a stopped terminal, say: later it may take them
                    refused_s = _SHORTLY_S if isinstance(error, BlockingIOError) else _REFUSED_S
                    self._again_s = time.monotonic() + refused_s
                    return done
        return len(data)


class KeptWords:
    """The words of one rank in one incarnation."""

    def __init__(
        self, memory: int, reader: int, console: Console, name: str, head: Path, end: Path, terminal: int = -1
    ) -> None:
        """``memory`` and ``reader`` as by ``new_memory``; ``name``: of the rank. Both files need not be there.

        ``terminal``: as by ``open_terminal``, where the worker writes into one.
        """
        self.terminal = terminal
        self._memory, self._reader, self.console, self._name = memory, reader, console, name
        self._head, self._end = head, end
        self._shown, self._kept = (os.lseek(one, 0, os.SEEK_CUR) for one in (reader, memory))
        self._head_bytes, self._end_bytes = _size(head), _size(end)
        self._seen = 0  # how many bytes there were at the last look
        self._freed = 0
        self._has_gap = False  # bytes are missing: those in the file of the first ones are no longer added to
        self._unshown = 0  # bytes that were dropped and not told yet
        self._in_line = False  # whether the last byte that was shown is no end of a line

    def take(self) -> bool:
        """Take what the worker has written to its terminal; False: nobody can write there any more."""
        if self.terminal >= 0 and not read_into(self.terminal, self._memory):
            self.hang_up()
        return self.terminal >= 0

    def hang_up(self) -> None:
        """Let go of the terminal."""
        if self.terminal >= 0:
            os.close(self.terminal)
        self.terminal = -1

    def show(self, *, last: bool = False) -> bool:
        """Show what is new; False: the console would have us wait, or there is more.

        What follows the last end of a line waits for the next call, unless it is the ``last``: it may be half of a
        line, and another rank's must not come into it.
        """
        size = self._size()
        until = size if last else self._seen
        self._seen = size
        goes_on = self._show(size, until)
        self._free(size)
        return goes_on

    def _show(self, size: int, until: int) -> bool:
        done = 0
        while self._shown < size and done < _AT_ONCE_BYTES:
            self._drop(size)
            if not self._tell_unshown():
                return False
            data = os.pread(self._reader, min(_READ_BYTES, size - self._shown), self._shown)
            if self._shown + len(data) >= size:
                data = data[: max(until - self._shown, data.rfind(b"\n") + 1, 0)]
            if not data:
                break
            written = self.console.write(data)
            self._shown += written
            done += written
            if written:
                self._in_line = not data[:written].endswith(b"\n")
            if written < len(data):
                self._drop(size)
                return False
        return done < _AT_ONCE_BYTES

    def keep(self) -> None:
        """Write what is new into the files. Raises OSError where they cannot be written."""
        size = self._size()
        first = min(HEAD_BYTES - self._head_bytes, size - self._kept)
        if first > 0 and not self._has_gap:
            written = self._append(self._head, first)
            self._head_bytes += written
            if written < first:
                return  # no room: the next try says so
        new = size - self._kept
        if not new:
            return
        if self._end_bytes + new <= 2 * END_BYTES:
            self._end_bytes += self._append(self._end, new)
        else:
            start = size - END_BYTES
            left_out = f"[keepstep: {start - self._head_bytes} bytes before this are not kept]\n"
            write_whole(self._end, left_out.encode() + os.pread(self._memory, END_BYTES, start))
            self._end_bytes = END_BYTES
            self._move(new)

    def close(self) -> None:
        """Let go of the memory, and of the terminal."""
        self.hang_up()
        os.close(self._memory)
        os.close(self._reader)

    @property
    def is_over(self) -> bool:
        """Whether nobody can write any more; what is there has not been shown or kept yet, perhaps."""
        return self.terminal < 0 and not is_written(self._reader)

    @property
    def is_shown(self) -> bool:
        """Whether everything has been shown."""
        return self._shown >= self._size()

    def _size(self) -> int:
        size = os.fstat(self._reader).st_size
        if size < self._shown:  # a process has opened its stderr anew by its path, as a new file
            self._shown = self._seen = self._freed = 0
            self._move(-self._kept)
        return size

    def _drop(self, size: int) -> None:
        """Give up what a console that takes too little has not been shown in time."""
        if size - self._shown <= BACKLOG_BYTES:
            return
        most = _MOST_BACKLOG_BYTES if self.console.ready else BACKLOG_BYTES
        if size - self._shown > most:
            self._unshown += size - most - self._shown
            self._shown = size - most

    def _tell_unshown(self) -> bool:
        """Say how many bytes were dropped; False: the console would have us wait."""
        if self._unshown:
            line = b"\n" * self._in_line
            line += b"keepstep: %d bytes of %s are not shown: the console was too slow\n" % (
                self._unshown,
                self._name.encode(),
            )
            if self.console.write(line) < len(line):
                return False
            self._unshown, self._in_line = 0, False
        return True

    def _free(self, size: int) -> None:
        """Free what was shown and need not be kept, and note how far all went."""
        until = min(self._shown, size - END_BYTES) // _PAGE_BYTES * _PAGE_BYTES
        if until - self._freed >= _FREED_AT_ONCE_BYTES:
            if until > self._kept:
                if self._head_bytes < HEAD_BYTES:
                    with suppress(OSError):  # ``keep`` raises it again when it is called next
                        self.keep()
                if until > self._kept:
                    self._has_gap = True
                    self._end_bytes = 2 * END_BYTES  # the file is written anew, and says what is left out
                    self._move(until - self._kept)
            _free(self._memory, self._freed, until - self._freed)
            self._freed = until
        os.lseek(self._reader, self._shown, os.SEEK_SET)

    def _move(self, by: int) -> None:
        self._kept = os.lseek(self._memory, self._kept + by, os.SEEK_SET)

    def _append(self, path: Path, size: int) -> int:
        """Append the next bytes to a file; returns how many, raises OSError where none can be."""
        file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            written = os.write(file, os.pread(self._memory, size, self._kept))
        finally:
            os.close(file)
        self._move(written)
        return written


def _free(memory: int, start: int, size: int) -> bool:
    arguments = (ctypes.c_int(memory), ctypes.c_int(_KEEP_SIZE_PUNCH_HOLE))
    return _libc.fallocate(*arguments, ctypes.c_long(start), ctypes.c_long(size)) == 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
