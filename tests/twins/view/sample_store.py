"""The store of samples as a dict of cells, one number after another; the same answers, slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST, MOST, OCTAVE = 8192, 32767, 512

Sample = tuple[int, int, float, float]  # rank, step, own time, duration


def code_of(seconds: float) -> int:
    return min(max(round(math.log2(seconds / 1e-6) * OCTAVE) + LEAST, LEAST), MOST) if seconds > 0 else 0


def colour_of(difference: int) -> int:
    return min(max((difference + 8) // 16, -127), 127) + 128


@dataclass
class Column:
    incarnation: int
    cells: dict[int, int] = field(default_factory=dict[int, int])
    count: int = 0
    iteration_s: float = 0.0


class DictStore:
    """`SampleStore` with its columns as dicts."""

    def __init__(self, most_columns: int) -> None:
        self.most, self.stride = most_columns, 1
        self.columns: dict[int, Column] = {}
        self.low = self.high = 0
        self.usual: dict[int, int] = {}
        self.usual_at = 0

    def take(self, samples: Sequence[Sample], incarnation: int) -> None:
        samples = [one for one in samples if one[0] >= 0 and one[1] >= 0 and one[2] >= 0 and one[3] > 0]
        if not samples:
            return
        steps = [step for _, step, _, _ in samples]
        while True:
            low, high = min(steps) // self.stride, max(steps) // self.stride
            if self.columns:
                low, high = min(low, self.low), max(high, self.high)
            if high - low < self.most:
                break
            self.halve()
        self.low, self.high = low, high
        for number in sorted({step // self.stride for step in steps}):
            self.fill(number, [one for one in samples if one[1] // self.stride == number], incarnation)
        if self.high - self.low + 1 >= 2 * self.usual_at:
            self.take_usual()

    def fill(self, number: int, samples: list[Sample], incarnation: int) -> None:
        column = self.columns.get(number)
        if column is not None and incarnation < column.incarnation:
            return
        if column is None or incarnation > column.incarnation:
            column = self.columns[number] = Column(incarnation)
        for rank, _, own_s, _ in samples:
            column.cells[rank] = max(column.cells.get(rank, 0), code_of(own_s))
        durations = sorted(one[3] for one in samples)
        middle = len(durations) // 2
        median = durations[middle] if len(durations) % 2 else (durations[middle - 1] + durations[middle]) / 2
        column.count += len(samples)
        column.iteration_s += median * len(samples)

    def halve(self) -> None:
        self.stride *= 2
        merged: dict[int, Column] = {}
        for number, column in sorted(self.columns.items()):
            left = merged.get(number // 2)
            if left is None:
                merged[number // 2] = column
            elif column.incarnation >= left.incarnation:
                for rank, code in column.cells.items():
                    left.cells[rank] = max(left.cells.get(rank, 0), code)
                left.incarnation = column.incarnation
                left.count += column.count
                left.iteration_s += column.iteration_s
        self.columns = merged
        self.low, self.high = self.low // 2, self.high // 2
        self.usual_at = 0

    def take_usual(self) -> None:
        self.usual_at = self.high - self.low + 1
        over = sorted(self.columns)[:-1] or sorted(self.columns)
        count = min(16, len(over))
        places = sorted({int(place * (len(over) - 1) / max(count - 1, 1)) for place in range(count)})
        codes: dict[int, list[int]] = {}
        for place in places:
            for rank, code in self.columns[over[place]].cells.items():
                if code:
                    codes.setdefault(rank, []).append(code)
        self.usual = {rank: sorted(found)[(len(found) - 1) // 4] for rank, found in codes.items()}

    def colour(self, ranks: Sequence[int], column: int, against: str) -> int:
        """The colour of a cell for some ranks; ``column``: counted from the oldest."""
        found = self.columns.get(self.low + column)
        cells = {rank: code for rank, code in (found.cells if found else {}).items() if code}
        here = [rank for rank in ranks if rank in cells]
        if not here:
            return 0
        known = sorted(self.usual.values())
        fallback = known[(len(known) - 1) // 2] if known else 0
        peers = sorted(cells.values())[(len(cells) - 1) // 2]
        base = {rank: peers if against == "peers" else self.usual.get(rank, fallback) for rank in here}
        return colour_of(max(cells[rank] - base[rank] for rank in here))
