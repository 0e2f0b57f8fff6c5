"""A column of the samples: some steps of all ranks; and the job's figures by column."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepstep.view.tiles import Codes, RowOrder

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JobSeries:
    """The job's figures by column, for curves. NaN where a column has no sample.

    Attributes:
        first_steps: first step of each column.
        steps: how many steps a column stands for.
        iteration_s: duration of an iteration in seconds: the median over the ranks of each report, mean of the reports.
        waiting: share of the iterations that ranks waited, mean over ranks.
        lost: share of the iterations that was longer than the run's usual iteration, which is the fastest quarter's.
        incarnations: newest incarnation that the column has samples of.
        start_unix_s: when the first iteration of each column began.
    """

    first_steps: Steps
    steps: int
    iteration_s: npt.NDArray[np.float64]
    waiting: npt.NDArray[np.float64]
    lost: npt.NDArray[np.float64]
    incarnations: Steps
    start_unix_s: npt.NDArray[np.float64]


class Column:
    """``stride`` steps: codes of the longest own times by row, and sums for the job's series."""

    __slots__ = (
        "codes", "count", "incarnation", "iteration_s", "medians", "own_s", "rank_s", "row", "start_unix_s", "version",
    )  # fmt: skip

    def __init__(self, row: int, codes: Codes, incarnation: int) -> None:
        self.row, self.codes = row, codes  # a row of the store's block
        self.incarnation = incarnation
        self.version = 0
        self.count = 0  # samples
        self.iteration_s = 0.0  # medians of reports, each times its samples
        self.rank_s = self.own_s = 0.0  # sums over samples: iterations, and own times in them
        self.start_unix_s = math.inf
        self.medians: tuple[RowOrder, int, Codes] | None = (
            None  # the peers' medians, and of which version they are
        )

    def absorb(self, later: Column) -> None:
        """Become one with the next column, unless that has only steps which this one's incarnation has not reached."""
        if later.incarnation < self.incarnation:
            return
        np.maximum(self.codes, later.codes, out=self.codes)
        self.start_unix_s = min(self.start_unix_s, later.start_unix_s)
        self.incarnation = later.incarnation
        self.count += later.count
        self.iteration_s += later.iteration_s
        self.rank_s += later.rank_s
        self.own_s += later.own_s
