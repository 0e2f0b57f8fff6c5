"""The last resort: a process that outlives the launcher by a moment and ends what the launcher left behind.

The kernel ends the launcher's own children with it (``PR_SET_PDEATHSIG``), but not their children: data loaders,
shells, helpers. The guard is forked (not executed: it shares the launcher's memory pages) before anything else,
sleeps on a pipe, and wakes when the launcher's end of it closes. It then kills the process groups that the launcher
has named and every process that carries the run's cookie in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

_TERM_GRACE_S = 5.0


class Guard:
    """The launcher's handle on its guard. Groups are numbered by their leader's pid."""

    def __init__(self, cookie: str) -> None:
        """Fork the guard. ``cookie`` is ``NAME=value`` as it stands in the environment of the run's processes."""
        self._cookie = cookie
        self._groups: dict[int, bool] = {}
        self._pipe = -1
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Fork the guard, again if it was killed, and name it all groups."""
        if self._pipe >= 0:
            os.close(self._pipe)
        reader, self._pipe = os.pipe()
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _guard(reader, launcher, self._cookie.encode())
        os.close(reader)
        os.set_blocking(self._pipe, False)
        for group, at_once in list(self._groups.items()):
            self.add(group, at_once=at_once)

    def add(self, group: int, *, at_once: bool) -> None:
        """Have the guard kill a process group in the end.

        ``at_once`` false: it first sends SIGTERM and leaves the group seconds to save its work.
        """
        self._groups[group] = at_once
        self._tell(f"{'+' if at_once else '~'}{group}\n")

    def remove(self, group: int) -> None:
        """Forget a group that is gone."""
        if self._groups.pop(group, None) is not None:
            self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, because the launcher has ended everything itself."""
        self._tell("!\n")
        os.close(self._pipe)
        self._pipe, self.pid = -1, 0

    def _tell(self, line: str) -> None:
        # A guard that was killed is reaped like any child, and start() names all groups to the next one.
        with contextlib.suppress(OSError):
            os.write(self._pipe, line.encode())


def _guard(reader: int, launcher: int, cookie: bytes) -> None:
    try:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            with contextlib.suppress(OSError):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.closerange(0, reader)
        os.closerange(reader + 1, 65536)
        groups = _listen(reader)
        if groups is not None:
            _end(groups, cookie)
    finally:
        os._exit(0)


def _listen(reader: int) -> dict[int, bool] | None:
    """The groups that there are when the pipe closes; None when the launcher said that nothing is left."""
    groups: dict[int, bool] = {}
    pending = b""
    while data := os.read(reader, 65536):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if line == b"!":
                return None
            if line[:1] == b"-":
                groups.pop(int(line[1:]), None)
            else:
                groups[int(line[1:])] = line[:1] == b"+"
    return groups


def _end(groups: dict[int, bool], cookie: bytes) -> None:
    patient = [group for group, at_once in groups.items() if not at_once]
    for group, at_once in groups.items():
        signal_group(group, signal.SIGKILL if at_once else signal.SIGTERM)
    _kill_carriers(cookie)
    deadline = time.monotonic() + _TERM_GRACE_S
    while patient and time.monotonic() < deadline:
        time.sleep(0.02)
        patient = [group for group in patient if signal_group(group, 0)]
    for group in patient:
        signal_group(group, signal.SIGKILL)
    _kill_carriers(cookie)


def signal_group(leader: int, number: int) -> bool:
    """Send a signal to a process group; False when it is empty, or all that are left in it have changed their user."""
    try:
        os.killpg(leader, number)
        return True
    except OSError:
        return False


def _kill_carriers(cookie: bytes) -> None:
    """Kill every process with the cookie, again while new ones turn up: one may fork as it is killed."""
    for _ in range(20):
        found = list(carriers(cookie))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def carriers(cookie: bytes) -> Iterator[int]:
    """Processes whose environment holds ``cookie``, ``NAME=value``; no zombies, and not this one."""
    wanted = b"\0" + cookie + b"\0"
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in b"\0" + file.read() + b"\0":
                    yield int(entry)
        except OSError:
            continue
