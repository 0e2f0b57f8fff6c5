"""What agents answered about iterations, as one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keepstep.core.summary import IterationSummary
from keepstep.wire.messages import Profile


def iterations_of(answers: Sequence[Profile]) -> Sequence[IterationSummary]:
    """All iterations that make sense; a table where they came packed."""
    rows = [row for answer in answers for row in answer.iterations if _is_sane(row)]
    packed = [answer.packed for answer in answers if answer.packed is not None]
    if not packed:
        return rows
    import numpy as np  # not in the controller's start

    from keepstep.wire.packed import unpack

    table = unpack(packed)
    duration, own = table.column("duration_s"), table.column("self_s")
    sane = np.isfinite(duration) & np.isfinite(own) & (duration >= 0)
    table = table if sane.all() else table.where(sane)
    return [*rows, *table] if rows else table


def _is_sane(row: IterationSummary) -> bool:
    return math.isfinite(row.duration_s) and math.isfinite(row.self_s) and row.duration_s >= 0
