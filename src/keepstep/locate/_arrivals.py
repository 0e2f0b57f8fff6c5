"""Who arrives last at the collectives of one rank: a check on a verdict, from waits and, where they allow, clocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import table_of
from keepstep.core.node_clocks import ClockOffsets

_MAX_PEERS = 64  # ranks of a large group, enough to compare with


def arrival_evidence(evidence: Evidence, rank: int) -> tuple[bool, list[str]]:
    """Whether the rank may arrive after its peers, and lines on that.

    Its time in its collectives is compared with its peers': who waits least has arrived last.
    """
    groups, nodes, summaries = evidence.groups, evidence.nodes, table_of(evidence.after)
    own = [
        (stream.group, stream.op)
        for summary in summaries.of_ranks([rank])
        for stream in summary.streams
        if stream.peer < 0
    ]
    streams = {key for key in own if key[0] in groups and len(groups[key[0]].members) > 1}
    if not streams:
        return True, []
    peers = {key: _sample(groups[key[0]].members, rank) for key in streams}
    busy: dict[tuple[str, int], dict[int, list[float]]] = {key: {} for key in streams}
    starts: dict[tuple[str, int], dict[int, list[float]]] = {key: {} for key in streams}
    for summary in summaries.of_ranks(set[int]().union(*peers.values())):
        for stream in summary.streams:
            key = (stream.group, stream.op)
            if stream.peer >= 0 or key not in streams or summary.rank not in peers[key] or stream.count == 0:
                continue
            busy[key].setdefault(summary.rank, []).append(stream.busy_s / stream.count)
            starts[key].setdefault(summary.rank, []).append(summary.start_s + stream.start_s)
    compared: list[tuple[float, float, tuple[str, int]]] = []
    for key in streams:
        others = [median(values) for peer, values in busy[key].items() if peer != rank]
        if others and rank in busy[key]:
            compared.append((median(busy[key][rank]), median(others), key))
    if not compared:
        return True, []
    mine, theirs, key = max(compared, key=lambda row: abs(row[1] - row[0]))
    name = f"{groups[key[0]].shown} {Op(key[1]).name}"
    text = [f"{name}: rank {rank} is in it {mine * 1e3:.1f} ms, its peers {theirs * 1e3:.1f} ms"]
    offsets = evidence.offsets_among({nodes.get(peer, "") for peer in starts[key]})
    late = _lateness(starts[key], rank, nodes, offsets)
    if late is not None:
        text.append(
            f"{name}: rank {rank} arrives {late[0] * 1e3:.1f} ms after its peers (clocks to {late[1] * 1e3:.1f} ms)"
        )
    return mine < theirs, text


def _sample(members: Sequence[int], rank: int) -> frozenset[int]:
    """The rank and some members of its group, evenly spread."""
    step = max(1, len(members) // _MAX_PEERS)
    return frozenset(members[::step]) | {rank}


def _lateness(
    starts: Mapping[int, Sequence[float]], rank: int, nodes: Mapping[int, str], offsets: ClockOffsets | None
) -> tuple[float, float] | None:
    """How much later than its peers the rank arrives, and the possible error; None if that is not certain."""
    times: dict[int, float] = {}
    bound = 0.0
    here = nodes.get(rank, "")
    rounds = min(len(values) for values in starts.values())
    for peer, values in starts.items():
        node, at_s = nodes.get(peer, ""), median(values[:rounds])
        if node != here:
            if offsets is None:
                return None
            bound = max(bound, offsets.bound_s(node, at_s))
        times[peer] = at_s if offsets is None else offsets.to_reference_s(node, at_s)
    if offsets is not None and bound > 0:
        bound += offsets.bound_s(here)
    others = [time for peer, time in times.items() if peer != rank]
    if not others or math.isinf(bound):
        return None
    late = times[rank] - median(others)
    return (late, bound) if late > bound else None
