"""The heat map as viewers ask for it: a window of rows and columns as one block of bytes, a cell in words.

A tile is 32 bytes of header and a byte for each cell, row by row. The header is eight unsigned 32-bit numbers, lowest
byte first: ``KST1``; rows, columns; first row and one after the last; first column and one after the last, of the
store; version. A byte is a code of `keepstep.view.tiles`: 0 no sample, 128 as usual, 32 to a doubling.
"""

from __future__ import annotations

import base64
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from keepstep.core.layout import ParallelLayout
from keepstep.core.ranges import fold_ranks
from keepstep.view.run_snapshot import RunSnapshot
from keepstep.view.samples import SampleStore
from keepstep.view.web.page_content import cut

Made = TypeVar("Made")

_HEADER = struct.Struct("<4s7I")
_MOST_CELLS = 512
_MOST_KEPT = 64  # tiles that are kept for the next viewer
_MOST_WHOLE = 1024  # ranks of whom a page in one file has every sample


@dataclass(frozen=True, slots=True)
class Window:
    """What a viewer looks at: rows and store columns, each from the first to one after the last."""

    mode: Literal["own", "peers"] = "own"
    row0: int = 0
    row1: int = 1 << 30
    column0: int = 0
    column1: int = 1 << 30
    most_rows: int = 256
    most_columns: int = 512


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The samples of a run as they were at one moment. ``lock`` is held by who uses the store."""

    snapshot: RunSnapshot
    store: SampleStore
    lock: threading.Lock
    version: int
    kept: OrderedDict[Window, bytes] = field(default_factory=OrderedDict[Window, bytes])

    def tile(self, window: Window) -> bytes:
        """The cells of a window; made once for all viewers who look at the same."""
        with self.lock:
            found = self.kept.get(window)
            if found is None:
                found = self.kept[window] = self._tile(window)
                while len(self.kept) > _MOST_KEPT:
                    self.kept.popitem(last=False)
        return found

    def _tile(self, window: Window) -> bytes:
        tile = self.store.tile(
            (window.row0, window.row1),
            (window.column0, window.column1),
            most_rows=min(max(window.most_rows, 1), _MOST_CELLS),
            most_columns=min(max(window.most_columns, 1), _MOST_CELLS),
            against=window.mode,
        )
        rows, columns = tile.colours.shape
        starts = tile.row_starts
        column0 = int(tile.columns[0]) if columns else 0
        column1 = min(max(window.column1, column0), len(self.store)) if columns else 0
        head = (rows, columns, int(starts[0]), int(starts[-1]), column0, column1, self.version & 0xFFFFFFFF)
        return _HEADER.pack(b"KST1", *head) + tile.colours.tobytes()

    def cell(self, window: Window) -> dict[str, Any]:
        """The worst rank among the rows of a window, in its first column."""
        with self.lock:
            rows = (window.row0, window.row1)
            found = self.store.slowest(rows, window.column0, against=window.mode)
        if found is None:
            return {"rank": None}
        rank, own_s, ratio = found
        told = {"rank": rank, "own_s": own_s, "ratio": ratio, "usual_s": own_s / ratio}
        return told | {"node": cut(_node_of(self.snapshot, rank), 60)}

    def with_store(self, make: Callable[[RunSnapshot, SampleStore], Made]) -> Made:
        """What ``make`` makes of the snapshot and the samples, which do not change meanwhile."""
        with self.lock:
            return make(self.snapshot, self.store)

    def whole(self) -> dict[str, Any]:
        """All of it for a page in one file: tiles, and every sample where there are few ranks."""
        modes: tuple[Literal["own", "peers"], ...] = ("own", "peers")
        with self.lock:
            tiles = {mode: self._tile(Window(mode, most_rows=_MOST_CELLS)) for mode in modes}
            ranks = self.store.ranks
            samples = [self.store.of_rank(rank) for rank in range(ranks)] if ranks <= _MOST_WHOLE else []
        own_s = np.nan_to_num(np.array(samples, "<f4"))
        table = self.snapshot.ranks
        nodes: list[tuple[str, str]] = []
        if table is not None and samples:
            nodes = [
                (cut(node.name, 60), fold_ranks(table.rank[table.node == node.node_rank].tolist()))
                for node in self.snapshot.nodes
            ]
        return {
            "tiles": {mode: base64.b64encode(tile).decode() for mode, tile in tiles.items()},
            "own_s": base64.b64encode(own_s.tobytes()).decode(),
            "nodes": nodes,
        }


def heat_of(
    snapshot: RunSnapshot, store: SampleStore, lock: threading.Lock, before: HeatMap | None
) -> HeatMap:
    """The heat map of a snapshot. The tiles of the one before are kept where nothing was sampled since."""
    if before is not None and before.version == store.version:
        return HeatMap(snapshot, store, lock, store.version, before.kept)
    return HeatMap(snapshot, store, lock, store.version)


def heat_section(heat: HeatMap) -> dict[str, Any]:
    """What the page has to know to ask for tiles."""
    store, snapshot = heat.store, heat.snapshot
    firsts = store.first_steps
    return {
        "rows": snapshot.world_size or store.ranks,
        "columns": len(store),
        "first_step": int(firsts[0]) if len(firsts) else 0,
        "stride": store.stride,
        "newest_step": snapshot.newest_step,
        "version": heat.version,
        "by_layout": _fitting(snapshot) is not None,
    }


def pace_section(store: SampleStore) -> dict[str, Any]:
    """Iteration time and lost share of the job by column; None where there is no sample."""
    series = store.series()
    return {
        "stride": series.steps,
        "steps": series.first_steps.tolist(),
        "iteration_s": [float(f"{v:.4g}") if v == v else None for v in series.iteration_s.tolist()],
        "lost": [round(v, 2) if v == v else None for v in series.lost.tolist()],
    }


def _fitting(snapshot: RunSnapshot) -> ParallelLayout | None:
    layout = snapshot.layout
    return layout if layout is not None and layout.world_size == snapshot.world_size else None


def _node_of(snapshot: RunSnapshot, rank: int) -> str:
    ranks = snapshot.ranks
    if ranks is None:
        return ""
    place = int(np.searchsorted(ranks.rank, rank))
    if place >= len(ranks) or int(ranks.rank[place]) != rank:
        return ""
    node = int(ranks.node[place])
    return next((one.name for one in snapshot.nodes if one.node_rank == node), f"node {node}")
