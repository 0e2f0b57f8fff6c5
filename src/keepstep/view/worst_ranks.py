"""Which ranks of a job are looked at first: those to blame, dead, behind, waiting for too long, slower than usual."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keepstep.view.run_snapshot import RankTable

Floats = npt.NDArray[np.float64]


def own_time_ratios(table: RankTable, usual_s: npt.NDArray[np.float32] | None) -> Floats:
    """Own time over the usual one (``usual_s``, by rank) for each row of the table; NaN where it is not known."""
    ratios: Floats = np.full(len(table), np.nan)
    if usual_s is None or not len(usual_s):
        return ratios
    known = (table.rank >= 0) & (table.rank < len(usual_s)) & (table.self_s > 0)
    rows = np.flatnonzero(known)
    usual = usual_s[table.rank[rows]]
    rows, usual = rows[usual > 0], usual[usual > 0]
    ratios[rows] = table.self_s[rows] / usual
    return ratios


def worst_ranks(
    table: RankTable, ratios: Floats, blamed: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """Rows of the table, the worst first, at most so many. ``ratios``: as `own_time_ratios`; ``blamed``: ranks."""
    weight: Floats = np.where(np.isin(table.rank, blamed), 4e6, 0.0)
    weight += 2e6 * ~table.is_alive
    weight += 1e6 * (table.step < table.step.max())
    weight += 10 * _bounded(table.overdue_s, 1e4)
    weight += _bounded(np.where(np.isnan(ratios), 1.0, ratios), 1e3)
    weight += 1e-6 * _bounded(table.self_s, 1e3)  # of ranks that are alike otherwise
    # Of very many ranks the rest is left out before the worst are sorted.
    chosen = np.arange(len(weight)) if len(weight) <= most else np.argpartition(-weight, most)[:most]
    return chosen[np.lexsort((table.rank[chosen], -weight[chosen]))]


def _bounded(values: npt.NDArray[np.floating], most: float) -> Floats:
    """The values between 0 and ``most``; 0 for what is no number."""
    return np.minimum(np.fmax(values, 0.0), most).astype(np.float64)
