"""Pictures of ranks by steps: the order of their rows, the codes of their colours, and how columns are drawn.

Two scales, both logarithmic, so that a ratio of times is a difference of codes:

- an own time is a whole number from 8192 (a microsecond, or less) to 32767, with 512 to an octave: 0.07 % at most are
  lost. 0: no sample.
- a colour is a whole number from 1 to 255, with 32 to an octave: ``2 ** ((code - 128) / 32)`` is the ratio of the own
  time to the usual one, within 1.1 %. 128: as usual; 160: twice; 255: 15.7 times, or more; 1: a sixteenth, or less.
  0: no sample.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from keepstep.core.layout import ParallelLayout

Against = Literal["own", "peers"]
"""What a rank's own time is compared with: its own usual one, or the median of its peers in the same steps."""

Codes = npt.NDArray[np.int16]
Ranks = npt.NDArray[np.intp]

OCTAVE = 512  # codes of own times to a doubling
LEAST, MOST = 8192, 32767  # codes of own times
AS_USUAL = 128  # code of the colour of a ratio of 1
_COLOUR_OCTAVE = 32
_SHIFT = 4  # bits by which own times are finer than colours
_LEAST_S = 1e-6
_NO_SAMPLE = -LEAST  # a difference of codes as low as this one comes from code 0
_PADDING = -32768
# Ranks whose median is taken: of more peers evenly spaced ones, so many in all, but so many of each group.
_MOST_COUNTED, _LEAST_COUNTED = 8192, 127

assert OCTAVE >> _SHIFT == _COLOUR_OCTAVE


def encoded(seconds: npt.NDArray[np.floating]) -> Codes:
    """Codes of own times. 0 for what is no time: not above 0, or no number."""
    is_time = seconds > 0
    octaves = np.log2(np.where(is_time, seconds, 1.0) / np.float32(_LEAST_S))
    codes = np.minimum(np.maximum(np.rint(octaves * OCTAVE) + LEAST, LEAST), MOST)
    return np.where(is_time, codes, 0).astype(np.int16)


def decoded(codes: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """Own times in seconds; NaN for 0."""
    seconds = _LEAST_S * np.exp2((codes.astype(np.float32) - LEAST) / OCTAVE)
    return np.where(codes > 0, seconds, np.nan).astype(np.float32)


def ratios(colours: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The ratios that the codes of colours stand for; NaN for 0."""
    exponents = (colours.astype(np.float32) - AS_USUAL) / _COLOUR_OCTAVE
    return np.where(colours > 0, np.exp2(exponents), np.nan).astype(np.float32)


def colours_of(differences: Codes) -> npt.NDArray[np.uint8]:
    """Codes of colours of differences between the codes of two times; 0 where there was no sample."""
    levels = (differences + np.int16(8)) >> _SHIFT
    colours = np.minimum(np.maximum(levels, np.int16(1 - AS_USUAL)), np.int16(AS_USUAL - 1)) + AS_USUAL
    return np.where(differences > _NO_SAMPLE, colours, 0).astype(np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class RowOrder:
    """Which rank is in which row, and who are whose peers. Compared and hashed by identity.

    Attributes:
        ranks: by row.
        peers: by row, the number of the rank's group of peers, from 0 and never less than in the row before.
        counted: shape (groups, rows), the rows whose medians stand for the groups.
        is_plain: whether ranks are in the order of their numbers.
    """

    ranks: Ranks
    peers: npt.NDArray[np.intp]
    counted: npt.NDArray[np.intp]
    is_plain: bool

    def __len__(self) -> int:
        return len(self.ranks)


@functools.lru_cache(maxsize=8)
def row_order(world_size: int, layout: ParallelLayout | None = None) -> RowOrder:
    """Rows by pipeline stage, then replica, then tensor-parallel rank. Peers are the ranks of one stage.

    Ranks in the order of their numbers, all of them peers, where no layout is known or it is of another world size.
    """
    plain = np.arange(world_size, dtype=np.intp)
    if layout is None or layout.world_size != world_size:
        return RowOrder(plain, np.zeros(world_size, np.intp), _counted(world_size, 1), True)
    at = layout.all_coordinates()
    rows = np.lexsort([at[name] for name in ("tp", "cp", "ep", "dp", "pp")]).astype(np.intp)
    peers = at["pp"][rows].astype(np.intp)
    return RowOrder(rows, peers, _counted(world_size, layout.pp), bool((rows == plain).all()))


def _counted(rows: int, groups: int) -> npt.NDArray[np.intp]:
    """Some rows of each group, evenly spaced; the groups are one after the other, all of one size."""
    size = rows // groups
    count = min(size, max(_MOST_COUNTED // groups, _LEAST_COUNTED))
    places = np.linspace(0, max(size - 1, 0), count).astype(np.intp)
    return size * np.arange(groups, dtype=np.intp)[:, None] + places


@dataclass(frozen=True, slots=True)
class Tile:
    """A picture. A row stands for one or more ranks and shows the slowest of them.

    Attributes:
        colours: shape (rows, columns), codes of colours.
        row_starts: for each row its first place in ``order.ranks``; one more at the end.
        columns: for each column the number of its first one in the store, counted from the oldest.
        first_steps: for each column its first step.
        steps: how many steps a column stands for.
        incarnations: for each column the newest incarnation that it has samples of.
        order: the order of the rows.
        version: of the store, as `SampleStore.changed_since` takes it.
    """

    colours: npt.NDArray[np.uint8]
    row_starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    first_steps: npt.NDArray[np.int64]
    steps: int
    incarnations: npt.NDArray[np.int64]
    order: RowOrder
    version: int

    def ranks_of(self, row: int) -> Ranks:
        """The ranks that a row stands for."""
        return self.order.ranks[self.row_starts[row] : self.row_starts[row + 1]]


class RowView:
    """Draws columns, whose codes are in the order of the rows: those from ``first`` up to ``last``, as ``rows`` rows.

    Keeps a buffer, so that drawing allocates nothing of the job's size.
    """

    def __init__(self, order: RowOrder, first: int, last: int, most_rows: int) -> None:
        self.order, self.first, self.last = order, first, last
        count = last - first
        self._block = max(-(-count // max(most_rows, 1)), 1)  # ranks to a row
        self.rows = -(-count // self._block)
        self.row_starts = np.minimum(first + self._block * np.arange(self.rows + 1, dtype=np.int64), last)
        self._peers = np.bincount(order.peers[first:last], minlength=len(order.counted))  # rows of each group
        self._padded: Codes = np.full(self.rows * self._block, _PADDING, np.int16)

    def draw(self, codes: Codes, usual: Codes) -> npt.NDArray[np.uint8]:
        """One column against ``usual`` codes, which are in the order of the rows as well."""
        return self._reduced(codes[self.first : self.last], usual[self.first : self.last])

    def draw_against_peers(self, codes: Codes, medians: Codes) -> npt.NDArray[np.uint8]:
        """One column against the medians of the groups of peers."""
        base = medians[0] if len(medians) == 1 else np.repeat(medians, self._peers)
        return self._reduced(codes[self.first : self.last], base)

    def _reduced(self, here: Codes, base: Codes | np.int16) -> npt.NDArray[np.uint8]:
        np.subtract(here, base, out=self._padded[: len(here)])
        blocks: Codes = np.reshape(self._padded, (self.rows, self._block))
        if self._block > 16:
            return colours_of(blocks.max(axis=1))
        slowest: Codes = np.array(blocks[:, 0])
        for place in range(1, self._block):  # faster than many short rows
            np.maximum(slowest, blocks[:, place], out=slowest)
        return colours_of(slowest)


def medians_of(codes: Codes, order: RowOrder) -> Codes:
    """The lower median of each group of peers, of those with a sample; of all groups where one has none.

    ``codes`` are in the order of the rows.
    """
    found: Codes = codes[order.counted]
    found.sort(axis=1)  # those without a sample first
    count = np.count_nonzero(found, axis=1)
    width = len(found[0])
    place = width - count + np.maximum(count - 1, 0) // 2
    medians = found[np.arange(len(found)), np.minimum(place, width - 1)]
    every = np.sort(medians[count > 0])
    return np.where(count > 0, medians, every[(len(every) - 1) // 2] if len(every) else LEAST).astype(
        np.int16
    )
