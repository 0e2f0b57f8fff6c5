"""Is the node short of memory already, or the control group that the job is in?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from keepstep.core.control_groups import PROC, ROOT
from keepstep.core.node_memory import bounds
from keepstep.launch.node.checks import Found, Subject

_LEAST_SHARE = 0.03
_MOST_STALLED = 20.0  # per cent of the last 10 s in which every process waited for memory


def look(subject: Subject, proc: Path = PROC, root: Path = ROOT) -> Iterator[Found]:
    """Find whether the node, or the control group around the job, has too little memory left."""
    for bound in bounds(proc, root):
        if bound.available_bytes >= _LEAST_SHARE * bound.total_bytes:
            continue
        told = f"{bound.available_bytes >> 20} of {bound.total_bytes >> 20} MiB are available"
        if bound.group is None:
            yield Found(f"node {subject.node}: {told}; end what else runs there")
        else:
            yield Found(
                f"node {subject.node}: {told} in control group {bound.group}; end what else runs in it, "
                "or give the job a higher memory limit"
            )
        return
    pressure = proc / "pressure" / "memory"
    stalled = re.search(r"full avg10=([\d.]+)", pressure.read_text()) if pressure.exists() else None
    if stalled and float(stalled[1]) >= _MOST_STALLED:
        yield Found(
            f"node {subject.node}: everything waited for memory for {stalled[1]} % of the last 10 s; "
            "end what else runs there, or give the job less"
        )
