"""A tracker in a process of its own, fed by a thread: one that hangs or crashes is ended and begun again.

What is still to be recorded waits in a queue of bounded length; of more the oldest points are left out.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from keepstep.detect.secrets import blanked
from keepstep.view.notify.notice import plain
from keepstep.view.notify.private import redacted
from keepstep.view.notify.receiver import Say
from keepstep.view.notify.tracker import TrackerOptions, TrackerOrder

COMMAND = (sys.executable, "-m", "keepstep.view.notify.tracker_child")
_MOST_QUEUED = 2000
_MOST_STARTS = 4
_STUCK_S = 300.0  # after so long without an answer it is ended and begun again
_LOOK_S = 0.5
_OPTIONS = b"options"  # stands for the first line among what is to be answered
_MOST_WORDS = 4000  # bytes that are kept of what a tracker printed last


class TrackerProcess:
    """Feeds one tracker. ``say`` prints one line; ``command``: the program, which tests replace."""

    def __init__(
        self,
        options: TrackerOptions,
        say: Say,
        *,
        command: Sequence[str] = COMMAND,
        stuck_s: float = _STUCK_S,
        secrets: tuple[str, ...] = (),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._command, self._stuck_s = options, tuple(command), stuck_s
        self._plain_say, self._secrets, self._now_s = say, secrets, monotonic_s
        self._queue: deque[bytes] = deque()
        self._unanswered: deque[bytes] = deque()  # first the options
        self._left_out = self._starts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._half_sent = self._half_answer = self._last_words = b""
        self._answered_s = 0.0
        self._said: set[str] = set()
        self.is_given_up = False

    def record(self, order: TrackerOrder) -> None:
        """Queue an order; never waits."""
        if self.is_given_up:
            return
        self._queue.append(msgspec.json.encode(order) + b"\n")
        while len(self._queue) > _MOST_QUEUED:
            self._queue.popleft()
            self._left_out += 1

    @property
    def waits(self) -> bool:
        """Whether anything is still to be recorded."""
        return not self.is_given_up and bool(self._queue or self._unanswered or self._half_sent)

    def pump(self, timeout_s: float = _LOOK_S) -> None:
        """Send what fits, take the answers, look after the process; returns after ``timeout_s`` seconds at most."""
        if self._child is None and not self.waits:  # nothing to record yet, or given up
            time.sleep(timeout_s)
            return
        if self._child is None:
            self._start()
        child = self._child
        if child is None or child.stdin is None:
            return
        wants_to_send = bool(self._half_sent or self._queue)
        with suppress(KeyError):
            self._selector.unregister(child.stdin)
        if wants_to_send:
            self._selector.register(child.stdin, selectors.EVENT_WRITE, "stdin")
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            self._read_or_write(key.data)
        if not ready and child.poll() is not None:
            self._lost(f"ended with exit code {child.returncode}")
        elif self._unanswered and self._now_s() - self._answered_s > self._stuck_s:
            self._lost(f"gave no answer for {self._stuck_s:g} s")

    def close(self, timeout_s: float) -> None:
        """Let it write what is left, for ``timeout_s`` seconds at most; then it is ended."""
        until_s = self._now_s() + timeout_s
        while self.waits and self._now_s() < until_s:
            self.pump(0.1)
        child = self._child
        if child is None:
            return
        with suppress(OSError):
            if child.stdin is not None:
                child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(until_s - self._now_s(), 0.1))
        self._end_child()

    def _start(self) -> None:
        self._starts += 1
        if self._starts > _MOST_STARTS:
            self._give_up()
            return
        try:
            self._child = child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is ours: the tracker still writes what is left
            )
        except OSError as error:
            self._say(f"cannot be started: {error.strerror}")
            self._give_up()
            return
        self._half_sent = msgspec.json.encode(self._options) + b"\n"
        # What the process before did not answer; recorded twice at worst.
        self._queue.extendleft(reversed([order for order in self._unanswered if order != _OPTIONS]))
        self._unanswered = deque((_OPTIONS,))
        self._half_answer, self._last_words, self._answered_s = b"", b"", self._now_s()
        for stream, name in ((child.stdin, "stdin"), (child.stdout, "stdout"), (child.stderr, "stderr")):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            if name != "stdin":
                self._selector.register(stream, selectors.EVENT_READ, name)

    def _read_or_write(self, name: str) -> None:
        child = self._child
        if child is None:
            return
        try:
            if name == "stdin":
                self._write(child)
            else:
                stream = child.stdout if name == "stdout" else child.stderr
                assert stream is not None
                content = os.read(stream.fileno(), 65536)
                if not content:
                    self._selector.unregister(stream)
                elif name == "stdout":
                    self._take_answers(content)
                else:
                    self._last_words = (self._last_words + content)[-_MOST_WORDS:]
        except BlockingIOError:
            return
        except OSError:
            child.wait()  # its input is closed: it ends
            self._lost(f"ended with exit code {child.returncode}")

    def _write(self, child: subprocess.Popen[bytes]) -> None:
        if not self._half_sent:
            order = self._queue.popleft()
            if not self._unanswered:
                self._answered_s = self._now_s()
            self._unanswered.append(order)
            self._half_sent = order
        assert child.stdin is not None
        sent = os.write(child.stdin.fileno(), self._half_sent)
        self._half_sent = self._half_sent[sent:]

    def _take_answers(self, content: bytes) -> None:
        *lines, self._half_answer = (self._half_answer + content).split(b"\n")
        for line in lines:
            self._answered_s = self._now_s()
            if self._unanswered:
                self._unanswered.popleft()
            told = line.decode(errors="replace")
            if told.startswith("error "):
                self._say(told.removeprefix("error "))

    def _lost(self, how: str) -> None:
        self._end_child()
        words = [line for line in self._last_words.decode(errors="replace").splitlines() if line.strip()]
        self._say(how + (f": {words[-1].strip()}" if words else ""))
        self._half_sent = b""

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        for stream in (child.stdin, child.stdout, child.stderr):
            with suppress(KeyError, ValueError):
                if stream is not None:
                    self._selector.unregister(stream)
        if child.poll() is None:
            child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            with suppress(OSError):
                if stream is not None:
                    stream.close()

    def _give_up(self) -> None:
        self.is_given_up = True
        self._queue.clear()
        self._unanswered.clear()
        self._half_sent = b""
        self._say(f"given up after {_MOST_STARTS} starts; start `keepstep serve` again once it is repaired")

    def _say(self, text: str) -> None:
        """Tell a line, each once."""
        line = plain(blanked(redacted(text, self._secrets)), 400)
        if line not in self._said and len(self._said) < 100:
            self._said.add(line)
            self._plain_say(f"notify {self._options.kind}: {line}")
