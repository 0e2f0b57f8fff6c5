"""Is the node short of memory already?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from keepstep.launch.checks import Found, Subject

_LEAST_SHARE = 0.03
_MOST_STALLED = 20.0  # per cent of the last ten seconds in which all that could run waited for memory


def look(subject: Subject, proc: Path = Path("/proc")) -> Iterator[Found]:
    """One finding at most."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE))
    total, available = int(sizes["MemTotal"]), int(sizes["MemAvailable"])
    if available < _LEAST_SHARE * total:
        told = f"{available >> 10} of {total >> 10} MiB are available"
        yield Found(f"node {subject.node}: {told}; end what else runs there")
        return
    pressure = proc / "pressure" / "memory"
    stalled = re.search(r"full avg10=([\d.]+)", pressure.read_text()) if pressure.exists() else None
    if stalled and float(stalled[1]) >= _MOST_STALLED:
        yield Found(
            f"node {subject.node}: everything waited for memory for {stalled[1]} % of the last 10 s; "
            "end what else runs there, or give the job less"
        )
