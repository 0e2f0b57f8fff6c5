"""A bounded store of own times by rank and step, which serves live and ended runs alike."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from keepstep.view.columns import Column, JobSeries, Steps
from keepstep.view.tiles import (
    LEAST,
    OCTAVE,
    Against,
    Codes,
    Ranks,
    RowOrder,
    RowView,
    Tile,
    decoded,
    encoded,
    medians_of,
    row_order,
)

MOST_RANKS = 1 << 20
_FULL_RANKS = 1 << 17  # with more ranks there are fewer columns, so that memory stays bounded
_MOST_STEP = 1 << 53
_LOOKED_AT = 16  # columns from which a rank's usual own time is taken
_MOST_MARKS = 1000  # beginnings of incarnations that are kept
_MOST_VIEWS = 16  # pictures whose columns are kept once they are drawn

Floats = npt.NDArray[np.float32]


class SampleStore:
    """Own times of all ranks over all steps so far, in at most ``most_columns`` columns (fewer beyond 131,072 ranks).

    A column stands for ``stride`` steps, from a multiple of ``stride`` on, and holds the longest own time that was
    sampled of each rank in them (`tiles` says on which scale). When the columns are full each two of them become one
    and the stride doubles, so that the whole run is kept however long it is. 131,072 ranks take 101 MB at most.

    When a job is restarted its steps go back: the first sample of a later incarnation clears its column, and samples of
    earlier ones are not taken there any more. So columns after the newest step may be of an earlier incarnation.

    A rank's usual own time is that of the fastest quarter of up to 16 columns, evenly spaced over the run: it stays
    what it was while a rank is slow for less than three quarters of the run. It is taken anew whenever the number of
    columns has doubled. A rank that was not there yet is compared with the median of the others' usual times.

    Pictures have their rows in the order that `arrange` has set, else in that of the ranks' numbers.
    """

    def __init__(self, most_columns: int = 384) -> None:
        self.stride = 1
        self.version = 0  # grows with every change
        self._order: RowOrder | None = None
        self._rows: Ranks | None = None  # the row of each rank, in columns too; None: its number
        self._most = max(most_columns, 2)
        self._columns: dict[int, Column] = {}  # by first step // stride
        self._low = self._high = 0  # first and last of them; there may be none between
        self._ranks = 0  # highest rank seen, plus 1
        self._room = 0  # ranks that each column has room for
        self._block: Codes = np.zeros(
            (0, 0), np.int16
        )  # memory of the columns, a row each; of none before its use
        self._free: list[int] = []  # its rows without a column
        self._marks: dict[int, int] = {}  # first step seen of each incarnation
        self._usual: Codes = np.zeros(0, np.int16)
        self._usual_at = 0  # how many columns there were when the usual times were taken
        self._base_version = 0  # of the last change after which all columns have to be drawn again
        self._views: OrderedDict[tuple[object, ...], _Drawn] = OrderedDict()

    def __len__(self) -> int:
        """The number of columns, those without a sample included."""
        return self._high - self._low + 1 if self._columns else 0

    @property
    def ranks(self) -> int:
        """Highest rank seen, plus 1."""
        return self._ranks

    @property
    def first_steps(self) -> Steps:
        """The first step of each column."""
        return self.stride * np.arange(self._low, self._low + len(self), dtype=np.int64)

    @property
    def marks(self) -> list[tuple[int, int]]:
        """Incarnations and the first step that was seen of each; the first incarnation may begin at a restored step."""
        return sorted(self._marks.items())

    def arrange(self, order: RowOrder) -> None:
        """Set the order of the rows, once the layout is known, and again when the world size has changed."""
        if order is self._order:
            return
        self.reserve(len(order))
        self._widen()
        self._order = order
        before = self._rows_of(np.arange(self._room, dtype=np.intp))
        rows = np.arange(self._room, dtype=np.intp)
        rows[order.ranks] = np.arange(len(order), dtype=np.intp)
        self._rows = None if order.is_plain else rows
        if (before != rows).any():
            for column in self._columns.values():
                column.codes[rows] = column.codes[before]
            if len(self._usual):
                usual = np.empty_like(self.usual(self._room))
                usual[rows] = self._usual[before]
                self._usual = usual
        self.version += 1
        self._base_version = self.version
        for column in self._columns.values():
            self.medians(column, order)

    def reserve(self, ranks: int) -> None:
        """Have room for a job of so many ranks, so that the columns need not grow with each of them."""
        self._room = max(self._room, min(ranks, MOST_RANKS))

    def take(
        self,
        ranks: npt.NDArray[np.int32],
        steps: npt.NDArray[np.int64],
        self_s: npt.NDArray[np.float32],
        iteration_s: npt.NDArray[np.float32],
        incarnation: int = 0,
        start_unix_s: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Add samples: arrays of one length, in any order, of one report of one incarnation.

        What has a rank from 2**20 on, a negative step or no duration is left out. ``start_unix_s``: when the iterations
        began, where that is known.
        """
        if start_unix_s is None:
            start_unix_s = np.full(len(ranks), math.inf)
        good = (ranks >= 0) & (ranks < MOST_RANKS) & (steps >= 0) & (steps < _MOST_STEP)
        good &= np.isfinite(iteration_s) & (iteration_s > 0) & np.isfinite(self_s) & (self_s >= 0)
        if not good.all():
            ranks, steps, self_s = ranks[good], steps[good], self_s[good]
            iteration_s, start_unix_s = iteration_s[good], start_unix_s[good]
        if not len(ranks):
            return
        self.version += 1
        self._make_room(int(ranks.max()) + 1, int(steps.min()), int(steps.max()))
        self._mark(incarnation, int(steps.min()))
        where = steps // self.stride
        low, high = int(where.min()), int(where.max())
        if low == high:
            self._fill(low, incarnation, ranks, self_s, iteration_s, start_unix_s)
        else:
            by_column = np.argsort(where, kind="stable")
            numbers, starts = np.unique(where[by_column], return_index=True)
            for number, part in zip(numbers.tolist(), np.split(by_column, starts[1:]), strict=True):
                cut = ranks[part], self_s[part], iteration_s[part], start_unix_s[part]
                self._fill(number, incarnation, *cut)
        if len(self) >= 2 * self._usual_at:
            self._take_usual()
        if self._order is not None:
            for column in self._columns.values():
                self.medians(column, self._order)  # now, not while a picture is drawn

    def tile(
        self,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        *,
        most_rows: int = 512,
        most_columns: int = 384,
        against: Against = "own",
    ) -> Tile:
        """The picture of some rows and columns, first and one after last; all where they are left out.

        Rows and columns beyond the last are left out. Neighbours share a row or column of the picture where there are
        more than ``most_rows`` or ``most_columns``.
        """
        first, last = _within(columns, len(self))
        drawn = self._drawn(rows, most_rows, against)
        numbers = list(range(self._low + first, self._low + last))
        together = max(-(-len(numbers) // max(most_columns, 1)), 1)
        colours = drawn.columns(self, numbers, against)
        if together > 1:
            starts = np.arange(0, len(numbers), together)
            colours = np.maximum.reduceat(colours, starts, axis=0)
        return self._tile(drawn, colours, numbers, together)

    def changed_since(
        self,
        version: int,
        rows: tuple[int, int] | None = None,
        *,
        most_rows: int = 512,
        against: Against = "own",
    ) -> Tile | None:
        """The columns that have changed since the picture of that version; None where all has to be drawn again.

        That is so when the stride or the usual times have changed, and each time the number of columns has doubled.
        """
        if version < self._base_version or version > self.version:
            return None
        drawn = self._drawn(rows, most_rows, against)
        numbers = sorted(number for number, column in self._columns.items() if column.version > version)
        return self._tile(drawn, drawn.columns(self, numbers, against), numbers, 1)

    def slowest(
        self, rows: tuple[int, int], column: int, *, against: Against = "own"
    ) -> tuple[int, float, float] | None:
        """The rank that a cell shows, its own time in seconds and its ratio to the usual one; None without a sample.

        ``column``: counted from the oldest.
        """
        found, order = self._columns.get(self._low + column), self._present_order()
        first, last = _within(rows, len(order))
        if found is None or column < 0 or first == last:
            return None
        codes, base = found.codes[first:last], self.usual(last)[first:last]
        if against == "peers":
            base = self.medians(found, order)[order.peers[first:last]]
        ratio = np.where(codes > 0, codes.astype(np.int32) - base, np.iinfo(np.int32).min)
        place = int(ratio.argmax())
        if not codes[place]:
            return None
        own_s = float(decoded(codes[place : place + 1])[0])
        return int(order.ranks[first + place]), own_s, 2.0 ** (int(ratio[place]) / OCTAVE)

    def of_rank(self, rank: int) -> Floats:
        """A rank's longest own time by column, in seconds; NaN where there is no sample."""
        columns = [self._columns.get(number) for number in range(self._low, self._low + len(self))]
        if not 0 <= rank < self._ranks:
            return np.full(len(columns), math.nan, np.float32)
        row = int(self._rows_of(np.array([rank]))[0])
        return decoded(np.array([0 if column is None else column.codes[row] for column in columns], np.int16))

    def usual_s(self) -> Floats:
        """The usual own time of each rank, in seconds."""
        rows = self._rows_of(np.arange(self._ranks, dtype=np.intp))
        return decoded(self.usual(self._room)[rows])

    def series(self) -> JobSeries:
        """The job's figures by column."""
        columns = [self._columns.get(number) for number in range(self._low, self._low + len(self))]

        def of(name: str) -> npt.NDArray[np.float64]:
            return np.array([getattr(one, name) if one is not None else 0.0 for one in columns], np.float64)

        count, start = of("count"), of("start_unix_s")
        with np.errstate(invalid="ignore", divide="ignore"):
            iteration_s = of("iteration_s") / count
            waiting = np.minimum(np.maximum(1 - of("own_s") / of("rank_s"), 0.0), 1.0)
            known = np.sort(iteration_s[count > 0])
            usual_s = float(known[(len(known) - 1) // 4]) if len(known) else math.nan
            lost = np.maximum(1 - usual_s / iteration_s, 0.0)
        start[(count == 0) | np.isinf(start)] = math.nan
        incarnations = of("incarnation").astype(np.int64)
        return JobSeries(self.first_steps, self.stride, iteration_s, waiting, lost, incarnations, start)

    def _fill(
        self,
        number: int,
        incarnation: int,
        ranks: npt.NDArray[np.int32],
        own_s: Floats,
        all_s: Floats,
        start_unix_s: npt.NDArray[np.float64],
    ) -> None:
        column = self._columns.get(number)
        if column is not None and incarnation < column.incarnation:
            return
        if column is not None and incarnation > column.incarnation:
            self._free.append(column.row)
            column = None
        if column is None:
            row = self._free.pop()
            self._block[row] = 0
            column = self._columns[number] = Column(row, self._block[row], incarnation)
        np.maximum.at(column.codes, self._rows_of(ranks), encoded(own_s))
        column.version = self.version
        column.count += len(ranks)
        column.iteration_s += float(np.median(all_s)) * len(ranks)
        column.rank_s += float(all_s.sum(dtype=np.float64))
        column.own_s += float(own_s.sum(dtype=np.float64))
        column.start_unix_s = min(column.start_unix_s, float(start_unix_s.min()))

    def _make_room(self, ranks: int, first_step: int, last_step: int) -> None:
        self._ranks = max(self._ranks, ranks)
        if ranks > self._room:
            self._room = min(max(ranks, self._room * 3 // 2), MOST_RANKS)
        most = self._widen()
        low, high = first_step // self.stride, last_step // self.stride
        if self._columns:
            low, high = min(low, self._low), max(high, self._high)
        while high - low + 1 > most:
            self._halve()
            low, high = low // 2, high // 2
        if self._columns and low < self._low:
            self._base_version = self.version  # columns are counted from another one
        self._low, self._high = low, high

    def _widen(self) -> int:
        """Give every column room for the ranks, and return how many columns there may be.

        Memory of the new block is taken when it is written to.
        """
        most = max(self._most * _FULL_RANKS // max(self._room, _FULL_RANKS), 2)
        if self._block.shape[1] >= self._room:
            return most
        while len(self) > most:
            self._halve()
        block: Codes = np.zeros((most, self._room), np.int16)
        for row, column in enumerate(self._columns.values()):
            block[row, : len(column.codes)] = column.codes
            column.row, column.codes = row, block[row]
        self._block, self._free = block, list(range(most - 1, len(self._columns) - 1, -1))
        if self._rows is not None:
            more = np.arange(len(self._rows), self._room, dtype=np.intp)
            self._rows = np.concatenate([self._rows, more])
        return most

    def _halve(self) -> None:
        """Make one column of each two."""
        self.stride *= 2
        columns: dict[int, Column] = {}
        for number in sorted(self._columns):
            column = self._columns.pop(number)
            known = columns.setdefault(number // 2, column)
            if known is not column:
                known.absorb(column)
                self._free.append(column.row)
            known.version = self.version
        self._columns = columns
        self._low, self._high = self._low // 2, self._high // 2
        self._usual_at = 0
        self._base_version = self.version

    def _mark(self, incarnation: int, step: int) -> None:
        self._marks[incarnation] = min(self._marks.get(incarnation, step), step)
        if len(self._marks) > _MOST_MARKS:
            del self._marks[min(self._marks)]

    def _take_usual(self) -> None:
        """Take the usual own times anew, from columns that are over."""
        self._usual_at = len(self)
        self._base_version = self.version
        over = sorted(self._columns)[:-1] or sorted(self._columns)
        places = np.unique(np.linspace(0, len(over) - 1, min(_LOOKED_AT, len(over))).astype(np.int64))
        chosen = [self._columns[over[place]].codes for place in places.tolist()]
        table: Codes = np.zeros((len(chosen), self._room), np.int16)
        for row, codes in zip(table, chosen, strict=True):
            row[: len(codes)] = codes
        table.sort(axis=0)  # those without a sample first
        known = np.count_nonzero(table, axis=0)
        place = len(chosen) - known + np.maximum(known - 1, 0) // 4
        usual = np.take_along_axis(table, np.minimum(place, len(chosen) - 1)[None], axis=0)[0]
        there = known > 0
        usual[~there] = np.sort(usual[there])[(there.sum() - 1) // 2] if there.any() else LEAST
        self._usual = usual

    def usual(self, ranks: int) -> Codes:
        """Codes of the usual own times of at least so many rows, for drawing."""
        if len(self._usual) < ranks:
            known = np.sort(self._usual)
            fallback = known[(len(known) - 1) // 2] if len(known) else LEAST
            self._usual = np.concatenate([self._usual, np.full(ranks - len(self._usual), fallback, np.int16)])
        return self._usual

    def medians(self, column: Column, order: RowOrder) -> Codes:
        """Codes of the medians of a column's groups of peers."""
        kept = column.medians
        if kept is None or kept[0] is not order or kept[1] != column.version:
            kept = column.medians = (order, column.version, medians_of(column.codes, order))
        return kept[2]

    def column(self, number: int) -> Column | None:
        """A column by its first step over the stride, for drawing."""
        return self._columns.get(number)

    def _rows_of(self, ranks: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        return ranks if self._rows is None else self._rows[ranks]

    def _present_order(self) -> RowOrder:
        return self._order or row_order(self._ranks)

    def _drawn(self, rows: tuple[int, int] | None, most_rows: int, against: Against) -> _Drawn:
        order = self._present_order()
        first, last = _within(rows, len(order))
        key = (order, first, last, most_rows, against)
        drawn = self._views.pop(key, None) or _Drawn(RowView(order, first, last, most_rows))
        self._views[key] = drawn
        while len(self._views) > _MOST_VIEWS:
            self._views.popitem(last=False)
        if drawn.base_version != self._base_version:
            drawn.base_version = self._base_version
            drawn.kept.clear()
        return drawn

    def _tile(self, drawn: _Drawn, colours: npt.NDArray[np.uint8], numbers: list[int], together: int) -> Tile:
        firsts = numbers[::together]
        columns = np.array(firsts, np.int64) - self._low
        newest = [
            max((self._incarnation(number) for number in numbers[place : place + together]), default=0)
            for place in range(0, len(numbers), together)
        ]
        return Tile(
            np.ascontiguousarray(np.transpose(colours)),
            drawn.view.row_starts,
            columns,
            self.stride * np.array(firsts, np.int64),
            self.stride * together,
            np.array(newest, np.int64),
            drawn.view.order,
            self.version,
        )

    def _incarnation(self, number: int) -> int:
        column = self._columns.get(number)
        return column.incarnation if column is not None else 0


class _Drawn:
    """Columns of one picture as they were drawn, by number, each with the version that it was drawn of."""

    def __init__(self, view: RowView) -> None:
        self.view = view
        self.kept: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        self.base_version = -1

    def columns(self, store: SampleStore, numbers: list[int], against: Against) -> npt.NDArray[np.uint8]:
        """Shape (columns, rows)."""
        found = np.zeros((len(numbers), self.view.rows), np.uint8)
        usual = store.usual(len(self.view.order))
        for place, number in enumerate(numbers):
            column = store.column(number)
            if column is None:
                continue
            version, colours = self.kept.get(number, (-1, None))
            if colours is None or version != column.version:
                if against == "own":
                    colours = self.view.draw(column.codes, usual)
                else:
                    colours = self.view.draw_against_peers(
                        column.codes, store.medians(column, self.view.order)
                    )
                self.kept[number] = column.version, colours
            found[place] = colours
        return found


def _within(span: tuple[int, int] | None, count: int) -> tuple[int, int]:
    first, last = span or (0, count)
    first = min(max(first, 0), count)
    return first, min(max(last, first), count)
