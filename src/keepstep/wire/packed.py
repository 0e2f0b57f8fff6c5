"""Iterations to the columns of a message and back. Apart from the messages: numpy is not in a controller's start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keepstep.core.iteration_table import ROW, STREAM, IterationTable, table_of
from keepstep.core.summary import IterationSummary
from keepstep.wire.messages import PackedIterations


def pack(summaries: Sequence[IterationSummary]) -> PackedIterations:
    """The summaries as a message's columns, little-endian."""
    table = table_of(summaries)
    _, streams = table.flat()
    return PackedIterations(table.rows.tobytes(), streams.tobytes(), tuple(table.names[:-1]))


def unpack(parts: Sequence[PackedIterations]) -> IterationTable:
    """All parts as one table. What does not fit together is left out, part by part: its sender is broken."""
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
