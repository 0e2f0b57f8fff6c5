"""One look at a run, as a screen of ``keepstep top`` is made of."""

from __future__ import annotations

import math

from keepstep.view.run_source import RunSource
from keepstep.view.tiles import Ranks, Tile, ratios
from keepstep.view.top_screen import Heat, Look
from keepstep.view.words import answer

_HEAT_ROWS, _HEAT_COLUMNS = 8, 192


def look_at(source: RunSource, run: str) -> Look:
    """Refresh the source and take what is shown. ``run``: how commands are to name the run."""
    snapshot = source.refresh()
    series = source.samples.series()
    pace_s = [float(value) for value in series.iteration_s]
    known = [place for place, value in enumerate(pace_s) if not math.isnan(value)]
    tile = source.samples.tile(most_rows=_HEAT_ROWS, most_columns=_HEAT_COLUMNS)
    return Look(
        snapshot,
        answer(snapshot, run),
        pace_s,
        float(series.lost[known[-1]]) if known else None,
        float(series.waiting[known[-1]]) if known else None,
        source.samples.usual_s(),
        _heat(tile) if tile.colours.size else None,
    )


def _heat(tile: Tile) -> Heat:
    labels = [_named(tile.ranks_of(row)) for row in range(len(tile.colours))]
    first, last = int(tile.first_steps[0]), int(tile.first_steps[-1]) + tile.steps - 1
    return Heat(tuple(labels), ratios(tile.colours), first, last)


def _named(ranks: Ranks) -> str:
    """The ranks of a row, without going through tens of thousands of them."""
    first, last = int(ranks[0]), int(ranks[-1])
    if len(ranks) == 1:
        return str(first)
    return f"{first}-{last}" if last - first == len(ranks) - 1 else f"{first}, … {last}"
