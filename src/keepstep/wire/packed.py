"""Iterations to the columns of a message and back. Apart from the messages: numpy is not in a controller's start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepstep.core.iteration_table import ROW, STREAM, IterationTable, table_of
from keepstep.core.summary import IterationSummary
from keepstep.wire.messages import PackedIterations


def pack(summaries: Sequence[IterationSummary]) -> PackedIterations:
    """The summaries as a message's columns."""
    table = table_of(summaries)
    return PackedIterations(table.rows.tobytes(), table.streams.tobytes(), table.names)


def unpack(parts: Sequence[PackedIterations]) -> IterationTable:
    """All parts as one table. What does not fit together is left out, part by part: its sender is broken."""
    good = [part for part in parts if _fits(part)]
    rows = np.frombuffer(b"".join(part.rows for part in good), ROW)
    streams = np.frombuffer(b"".join(part.streams for part in good), STREAM).copy()
    before = np.cumsum([0, *(len(part.names) for part in good)])
    counts = [len(part.streams) // STREAM.itemsize for part in good]
    streams["group"] += np.repeat(before[:-1], counts).astype(np.int32)
    return IterationTable.of(rows, streams, [name for part in good for name in part.names])


def _fits(part: PackedIterations) -> bool:
    if len(part.rows) % ROW.itemsize or len(part.streams) % STREAM.itemsize:
        return False
    counts = np.frombuffer(part.rows, ROW)["streams"]
    groups = np.frombuffer(part.streams, STREAM)["group"]
    return (
        bool((counts >= 0).all())
        and int(counts.sum()) == len(groups)
        and (not len(groups) or (int(groups.min()) >= 0 and int(groups.max()) < len(part.names)))
    )
