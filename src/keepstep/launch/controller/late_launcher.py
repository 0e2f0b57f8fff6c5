"""A launcher that comes when its job has ended: the folder of the run tells, or it would wait minutes for a controller.

A spare of Slurm's may begin when a short job is over already.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.report.ended_run import End, end_of

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link

_LOOK_S = 0.5
_PATIENCE_S = 60.0


async def ended_before(folder: Path, first: End | None, link: Link, *, is_of_this_job: bool) -> End:
    """Wait until it is clear that the run in ``folder`` has ended and no controller will answer; returns its end.

    An end that was not there when this launcher began counts at once. One that was may be that of an earlier run, which
    the first node moves aside when it begins: it counts after a minute, and only where ``is_of_this_job``.

    Args:
        folder: the run's folder.
        first: the end that stood there when this launcher began.
        link: the connection to the controller.
        is_of_this_job: whether the folder belongs to this start of this scheduler's job alone.
    """
    looks = 0
    while True:
        await asyncio.sleep(_LOOK_S)
        end = None if link.connected.is_set() else end_of(folder)
        if end is not None and end != first:
            return end
        looks = looks + 1 if end is not None and is_of_this_job else 0
        if end is not None and looks * _LOOK_S >= _PATIENCE_S:
            return end
