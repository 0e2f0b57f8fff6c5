"""Packs iterations into columns of bytes for a message, and reads the iterations of messages, packed or not.

numpy is imported only when something is packed or unpacked, so that a controller starts without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.core.summary import IterationSummary
from keepstep.wire.messages import PackedIterations, Profile

if TYPE_CHECKING:
    from keepstep.core.iteration_table import IterationTable


def pack(summaries: Sequence[IterationSummary]) -> PackedIterations:
    """The summaries as columns, little-endian."""
    from keepstep.core.iteration_table import table_of

    table = table_of(summaries)
    _, streams = table.flat()
    return PackedIterations(table.rows.tobytes(), streams.tobytes(), tuple(table.names[:-1]))


def unpack(parts: Sequence[PackedIterations]) -> IterationTable:
    """All parts as one table. Parts that hold no whole number of rows come from a faulty sender and are left out."""
    import numpy as np

    from keepstep.core.iteration_table import ROW, STREAM, IterationTable

    good = [
        part
        for part in parts
        if not len(part.rows) % ROW.itemsize and not len(part.streams) % STREAM.itemsize
    ]
    return IterationTable.of(
        np.frombuffer(b"".join(part.rows for part in good), ROW),
        [len(part.rows) // ROW.itemsize for part in good],
        [part.streams for part in good],
        [part.names for part in good],
    )


def iterations_of(answers: Sequence[Profile]) -> Sequence[IterationSummary]:
    """The iterations in these answers whose times are finite and not negative, as a table if any came packed."""
    rows = [row for answer in answers for row in answer.iterations if _is_sane(row)]
    packed = [answer.packed for answer in answers if answer.packed is not None]
    if not packed:
        return rows
    import numpy as np

    table = unpack(packed)
    duration, own = table.column("duration_s"), table.column("self_s")
    sane = np.isfinite(duration) & np.isfinite(own) & (duration >= 0)
    table = table if sane.all() else table.where(sane)
    return [*rows, *table] if rows else table


def _is_sane(row: IterationSummary) -> bool:
    return math.isfinite(row.duration_s) and math.isfinite(row.self_s) and row.duration_s >= 0
