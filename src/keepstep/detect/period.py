"""The period of a sequence of communication calls: how many calls make one iteration.

Symbols are compared for equality only. Autocorrelation of call numbers (GREYHOUND section 4.2) gives calls a
distance that they do not have, needs some twenty iterations and is undefined on a constant sequence. Here the
distances between occurrences of a few pairs of neighbouring symbols, rare and common, are the candidates,
each checked against the recent suffix. Where optimizer steps are known, the calls between them are the
iterations and only need to be alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_LOOK_BACK = 1 << 15
_REPEATS = 3
_LEAST_SYMBOLS = 12
_CANDIDATES_PER_PAIR = 256
_MISMATCH_ALLOWED = 0.1
_MISMATCH_LOCAL = 0.2
_SURE = 0.85
_SEGMENTS = 64


@dataclass(frozen=True, slots=True)
class Period:
    """``length`` symbols make one iteration, from index ``start`` of the sequence to its end.

    ``confidence`` in [0, 1]: the share of symbols (with markers: of iterations) that agree with the one
    before, less what few repetitions leave open.
    """

    length: int
    start: int
    confidence: float


def find_period(symbols: Sequence[Hashable], markers: Sequence[int] | None = None) -> Period | None:
    """Find the smallest period of the end of ``symbols``; None when there is none or it is not sure.

    ``symbols``: one (operation, group, bytes) or any other hashable per call, oldest first. At least three
    repetitions and twelve symbols are needed; the period may begin after a prefix that is different
    (warm-up), and a few records may be wrong. Only the last 32,768 symbols are searched, so an agent may call
    this now and then on what it holds.

    ``markers``: sorted indices into ``symbols`` before which an optimizer step happened. The period is then
    that of whole steps (gradient accumulation repeats itself within one), and intervals of another content
    (evaluation, checkpoint) do not disturb it as long as most intervals are alike. Raises ValueError for
    markers that are not sorted or out of range.
    """
    if markers is not None:
        return _between_markers(symbols, markers)
    numbers: dict[Hashable, int] = {}
    coded = np.fromiter(
        (numbers.setdefault(symbol, len(numbers)) for symbol in symbols), np.int64, len(symbols)
    )
    if len(coded) < _LEAST_SYMBOLS:
        return None
    recent = coded[-_LOOK_BACK:]
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
    start = len(coded) - best.covered
    if best.covered == len(recent) < len(coded):
        whole = _fit(coded, best.length)
        start = len(coded) - whole.covered if whole is not None else start
    return Period(best.length, start, confidence)


@dataclass(frozen=True, slots=True)
class _Fit:
    length: int
    covered: int
    errors: int

    @property
    def rate(self) -> float:
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
    """Distances from the last occurrences of some pairs to the ones before, shortest first.

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
    # The suffix of the largest sum, every agreement worth a fifth of what an error costs less.
    gains = np.cumsum((_MISMATCH_LOCAL - differs)[::-1])
    taken = int(np.argmax(gains)) + 1
    covered = taken + length
    if gains[taken - 1] <= 0 or covered < max(_REPEATS * length, _LEAST_SYMBOLS):
        return None
    return _Fit(length, covered, int(differs[len(differs) - taken :].sum()))


def _hides_a_longer_one(coded: NDArray[np.int64], fit: _Fit) -> bool:
    """Whether some symbol occurs almost only where the period fails, and does so regularly.

    That is the end of a step whose micro-batches were taken for the iteration; wrong records come at random.
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


def _between_markers(symbols: Sequence[Hashable], markers: Sequence[int]) -> Period | None:
    if any(later < earlier for earlier, later in pairwise(markers)) or (
        len(markers) and (markers[0] < 0 or markers[-1] > len(symbols))
    ):
        raise ValueError(f"markers must be sorted indices from 0 to {len(symbols)}, the number of symbols")
    edges = list(markers[-_SEGMENTS - 1 :])
    segments = [tuple(symbols[begin:end]) for begin, end in pairwise(edges) if end > begin]
    if len(segments) < _REPEATS:
        return None
    content, alike = Counter(segments).most_common(1)[0]
    length = len(content)
    if alike < _REPEATS or 2 * alike < len(segments):
        # Sizes may vary from step to step (experts): the number of calls alone must then be all but constant.
        length, alike = Counter(map(len, segments)).most_common(1)[0]
        if alike < _REPEATS or alike < 0.9 * len(segments):
            return None
    start = next(begin for begin, end in pairwise(edges) if end - begin == length)
    return Period(length, start, alike / len(segments) * (1 - 0.5 / alike))
