"""How many optimizer steps make one iteration, and with which of them it ends.

One for most jobs; two for a GAN or for two optimizers side by side; as many as there are parameters when the optimizer
runs in the backward pass. What happened between two optimizer steps (its communication and backward passes, as one
``class`` number) repeats with the iteration, so the period of the classes is the answer.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

Sequence = NDArray[np.uint64]

_MIN_MARKERS = 8
_MATCH = 0.9
_STILL = 0.75
_MEMORY = 192
_KINDS = 48


class StepMarkers:
    """Learns the iteration's length in optimizer steps from the classes of successive markers.

    ``per_step`` is 0 until it is known; ``offset`` is the number of markers before the first iteration's first.
    """

    def __init__(self) -> None:
        self.per_step = 0
        self.offset = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=_MEMORY)  # marker number, class
        self._contents: dict[int, Sequence] = {}
        self._backward: dict[int, bool] = {}
        self._since = 0
        self._rival = 0

    def add(self, number: int, content: Sequence, backward: bool) -> None:
        """Take marker ``number`` (0 is the job's first) with what came before it; ``backward``: a backward pass too."""
        kind = hash(content.tobytes())
        if kind not in self._contents and len(self._contents) >= _KINDS:
            self._forget()
        self._contents.setdefault(kind, content)
        self._backward[kind] = backward
        if self._seen and number != self._seen[-1][0] + 1:
            self._seen.clear()
        self._seen.append((number, kind))
        self._since += 1

    def learn(self) -> bool:
        """Look for the period when it is time to; True when ``per_step`` or ``offset`` changed."""
        if len(self._seen) < _MIN_MARKERS or (self.per_step and self._since < _MEMORY // 3):
            return False
        self._since = 0
        classes = self._classes()
        found = marker_period(classes)
        if found is None and not self.per_step and len(classes) >= _MEMORY // 2:
            found = 1
        if found is None or found == self.per_step:
            self._rival = 0
            return False
        # A settled count gives way only to one that was found twice while it no longer fits itself.
        if self.per_step and (_agreement(classes, self.per_step) >= _STILL or found != self._rival):
            self._rival = found
            return False
        offset = self._first_of_step(classes, found)
        changed = (found, offset) != (self.per_step, self.offset)
        self.per_step, self.offset, self._rival = found, offset, 0
        return changed

    def _classes(self) -> list[int]:
        """Classes with rare ones that are a frequent one plus something (an evaluation, a log line) folded into it."""
        kinds = [kind for _, kind in self._seen]
        counts = Counter(kinds)
        fold: dict[int, int] = {}
        for kind, count in counts.items():
            content = self._contents[kind]
            for other, often in counts.items():
                base = self._contents[other]
                if 2 * count < often and 0 < len(base) < len(content) and _is_subsequence(base, content):
                    fold[kind] = other
        return [fold.get(kind, kind) for kind in kinds]

    def _first_of_step(self, classes: list[int], per_step: int) -> int:
        """The smallest residue whose markers come after a backward pass (or, without any, after communication)."""
        first = self._seen[0][0]
        by_residue: dict[int, Counter[int]] = {}
        for place, kind in enumerate(classes):
            by_residue.setdefault((first + place) % per_step, Counter())[kind] += 1
        usual = {residue: counts.most_common(1)[0][0] for residue, counts in by_residue.items()}
        after_backward = [residue for residue, kind in sorted(usual.items()) if self._backward[kind]]
        after_anything = [residue for residue, kind in sorted(usual.items()) if len(self._contents[kind])]
        return next(iter(after_backward or after_anything), 0)

    def _forget(self) -> None:
        alive = {kind for _, kind in self._seen}
        for kind in [kind for kind in self._contents if kind not in alive]:
            del self._contents[kind]
            del self._backward[kind]
        if len(self._contents) >= _KINDS:
            self._seen.clear()
            self._contents.clear()
            self._backward.clear()


def marker_period(classes: list[int]) -> int | None:
    """The smallest lag at which nine of ten classes repeat, seen at least twice in full; None when there is none.

    The first two are left out: a job's first iterations often differ (DDP rebuilds its buckets after the first).
    """
    steady = classes[2:]
    for lag in range(1, len(steady) // 2 + 1):
        if _agreement(steady, lag) >= _MATCH:
            return lag
    return None


def _agreement(classes: list[int], lag: int) -> float:
    pairs = len(classes) - lag
    return sum(classes[i] == classes[i + lag] for i in range(pairs)) / pairs if pairs > 0 else 0.0


def _is_subsequence(short: Sequence, long: Sequence) -> bool:
    rest = iter(long.tolist())
    return all(any(item == other for other in rest) for item in short.tolist())
