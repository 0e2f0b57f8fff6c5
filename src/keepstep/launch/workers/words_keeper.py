"""The process that shows and keeps the workers' words, so that no slow disk or console ever holds up the launcher.

It is forked off the launcher, as the guard is. It outlives a launcher that is killed, and ends once nobody can write
any more. One that is killed is replaced: the launcher has all descriptors, and their positions say how far it was.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from keepstep.launch.workers.kept_words import Console, KeptWords

LOOK_S = 0.04
_KEEP_S = 1.0
_ALONE_S = 0.1
"""How often it is looked whether anybody can still write once the launcher has gone."""
SHOWN_S = 5.0
"""How long a console that takes data slowly is waited for."""
# Between two looks at terminals: who writes meanwhile wakes nobody, and 64 KiB have room.
_AWAY_S = 0.006
_MOST_BYTES = 16384
SHOW = b"show"  # order: show and keep everything that is there; answered with SHOWN
SHOWN, OVER, TROUBLE = b"shown", b"over ", b"trouble "  # answers


@dataclass(frozen=True, slots=True)
class Kept:
    """The words of one rank in one incarnation, as the keeper is told of them, with their memory and reader."""

    number: int
    name: str  # name of the rank
    console: int  # descriptor
    head: str  # file of the first bytes
    end: str  # file of the last bytes

    def send(self, keeper: socket.socket, memory: int, reader: int, terminal: int = -1) -> None:
        """Tell the keeper. ``terminal``: its end to be read, where the rank writes into one. Raises OSError."""
        terminals = [terminal] if terminal >= 0 else []
        socket.send_fds(keeper, [json.dumps(asdict(self)).encode()], [memory, reader, *terminals])


def fork_keeper() -> socket.socket:
    """Start a keeper; returns the socket on which it is told, and answers. It ends some time after that is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _alone(theirs.fileno())
            _Keeper(theirs).run()
        finally:
            os._exit(0)
    theirs.close()
    ours.setblocking(False)
    return ours


def _alone(launcher: int) -> None:
    """Let go of everything that is the launcher's, apart from the consoles."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.closerange(3, launcher)
    os.closerange(launcher + 1, 65536)


class _Keeper:
    def __init__(self, launcher: socket.socket) -> None:
        self._launcher: socket.socket | None = launcher
        self._consoles: dict[int, Console] = {}
        self._kept: dict[int, KeptWords] = {}
        self._terminals: dict[int, KeptWords] = {}  # by their descriptor
        self._slow: set[Console] = set()  # terminals that are to be shown more as soon as they take it
        self._poll = select.poll()
        self._keep_at_s = self._look_at_s = 0.0
        self._has_more = False

    def run(self) -> None:
        """Show and keep what the launcher tells of, until it has gone and nobody can write any more."""
        assert self._launcher
        self._poll.register(self._launcher, select.POLLIN)
        while self._launcher or self._kept:
            left_s = max(self._look_at_s - time.monotonic(), 0.0)
            wait_s = 0.0 if self._has_more else left_s if self._kept else None
            self._wait(wait_s)
            if self._has_more or time.monotonic() >= self._look_at_s:
                self._look_at_s = time.monotonic() + LOOK_S
                self._look()

    def _wait(self, wait_s: float | None) -> None:
        """Hear the launcher and take what is written to terminals, for so long at most."""
        ready = self._poll.poll(None if wait_s is None else 1000 * wait_s)
        for descriptor, _ in ready:
            if one := self._terminals.get(descriptor):
                self._take(descriptor, one)
            elif descriptor in map(Console.fileno, self._slow):
                self._has_more = True
            elif self._launcher:
                self._hear(self._launcher)
        if ready and (self._terminals or self._slow):
            time.sleep(_AWAY_S)

    def _take(self, descriptor: int, one: KeptWords) -> None:
        if not one.take():
            del self._terminals[descriptor]
            self._poll.unregister(descriptor)

    def _hear(self, launcher: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(launcher, _MOST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        if not message:
            self._show_all()
            self._poll.unregister(launcher)
            launcher.close()
            self._launcher = None
        elif message == SHOW:
            self._show_all()
            self._say(SHOWN)
        else:
            told = Kept(**json.loads(message))
            memory, reader, terminal = (*descriptors, -1)[:3]
            if told.console not in self._consoles:
                self._consoles[told.console] = Console(told.console)
            console = self._consoles[told.console]
            kept = KeptWords(memory, reader, console, told.name, Path(told.head), Path(told.end), terminal)
            self._kept[told.number] = kept
            if terminal >= 0:
                self._terminals[terminal] = kept
                self._poll.register(terminal, select.POLLIN)

    def _look(self) -> None:
        self._has_more = self._show()
        self._wait_for(
            {one.console for one in self._kept.values() if one.console.is_terminal and not one.is_shown}
        )
        now_s = time.monotonic()
        if now_s >= self._keep_at_s:
            self._keep_at_s = now_s + (_KEEP_S if self._launcher else _ALONE_S)
            self._keep()

    def _wait_for(self, slow: set[Console]) -> None:
        """From now on, look again as soon as one of these takes more."""
        slow = {console for console in slow if not console.is_gone and not console.ready}
        for console in self._slow - slow:
            self._poll.unregister(console)
        for console in slow - self._slow:
            self._poll.register(console, select.POLLOUT)
        self._slow = slow

    def _show(self, *, last: bool = False) -> bool:
        """Show what is new; returns whether a console that takes it has not been shown everything."""
        waits: set[Console] = set()
        more = False
        for number, one in list(self._kept.items()):
            if one.console not in waits and not one.show(last=last):
                more = more or one.console.ready
                if not one.console.ready:
                    waits.add(one.console)
                    # Its line is ended before another rank's begins.
                    self._kept = {number: one, **self._kept}
        return more

    def _show_all(self) -> None:
        """Show everything that is there, also what is no whole line, and keep it."""
        deadline_s = time.monotonic() + SHOWN_S
        while True:
            for descriptor, one in list(self._terminals.items()):
                self._take(descriptor, one)
            self._show(last=True)
            if all(one.is_shown for one in self._kept.values()) or time.monotonic() > deadline_s:
                break
            if not any(one.console.ready for one in self._kept.values() if not one.is_shown):
                time.sleep(0.01)
        self._keep()

    def _keep(self) -> None:
        """Keep what is new, and let go of what is over."""
        for number, one in list(self._kept.items()):
            is_over = one.is_over
            self._try(one.keep)
            # Without a launcher nobody else would end this process.
            if is_over and ((one.show(last=True) and one.is_shown) or not self._launcher):
                self._try(one.keep)
                one.close()
                del self._kept[number]
                self._say(OVER + str(number).encode())

    def _try(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except OSError as error:
            self._say(TROUBLE + str(error).encode(errors="replace")[:1000])

    def _say(self, what: bytes) -> None:
        if self._launcher:
            with suppress(OSError):  # the launcher has gone, or does not listen
                self._launcher.send(what, socket.MSG_DONTWAIT)
