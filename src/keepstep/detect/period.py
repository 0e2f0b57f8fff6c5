"""The period of a sequence of communication calls: how many calls make one iteration.

Symbols are compared for equality only. Autocorrelation of call numbers (GREYHOUND section 4.2) gives calls a
distance that they do not have, needs some twenty iterations and is undefined on a constant sequence. Here the
distances between occurrences of a few pairs of neighbouring symbols, rare and common, are the candidates,
each checked against the recent suffix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LOOK_BACK = 1 << 15  # symbols that are searched
_REPEATS = 3  # repetitions that are needed
_LEAST_SYMBOLS = 12
_CANDIDATES_PER_PAIR = 256
_MISMATCH_ALLOWED = 0.1  # share of symbols that differ from those one period before, in all of the suffix
_MISMATCH_LOCAL = 0.2  # share of symbols that differ so in the last two repetitions
_SURE = 0.85  # confidence from which a period with mismatches is accepted


def find_period(symbols: Sequence[Hashable]) -> int | None:
    """Find the smallest period of the end of ``symbols``; None when there is none or it is not sure.

    ``symbols``: one (operation, group, bytes) or any other hashable per call, oldest first. At least three
    repetitions and twelve symbols are needed; the period may begin after a prefix that is different
    (warm-up), and a few records may be wrong. Only the last 32,768 symbols are searched, so an agent may call
    this now and then on what it holds.
    """
    if len(symbols) < _LEAST_SYMBOLS:
        return None
    numbers: dict[Hashable, int] = {}
    coded = (numbers.setdefault(symbol, len(numbers)) for symbol in symbols)
    recent = np.fromiter(coded, np.int64, len(symbols))[-_LOOK_BACK:]
    best: _Fit | None = None
    for length in _candidates(recent, len(numbers)):
        if best is not None and best.errors == 0 and best.covered == len(recent):
            break
        fit = _fit(recent, length)
        if fit is not None and (best is None or fit.explains_more_than(best)):
            best = fit
    # A rhythm that has just begun may be a few micro-batches: it has to fill some of what was seen.
    if best is None or best.covered < min(len(recent) // 8, 1024) or _hides_a_longer_one(recent, best):
        return None
    confidence = (1 - best.rate) * (1 - 0.5 * best.length / best.covered)
    if best.rate > _MISMATCH_ALLOWED or (best.errors and confidence < _SURE):
        return None
    return best.length


@dataclass(frozen=True, slots=True)
class _Fit:
    """How well a period fits the end of the sequence."""

    length: int
    covered: int  # symbols in the suffix that the period explains
    errors: int  # symbols of the suffix that differ from those one period before

    @property
    def rate(self) -> float:
        """The share of errors among the symbols that were compared."""
        return self.errors / (self.covered - self.length)

    def explains_more_than(self, shorter: _Fit) -> bool:
        """Whether this longer period is worth it: a multiple of the true one has the same share of errors, not half."""
        if self.covered >= 1.5 * shorter.covered:
            return self.rate <= max(shorter.rate, _MISMATCH_ALLOWED)
        return (
            self.covered >= 0.9 * shorter.covered
            and shorter.errors - self.errors >= 3
            and self.rate < 0.5 * shorter.rate
        )


def _candidates(coded: NDArray[np.int64], alphabet: int) -> list[int]:
    """Possible periods, shortest first: distances between occurrences of some pairs of neighbouring symbols.

    The true period is among the distances of every pair that occurs in it; several pairs from rare to common
    are taken because the rarest may be there by mistake.
    """
    pairs = coded[:-1] * alphabet + coded[1:]
    half = len(pairs) // 2
    kinds, counts = np.unique(pairs[half:], return_counts=True)
    often = counts >= 2
    kinds, counts = kinds[often], counts[often]
    if not len(kinds):
        return []
    order = np.argsort(counts, kind="stable")
    ladder = {min(len(order) - 1, int(np.searchsorted(counts[order], 1 << step))) for step in range(1, 16)}
    found: set[int] = set()
    for place in sorted(ladder | set(range(min(4, len(order))))):
        where = np.flatnonzero(pairs == kinds[order[place]])
        for end in where[-3:]:
            distances = end - where[where < end][-_CANDIDATES_PER_PAIR:]
            found.update(distances.tolist())
    return sorted(length for length in found if length * _REPEATS <= len(coded))


def _fit(coded: NDArray[np.int64], length: int) -> _Fit | None:
    """The longest suffix in which symbols equal those ``length`` before, apart from scattered errors."""
    differs = coded[length:] != coded[:-length]
    tail = max(2 * length, _LEAST_SYMBOLS - length)
    if differs[-tail:].mean() > _MISMATCH_LOCAL:
        return None
    # The suffix with the largest sum is taken: an agreement gains 0.2, an error costs 0.8.
    gains = np.cumsum((_MISMATCH_LOCAL - differs)[::-1])
    taken = int(np.argmax(gains)) + 1
    covered = taken + length
    if gains[taken - 1] <= 0 or covered < max(_REPEATS * length, _LEAST_SYMBOLS):
        return None
    return _Fit(length, covered, int(differs[len(differs) - taken :].sum()))


def _hides_a_longer_one(coded: NDArray[np.int64], fit: _Fit) -> bool:
    """Whether some symbol occurs almost only where the period fails, and does so regularly.

    Such a symbol is the end of a step whose micro-batches were taken for the iteration; wrong records come at random.
    """
    if fit.errors < _REPEATS:
        return False
    suffix = coded[-fit.covered :]
    differs = suffix[fit.length :] != suffix[: -fit.length]
    failing = np.zeros(len(suffix), bool)
    failing[fit.length :] |= differs
    failing[: -fit.length] |= differs
    for symbol in np.unique(suffix[failing]):
        where = np.flatnonzero(suffix == symbol)
        gaps = np.diff(where)
        gaps = gaps[gaps > fit.length]
        if len(gaps) >= 2 and failing[where].mean() >= 0.8 and gaps.std() < 0.25 * gaps.mean():
            return True
    return False
