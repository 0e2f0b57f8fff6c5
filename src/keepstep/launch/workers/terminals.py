"""Terminals for workers whose console is one: what they write there can be kept, and they still see a terminal.

The words keeper holds the other end and reads it; the launcher holds it for the next keeper. A worker waits for neither
console nor disk, and is sent nothing when the launcher dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import termios
import time
from contextlib import suppress

_READ_BYTES = 1 << 16
_AT_ONCE_BYTES = 1 << 20
_LOOK_S = 0.004
_SIZE = struct.Struct("HHHH")  # struct winsize
_OUTPUT, _LOCAL = 1, 3  # places in what tcgetattr returns


def open_terminal(console: int) -> tuple[int, int]:
    """A terminal as the console is one: the end to be read, which never blocks, and that for the worker.

    Bytes come out as they were written: newlines are translated by the console, and nothing that is typed is echoed.
    Neither end becomes the controlling terminal of anybody. Raises OSError.
    """
    reader, writer = os.openpty()
    try:
        os.set_blocking(reader, False)
        attributes = termios.tcgetattr(writer)
        attributes[_OUTPUT] &= ~termios.OPOST
        attributes[_LOCAL] &= ~(termios.ECHO | termios.ECHONL)
        termios.tcsetattr(writer, termios.TCSANOW, attributes)
    except (OSError, termios.error) as error:
        os.close(reader)
        os.close(writer)
        raise OSError(errno.ENOTTY, f"no terminal can be made: {error}") from None
    resize(reader, console)
    return reader, writer


def resize(terminal: int, console: int) -> None:
    """Give a terminal the console's size, if that is known."""
    with suppress(OSError):
        size = fcntl.ioctl(console, termios.TIOCGWINSZ, bytes(_SIZE.size))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


def read_into(terminal: int, memory: int) -> bool:
    """Append what a worker has written to its terminal, or some of it, to a memory; False: nobody writes any more."""
    left = _AT_ONCE_BYTES
    while left > 0:
        try:
            data = os.read(terminal, _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            return error.errno != errno.EIO  # the last process has closed it
        if not data:
            return False
        left -= len(data)
        with suppress(OSError):  # no memory is left: better to lose words than to hold up the worker
            at = os.fstat(memory).st_size
            while data:
                written = os.pwrite(memory, data, at)
                data, at = data[written:], at + written
    return True


def until_read(terminal: int, patience_s: float) -> None:
    """Wait until another process, the words keeper, has read what was written; ``patience_s`` at most."""
    deadline_s = time.monotonic() + patience_s
    poll = select.poll()
    poll.register(terminal, select.POLLIN)
    while any(found & select.POLLIN for _, found in poll.poll(0)) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)  # what it has read it is about to write


def drop(terminal: int) -> bool:
    """Read what a worker has written to its terminal, or some of it, so that it goes on; False as of `read_into`."""
    try:
        return bool(os.read(terminal, _READ_BYTES))
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno != errno.EIO
