"""``keepstep top`` as a program: curses, keys, and a thread that looks at the run again and again."""

from __future__ import annotations

import contextlib
import curses
import locale
import math
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from types import FrameType

from keepstep.view.run_snapshot import unread
from keepstep.view.run_source import RunSource
from keepstep.view.top_look import look_at
from keepstep.view.top_screen import Look, Piece, Screen, Style, screen
from keepstep.view.words import answer

_LEAST_PAUSE_S, _READING_PAUSE_S, _ENDED_PAUSE_S = 1.0, 0.2, 10.0
_MOST_SHARE = 0.03  # of a core that looking at the run may take
_FIRST_SHARE, _FIRST_S = (
    0.5,
    0.5,
)  # a larger one, until it has taken so many seconds, as a small run is read then
_STUCK_S = 20.0  # after which a look is taken to hang
_KEYS_MS = 250  # for so long a key is waited for, before it is looked whether there is news
_SCROLLS = {
    ord("j"): 1, curses.KEY_DOWN: 1, ord("k"): -1, curses.KEY_UP: -1, ord("g"): -1_000_000, ord("G"): 1_000_000,
    curses.KEY_HOME: -1_000_000, curses.KEY_END: 1_000_000,
}  # fmt: skip
_PAGES = {curses.KEY_NPAGE: 1, ord(" "): 1, curses.KEY_PPAGE: -1, ord("b"): -1}
_QUITS = (ord("q"), ord("Q"))


def run_top(source: RunSource, run: str) -> None:
    """Show the run until q is pressed. The terminal is as before afterwards, whatever happens.

    ``run``: how commands are to name it. Raises curses.error where the terminal cannot do this.
    """
    locale.setlocale(locale.LC_ALL, "")
    for name in ("LINES", "COLUMNS"):  # ncurses would take these for the size, also when it has changed
        os.environ.pop(name, None)
    watcher = _Watcher(source, run)
    with _restored_at_signals():
        watcher.thread.start()
        try:
            curses.wrapper(lambda window: _Top(window, watcher).loop())
        finally:
            watcher.end()


class _Watcher:
    """Looks at the run in a thread of its own, so that keys are answered while a slow file system is waited for."""

    def __init__(self, source: RunSource, run: str) -> None:
        self._source, self._run = source, run
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="run", daemon=True)
        self.newest: Look | None = None
        self._began_s = math.inf  # when the look that is being taken began
        self._held_up: tuple[tuple[float, int], Look] | None = None
        self.error: BaseException | None = None

    def _watch(self) -> None:
        spent_s = 0.0
        try:
            while not self._ended.is_set():
                began_s = time.thread_time()
                self._began_s = time.monotonic()
                self.newest = look_at(self._source, self._run)
                self._began_s = math.inf
                cost_s = time.thread_time() - began_s
                spent_s += cost_s
                share = _FIRST_SHARE if spent_s < _FIRST_S else _MOST_SHARE
                self._ended.wait(max(self._least_pause_s(), cost_s / share))
        except BaseException as error:
            self.error = error

    def look(self) -> Look | None:
        """The newest look; while the next one is held up, as by a file system that hangs, what that means."""
        look, began_s = self.newest, self._began_s
        stuck_s = time.monotonic() - began_s
        if look is None or look.snapshot.end is not None or stuck_s < _STUCK_S:
            return look
        when = began_s, int(stuck_s / _STUCK_S)  # drawn anew now and then
        if self._held_up is None or self._held_up[0] != when:
            snapshot = unread(look.snapshot, stuck_s)
            self._held_up = when, replace(look, snapshot=snapshot, answer=answer(snapshot, self._run))
        return self._held_up[1]

    def _least_pause_s(self) -> float:
        if not self._source.is_whole:  # what happened before is still read
            return _READING_PAUSE_S
        has_ended = self.newest is not None and self.newest.snapshot.end is not None
        return _ENDED_PAUSE_S if has_ended else _LEAST_PAUSE_S

    def end(self) -> None:
        """End the thread; one that is held up by a file system ends with the process."""
        self._ended.set()
        self.thread.join(timeout=2.0)
        if not self.thread.is_alive():
            self._source.close()


class _Top:
    """The terminal."""

    def __init__(self, window: curses.window, watcher: _Watcher) -> None:
        self._window, self._watcher = window, watcher
        self._scroll = 0
        self._ascii_only = "utf" not in locale.nl_langinfo(locale.CODESET).lower()
        self._attributes = _attributes(colors="NO_COLOR" not in os.environ)
        with contextlib.suppress(curses.error):
            curses.curs_set(0)
        window.timeout(_KEYS_MS)
        window.keypad(True)

    def loop(self) -> None:
        """Draw whenever there is news, a key or another size, until q is pressed."""
        drawn: Look | None = None
        while True:
            if self._watcher.error is not None:
                raise self._watcher.error
            look = self._watcher.look()
            if look is not drawn and look is not None:
                self._draw(look)
                drawn = look
            key = self._window.getch()
            if key in _QUITS:
                return
            if key == curses.KEY_RESIZE:
                curses.update_lines_cols()
                self._window.clear()
                drawn = None
            elif (lines := self._lines(key)) and look is not None:
                self._scroll = max(self._scroll + lines, 0)
                self._draw(look)
            elif key == ord("r"):
                self._window.clear()
                drawn = None

    def _lines(self, key: int) -> int:
        """By how many lines a key scrolls."""
        return _SCROLLS.get(key, 0) or _PAGES.get(key, 0) * max(self._window.getmaxyx()[0] - 3, 1)

    def _draw(self, look: Look) -> None:
        height, width = self._window.getmaxyx()
        shown = screen(look, width, height, self._scroll, ascii_only=self._ascii_only)
        self._scroll = shown.scroll
        self._put(shown, width)

    def _put(self, shown: Screen, width: int) -> None:
        self._window.erase()
        for row, line in enumerate(shown.lines):
            column = 0
            for piece in _joined(line):
                # The last cell of all cannot be written without an error, as the cursor has no place to go.
                with contextlib.suppress(curses.error):
                    self._window.addstr(row, column, piece.text, self._attributes[piece.style])
                column = self._window.getyx()[1]
                if column >= width or self._window.getyx()[0] != row:
                    break
        self._window.refresh()


def _joined(line: tuple[Piece, ...]) -> Iterator[Piece]:
    return (piece for piece in line if piece.text)


def _attributes(*, colors: bool) -> dict[Style, int]:
    """How each style looks; without colours by bold, dim and reversed letters alone."""
    found: dict[Style, int] = {
        "": curses.A_NORMAL,
        "bar": curses.A_REVERSE,
        "head": curses.A_UNDERLINE,
        "bad": curses.A_BOLD,
        "warn": curses.A_NORMAL,
        "good": curses.A_NORMAL,
        "dim": curses.A_DIM,
        "bold": curses.A_BOLD,
    }
    if not colors or not curses.has_colors():
        return found
    with contextlib.suppress(curses.error):
        curses.start_color()
        curses.use_default_colors()
        inks: tuple[tuple[Style, int], ...] = (
            ("bad", curses.COLOR_RED), ("warn", curses.COLOR_YELLOW), ("good", curses.COLOR_GREEN),
        )  # fmt: skip
        for number, (style, ink) in enumerate(inks, start=1):
            curses.init_pair(number, ink, -1)
            found[style] |= curses.color_pair(number)
    return found


@contextlib.contextmanager
def _restored_at_signals() -> Generator[None, None, None]:
    """SIGTERM and SIGHUP end the program by an exception, so that the terminal is restored."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    chosen = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, stop) for one in chosen]
    try:
        yield
    finally:
        for one, handler in zip(chosen, before, strict=True):
            signal.signal(one, handler)
