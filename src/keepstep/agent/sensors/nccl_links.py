"""Reads the tables of NCCL's network links: saves them with an incident, and finds transfers that stand still."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.sensors.processes import identify, state_of
from keepstep.core.errors import RingError
from keepstep.core.link_counters import Communicator, LinkSnapshot
from keepstep.core.own_folders import make_folder, write_whole
from keepstep.core.summary import GroupInfo, LinkState, Standstill
from keepstep.detect.link_flow import Flow, judge
from keepstep.ring.link_reader import LinkReader

_STANDS: dict[int, Standstill] = {
    Flow.STALLED: "network",
    Flow.PEER: "receiver",
    Flow.WAITING: "sender",
    Flow.GPU: "gpu",
}
_MOST_LINKS = 64  # most links of a rank that the controller is told of


def save(
    tables: Mapping[int, str],
    folder: Path,
    usual: Callable[[int, LinkSnapshot], NDArray[np.float64]] | None = None,
) -> int:
    """Write ``FOLDER/rank-00000.json`` for every table (paths by rank) that NCCL has written; return how many.

    ``process`` in the file is the state of the rank's process as in ``/proc/PID/stat``, empty if it is gone. All
    transfers of a stopped or dead process look stalled. ``usual``: the usual rates of a rank's links, for `judge`.

    Raises OSError if a file cannot be written. A table that cannot be read is left out.
    """
    saved = 0
    for rank, path in sorted(tables.items()):
        try:
            seen = LinkReader(path).snapshot()
        except RingError:
            continue
        if not seen.pid:
            continue
        make_folder(folder)
        process = identify(seen.pid)
        state = state_of(process) if process is not None else ""
        rates = None if usual is None else usual(rank, seen)
        content = json.dumps({"rank": rank, "process": state, **described(seen, rates)})
        write_whole(folder / f"rank-{rank:05d}.json", content.encode())
        saved += 1
    return saved


def standing_still(path: str, rank: int, groups: Sequence[GroupInfo]) -> tuple[LinkState, ...]:
    """The transfers of ``rank`` that stand still, longest first, summed by peer and reason.

    ``groups``: groups that the rank is in, from which the ranks of a communicator are found.

    Raises:
        RingError: the table cannot be read.
    """
    seen = LinkReader(path).snapshot()
    members = {one.index: members_of(one, rank, groups) for one in seen.communicators}
    found: dict[tuple[int, Standstill], LinkState] = {}
    for link, judged in zip(seen.links, judge(seen), strict=True):
        at, ranks = _STANDS.get(int(judged["flow"])), members.get(int(link["comm"]))
        number = int(link["peer"])
        if at is None or ranks is None or not 0 <= number < len(ranks):
            continue
        one = LinkState(ranks[number], at, max(int(judged["in_flight"]), 0), float(judged["quiet_s"]))
        known = found.get((one.peer, at))
        if known is not None:  # NCCL reaches this peer over several channels
            one = LinkState(one.peer, at, one.in_flight + known.in_flight, max(one.quiet_s, known.quiet_s))
        found[one.peer, at] = one
    return tuple(sorted(found.values(), key=lambda one: -one.quiet_s)[:_MOST_LINKS])


def members_of(communicator: Communicator, rank: int, groups: Sequence[GroupInfo]) -> tuple[int, ...] | None:
    """Global ranks in the order of a communicator's own ranks; None if several groups may be meant."""
    place, size, name = communicator.rank, communicator.size, communicator.name
    same_size = [one for one in groups if len(one.members) == size and 0 <= place < size]
    fitting = [one for one in same_size if one.members[place] == rank]
    named = [one for one in fitting if name and name in (one.name, one.desc)]
    could = {group.members for group in named or fitting}
    return next(iter(could)) if len(could) == 1 else None


def described(seen: LinkSnapshot, usual: NDArray[np.float64] | None = None) -> dict[str, Any]:
    """A snapshot of a table and its judgement, for JSON. Times are on CLOCK_MONOTONIC; unknown ones are null."""
    links: list[dict[str, Any]] = []
    rates = np.full(len(seen.links), math.nan) if usual is None else usual
    for row, judged, rate in zip(seen.links, judge(seen, usual), rates.tolist(), strict=True):
        values = {name: judged[name].item() for name in judged.dtype.names}
        figures = {name: None if math.isnan(value) else value for name, value in values.items()}
        counters = {name: row[name].item() for name in row.dtype.names}
        known = {"usual": None if math.isnan(rate) else rate, "flow": Flow(judged["flow"]).name}
        links.append(counters | figures | known)
    return {
        "taken_ns": seen.taken_ns,
        "pid": seen.pid,
        "abi": seen.abi,
        "communicators": [asdict(communicator) for communicator in seen.communicators],
        "links": links,
        "losses": asdict(seen.losses),
        "unsound": seen.unsound,
    }
