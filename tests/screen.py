"""A real terminal, as an emulator of one has it: what was written to it, its size, and keys."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Callable

PATIENCE_S = 60.0


class Screen:
    """A terminal of 33 lines and 101 columns; ``seen``: what was written, as a user would see it."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.resize(33, 101)
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, most: int = 65536) -> None:
        while select.select([self.master], [], [], 0)[0] and (data := os.read(self.master, most)):
            self.seen += data

    def until(self, found: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not found():
            assert time.monotonic() < give_up_s, self.seen[-2000:]
            self.read()
            time.sleep(0.005)

    def press(self, key: bytes) -> None:
        """Press a key: ``\\x03`` is Ctrl-C."""
        os.write(self.master, key)

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)
