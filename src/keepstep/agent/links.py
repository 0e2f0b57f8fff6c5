"""What was under way on NCCL's network links, kept with an incident."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keepstep.agent.processes import identify, state_of
from keepstep.core.errors import RingError
from keepstep.core.link_counters import LinkSnapshot
from keepstep.detect.links import Flow, judge
from keepstep.ring.links import LinkReader


def save(tables: Mapping[int, str], folder: Path) -> int:
    """Write ``FOLDER/rank-00000.json`` for every table (paths by rank) that NCCL has written; how many.

    ``process`` in it: the state as in ``/proc/PID/stat``, empty when it is gone. Of one that is stopped or dead, all
    that is under way looks stalled.

    Raises OSError when a file cannot be written. A table that cannot be read is left out.
    """
    saved = 0
    for rank, path in sorted(tables.items()):
        try:
            seen = LinkReader(path).snapshot()
        except RingError:
            continue
        if not seen.pid:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"rank-{rank:05d}.json"
        partial = target.with_suffix(".partial")
        process = identify(seen.pid)
        state = state_of(process) if process is not None else ""
        partial.write_text(json.dumps({"rank": rank, "process": state, **described(seen)}))
        partial.replace(target)
        saved += 1
    return saved


def described(seen: LinkSnapshot) -> dict[str, Any]:
    """A snapshot and its judgement as JSON has it; times on the node's CLOCK_MONOTONIC, null: not known."""
    links: list[dict[str, Any]] = []
    for row, judged in zip(seen.links, judge(seen), strict=True):
        figures = {name: _known(judged[name].item()) for name in judged.dtype.names}
        links.append(
            {name: row[name].item() for name in row.dtype.names}
            | figures
            | {"flow": Flow(judged["flow"]).name}
        )
    return {
        "taken_ns": seen.taken_ns,
        "pid": seen.pid,
        "abi": seen.abi,
        "communicators": [asdict(communicator) for communicator in seen.communicators],
        "links": links,
        "losses": asdict(seen.losses),
        "unsound": seen.unsound,
    }


def _known(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value
