"""Learns the usual sequence of operations in an iteration, to find unmarked pauses before it.

An evaluation without ``model.eval()`` leaves no phase record, but it communicates: its operations come before the usual
ones. The time they take counts as a pause, so that the iteration takes as long as by the script's own step clock.
"""

from __future__ import annotations

import sys
from collections import deque
from statistics import median

_KNOWN = 3
_SEQUENCES = 8
# Share of an iteration below which extra time is no pause: it is often an all-reduce of a metric.
_SHARE = 0.05
# Symbols and times have so many.
_BYTES = 8


class UsualSequence:
    """Learns the most common sequence of symbols, and how long after the iteration's start it begins."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._contents: dict[int, bytes] = {}
        self._leads: deque[int] = deque(maxlen=9)
        self._usual = 0

    @property
    def length(self) -> int:
        """How many symbols the usual sequence has; 0 while it is not known."""
        return len(self._contents[self._usual]) // _BYTES if self._counts.get(self._usual, 0) >= _KNOWN else 0

    def pause_ns(self, content: bytes, starts: bytes, start_ns: int, end_ns: int) -> int:
        """Take an iteration's symbols and their starts; return the length of the unmarked pause at its beginning.

        Both are 8 bytes for each, as of `records.symbols`. ``start_ns`` to ``end_ns`` is the iteration without its
        marked pauses.
        """
        kind = hash(content)
        usual = self._contents.get(self._usual)
        if usual is not None and kind != self._usual and self._counts[self._usual] >= _KNOWN:
            extra = len(content) - len(usual)
            if extra > 0 and usual and content[extra:] == usual:
                lead = int(median(self._leads)) if self._leads else 0
                pause = _time_at(starts, extra) - lead - start_ns
                least = _SHARE * (end_ns - start_ns - pause)
                # A single operation right at the start is the all-reduce of a logged metric, however long it waits.
                log_line = extra == _BYTES and _time_at(starts, 0) - start_ns <= least
                return 0 if log_line or pause <= least else pause
        self._count(kind, content)
        if kind == self._usual and starts:
            self._leads.append(_time_at(starts, 0) - start_ns)
        return 0

    def _count(self, kind: int, content: bytes) -> None:
        if kind not in self._counts and len(self._counts) >= _SEQUENCES:
            rarest = min(self._counts, key=self._counts.__getitem__)
            del self._counts[rarest]
            del self._contents[rarest]
        self._contents.setdefault(kind, content)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] >= 64:  # halving all counts lets a new sequence become the usual one
            self._counts = {known: count // 2 for known, count in self._counts.items()}
        best = max(self._counts, key=self._counts.__getitem__)
        if self._usual not in self._counts or self._counts[best] > self._counts[self._usual]:
            self._usual = best
            self._leads.clear()


def _time_at(times: bytes, place: int) -> int:
    """The int64 that begins at byte ``place``."""
    return int.from_bytes(times[place : place + _BYTES], sys.byteorder, signed=True)
