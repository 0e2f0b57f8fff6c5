"""Learns how many optimizer steps make one iteration, and with which of them it ends.

It is one for most jobs, two for a GAN or for two optimizers side by side, and as many as there are parameters if the
optimizer runs inside the backward pass. A marker is a finished optimizer step. The communication and backward passes
before a marker make its class. Classes repeat with each iteration, so their period is the number of steps.
"""

from __future__ import annotations

from collections import Counter, deque
from math import comb

Sequence = bytes  # 8 for each symbol

_MIN_MARKERS = 8
_MATCH = 0.9
_STILL = 0.75
_MEMORY = 192
_KINDS = 48
_MOST_CHANCE = 1e-6  # looked for at every lag, and again with every step
_OPTIONAL_MARKERS = 96


class StepMarkers:
    """Learns the iteration's length in optimizer steps from the classes of successive markers.

    ``per_step`` is the length, 0 until it is known; ``offset`` is the number of markers before the first iteration.
    """

    def __init__(self) -> None:
        self.per_step = 0
        self.offset = 0
        self._seen: deque[tuple[int, int]] = deque(maxlen=_MEMORY)  # numbers of markers and their classes
        # By class its symbols, and whether there is a backward pass among them.
        self._known: dict[int, tuple[Sequence, bool]] = {}
        self._since = 0
        self._rival = 0

    def add(self, number: int, content: Sequence, backward: bool) -> None:
        """Take marker ``number``, counted from 0, with the symbols of the operations before it.

        ``backward``: there was a backward pass among them.
        """
        kind = hash(content)
        if kind not in self._known and len(self._known) >= _KINDS:
            self._known = {kind: self._known[kind] for _, kind in self._seen}
            if len(self._known) >= _KINDS:
                self._seen.clear()
                self._known.clear()
        self._known[kind] = content, backward
        if self._seen and number != self._seen[-1][0] + 1:
            self._seen.clear()
        self._seen.append((number, kind))
        self._since += 1

    def learn(self) -> bool:
        """Look for the period if enough markers have come; True if ``per_step`` or ``offset`` changed."""
        if len(self._seen) < _MIN_MARKERS or (self.per_step and self._since < _MEMORY // 3):
            return False
        self._since = 0
        classes = self._classes()
        found = self._period(classes)
        if found is None and not self.per_step and len(classes) >= _MEMORY // 2:
            found = 1
        if found is None or found == self.per_step:
            self._rival = 0
            return False
        # A known length is replaced only if it no longer fits and the same other length was found twice.
        if self.per_step and (_agreement(classes, self.per_step) >= _STILL or found != self._rival):
            self._rival = found
            return False
        offset = self._first_of_step(classes, found)
        changed = (found, offset) != (self.per_step, self.offset)
        self.per_step, self.offset, self._rival = found, offset, 0
        return changed

    def _period(self, classes: list[int]) -> int | None:
        """The period of the classes; None while none is evident.

        Operations that come in some iterations only, at no fixed distance, may repeat by chance for a while. So a
        period that is not there without them counts once chance can hardly explain it, and else they are overlooked.
        """
        found = marker_period(classes)
        kinds = [kind for _, kind in self._seen]
        without = self._without_optional(kinds)
        if without == classes or found == marker_period(without):
            return found
        if found is not None and _chance(classes, found) < _MOST_CHANCE:
            return found
        return marker_period(without) if len(kinds) >= _OPTIONAL_MARKERS else None

    def _without_optional(self, kinds: list[int]) -> list[int]:
        """The classes, where one counts as a more frequent one that has all its operations, or some of them."""
        counts = Counter(kinds)
        fold: dict[int, int] = {}
        for kind, count in counts.items():
            content, _ = self._known[kind]
            related = [
                (often, other)
                for other, often in counts.items()
                if (often, other) > (count, kind) and self._is_related(content, self._known[other][0])
            ]
            fold[kind] = max(related, default=(count, kind))[1]
        return [fold[kind] for kind in kinds]

    @staticmethod
    def _is_related(one: Sequence, other: Sequence) -> bool:
        short, long = sorted((one, other), key=len)
        return 0 < len(short) < len(long) and _is_subsequence(short, long)

    def _classes(self) -> list[int]:
        """The classes seen; a rare class that contains a frequent one, plus for example an evaluation, counts as it."""
        kinds = [kind for _, kind in self._seen]
        counts = Counter(kinds)
        fold: dict[int, int] = {}
        for kind, count in counts.items():
            content, _ = self._known[kind]
            for other, often in counts.items():
                base, _ = self._known[other]
                if 2 * count < often and 0 < len(base) < len(content) and _is_subsequence(base, content):
                    fold[kind] = other
        return [fold.get(kind, kind) for kind in kinds]

    def _first_of_step(self, classes: list[int], per_step: int) -> int:
        """The smallest residue whose markers follow a backward pass, or communication if no marker does."""
        first = self._seen[0][0]
        by_residue: dict[int, Counter[int]] = {}
        for place, kind in enumerate(classes):
            by_residue.setdefault((first + place) % per_step, Counter())[kind] += 1
        usual = {residue: counts.most_common(1)[0][0] for residue, counts in by_residue.items()}
        after_backward = [residue for residue, kind in sorted(usual.items()) if self._known[kind][1]]
        after_anything = [residue for residue, kind in sorted(usual.items()) if len(self._known[kind][0])]
        return next(iter(after_backward or after_anything), 0)


def marker_period(classes: list[int]) -> int | None:
    """The smallest lag at which nine of ten classes repeat, if ``classes`` is at least twice as long; else None.

    The first two classes are left out, because a job's first iterations often differ (DDP rebuilds its buckets).
    """
    steady = classes[2:]
    for lag in range(1, len(steady) // 2 + 1):
        if _agreement(steady, lag) >= _MATCH:
            return lag
    return None


def _agreement(classes: list[int], lag: int) -> float:
    pairs = len(classes) - lag
    return sum(classes[i] == classes[i + lag] for i in range(pairs)) / pairs if pairs > 0 else 0.0


def _chance(classes: list[int], lag: int) -> float:
    """How likely as many classes or more would repeat after ``lag`` if each were drawn, as often as it is there."""
    steady = classes[2:]
    pairs = len(steady) - lag
    same = sum(steady[i] == steady[i + lag] for i in range(pairs))
    likely = sum((count / len(steady)) ** 2 for count in Counter(steady).values())
    return sum(comb(pairs, k) * likely**k * (1 - likely) ** (pairs - k) for k in range(same, pairs + 1))


def _is_subsequence(short: Sequence, long: Sequence) -> bool:
    rest = iter(memoryview(long).cast("Q"))
    return all(any(item == other for other in rest) for item in memoryview(short).cast("Q"))
