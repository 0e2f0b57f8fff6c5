"""How long the transfers themselves took: after the last member arrived, in every group and between every pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from keepstep.core.events import Op
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.locate.clocks import MAX_DRIFT, ClockOffsets, Clocks

_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class Path:
    """A collective stream of a group, or (``source`` >= 0) the messages from one rank to another."""

    group: str
    op: int
    source: int = -1
    target: int = -1

    def __str__(self) -> str:
        if self.source >= 0:
            return f"rank {self.source} to rank {self.target}"
        return f"{self.group} {Op(self.op).name}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One path's transfers, healthy (its own, or those of comparable paths) and now; medians over iterations."""

    path: Path
    ranks: tuple[int, ...]
    count: float  # operations per iteration
    nbytes: float  # per operation
    before_s: float  # per operation, an upper bound
    after_s: float
    error_s: float = 0.0  # what clocks and noise may add to the difference
    of_peers: bool = False  # ``before_s`` is what comparable paths take now

    @property
    def gain_s(self) -> float:
        """What the path takes longer, seconds per iteration."""
        return (self.after_s - self.before_s) * self.count

    @property
    def ratio(self) -> float:
        """How many times longer a transfer takes."""
        return self.after_s / self.before_s if self.before_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Taken:
    """What one path's transfers take now: an upper bound per operation, medians over iterations."""

    seconds: float
    count: float  # operations per iteration
    nbytes: float  # per operation
    error_s: float  # of ``seconds``, by noise and clocks


@dataclass(frozen=True, slots=True)
class _Message:
    """Per operation means of one pair in one iteration.

    The latency is the receive's end less the send's start, on uncorrected clocks.
    """

    latency_s: float
    receiving_s: float
    count: int
    nbytes: float
    at_s: float


_Step = tuple[Path, int]


@dataclass(frozen=True, slots=True)
class Collective:
    """One path's collectives, medians over iterations; ``busy_s``: of each member, seconds per operation."""

    busy_s: Mapping[int, float]
    spread_s: float  # how far a member's worst iteration lies above its median, the largest of all members
    taken: Taken  # by the member that is in it shortest in each iteration

    @property
    def shortest_s(self) -> float:
        """The member that arrives last waits for nobody: this bounds the transfer from above."""
        return min(self.busy_s.values())

    def growth_s(self, before: Collective) -> float:
        """What a transfer takes longer since ``before``: every member sees that, a late member does not see its own."""
        return min(busy_s - before.busy_s.get(rank, 0.0) for rank, busy_s in self.busy_s.items())


def collective_transfers(
    summaries: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]
) -> dict[Path, Collective]:
    """All paths' collectives. Iterations in which a member of a group is missing say nothing about that group."""
    seen: dict[_Step, dict[int, StreamSummary]] = {}
    for summary in summaries:
        for stream in summary.streams:
            if stream.peer < 0 and stream.count > 0:
                seen.setdefault((Path(stream.group, stream.op), summary.step), {})[summary.rank] = stream
    rows: dict[Path, list[dict[int, StreamSummary]]] = {}
    for (path, _), streams in seen.items():
        info = groups.get(path.group)
        if info is not None and 2 <= len(info.members) <= len(streams):
            rows.setdefault(path, []).append(streams)
    return {path: _collective(steps) for path, steps in rows.items()}


def message_transfers(
    before: Sequence[IterationSummary],
    after: Sequence[IterationSummary],
    nodes: Mapping[int, str],
    clocks: Clocks | None,
) -> list[Transfer]:
    """Every pair's messages, before and after.

    A transfer is no longer than the receive, and no longer than from the send's start to the receive's end. Of the
    latter the *growth* is known without comparing clocks, but for their drift; so the smaller growth is the transfer's.
    """
    old, new = _messages(before), _messages(after)
    offsets = _between_ends(old.keys() & new.keys(), nodes, clocks)
    transfers: list[Transfer] = []
    for path, rows in new.items():
        if path not in old:
            continue
        healthy, now = old[path], rows
        grown, error = _latency_growth(path, healthy, now, nodes, offsets)
        if grown < 2 * error:  # clocks may drift apart by as much: less so from one iteration to the next
            last, first = max(healthy, key=lambda row: row.at_s), min(now, key=lambda row: row.at_s)
            grown, error = _latency_growth(path, [last], [first], nodes, offsets)
        receiving_before = float(np.median([row.receiving_s for row in healthy]))
        receiving_growth = float(np.median([row.receiving_s for row in now])) - receiving_before
        base = min(receiving_before, _healthy_latency(path, healthy, nodes, offsets))
        growth = min(grown, receiving_growth)
        count = float(np.median([row.count for row in now]))
        nbytes = float(np.median([row.nbytes for row in now]))
        ends = (path.source, path.target)
        transfers.append(Transfer(path, ends, count, nbytes, base, base + growth, error))
    return transfers


def messages_now(
    after: Sequence[IterationSummary], nodes: Mapping[int, str], clocks: Clocks | None
) -> dict[Path, Taken]:
    """What every pair's messages take: no longer than the receive, nor than from the send's start to its end."""
    found: dict[Path, Taken] = {}
    messages = _messages(after)
    offsets = _between_ends(messages, nodes, clocks)
    for path, rows in messages.items():
        latency, bound = _latency(path, rows, nodes, offsets)
        taken = _taken([(row.receiving_s, float(row.count), row.nbytes) for row in rows])
        if latency + bound < taken.seconds:
            taken = Taken(latency + bound, taken.count, taken.nbytes, taken.error_s + bound)
        found[path] = taken
    return found


def _between_ends(
    paths: Iterable[Path], nodes: Mapping[int, str], clocks: Clocks | None
) -> ClockOffsets | None:
    """The clocks of the nodes between which these messages go."""
    pairs = ((nodes.get(path.source, ""), nodes.get(path.target, "")) for path in paths)
    return clocks and clocks.among({node for pair in pairs if pair[0] != pair[1] for node in pair})


def _messages(summaries: Sequence[IterationSummary]) -> dict[Path, list[_Message]]:
    sends: dict[tuple[str, int, int, int], tuple[StreamSummary, float]] = {}
    receives: dict[tuple[str, int, int, int], tuple[StreamSummary, float]] = {}
    for summary in summaries:
        for stream in summary.streams:
            if stream.count == 0:
                continue
            if stream.op == Op.SEND:
                sends[stream.group, summary.rank, stream.peer, summary.step] = (stream, summary.start_s)
            elif stream.op == Op.RECV:
                receives[stream.group, stream.peer, summary.rank, summary.step] = (stream, summary.start_s)
    rows: dict[Path, list[_Message]] = {}
    for key, (receive, receiver_s) in receives.items():
        if key not in sends:
            continue
        send, sender_s = sends[key]
        if (send.count, send.first_seq) != (receive.count, receive.first_seq):
            continue
        group, source, target, _ = key
        latency = (receiver_s + receive.end_s) - (sender_s + send.start_s)
        message = _Message(
            latency, receive.busy_s / receive.count, receive.count, send.bytes / send.count, receiver_s
        )
        rows.setdefault(Path(group, int(Op.SEND), source, target), []).append(message)
    return rows


def _latency_growth(
    path: Path,
    before: Sequence[_Message],
    after: Sequence[_Message],
    nodes: Mapping[int, str],
    offsets: ClockOffsets | None,
) -> tuple[float, float]:
    """(growth, its error by clocks), in seconds."""
    then, now = (float(np.median([row.latency_s for row in rows])) for rows in (before, after))
    source, target = nodes.get(path.source, ""), nodes.get(path.target, "")
    if source == target:
        return now - then, 0.0
    elapsed = float(np.median([row.at_s for row in after]) - np.median([row.at_s for row in before]))
    drift, error = 0.0, 2 * MAX_DRIFT
    if offsets is not None and source in offsets.nodes and target in offsets.nodes:
        one, other = offsets.nodes[source], offsets.nodes[target]
        if other.drift_bound + one.drift_bound < error:
            drift, error = other.drift - one.drift, other.drift_bound + one.drift_bound
    return now - then + drift * elapsed, error * abs(elapsed)


def _healthy_latency(
    path: Path, rows: Sequence[_Message], nodes: Mapping[int, str], offsets: ClockOffsets | None
) -> float:
    """From the send's start to the receive's end, where the clocks are known better than that; else infinite."""
    latency, bound = _latency(path, rows, nodes, offsets)
    return latency if bound == 0 or latency > 2 * bound else math.inf


def _latency(
    path: Path, rows: Sequence[_Message], nodes: Mapping[int, str], offsets: ClockOffsets | None
) -> tuple[float, float]:
    """From the send's start to the receive's end, and the clocks' bound; infinite where they cannot be compared."""
    latency, at_s = (
        float(np.median(values)) for values in ([r.latency_s for r in rows], [r.at_s for r in rows])
    )
    source, target = nodes.get(path.source, ""), nodes.get(path.target, "")
    if source == target:
        return max(latency, 0.0), 0.0
    if offsets is None or source not in offsets.nodes or target not in offsets.nodes:
        return math.inf, 0.0
    at_source_s = at_s + offsets.offset_s(target, at_s) - offsets.offset_s(source)
    shift = offsets.offset_s(target, at_s) - offsets.offset_s(source, at_source_s)
    bound = offsets.bound_s(target, at_s) + offsets.bound_s(source, at_source_s)
    return latency + shift, bound


def _taken(values: Sequence[tuple[float, float, float]]) -> Taken:
    """Medians of (seconds, count, bytes); the error is that of a median, from a robust spread."""
    table = np.array(values)
    seconds, count, nbytes = (float(np.median(table[:, column])) for column in range(3))
    spread = _MAD_TO_SIGMA * float(np.median(np.abs(table[:, 0] - seconds)))
    return Taken(seconds, count, nbytes, 1.25 * spread / math.sqrt(len(table)))


def _collective(steps: Sequence[Mapping[int, StreamSummary]]) -> Collective:
    busy: dict[int, list[float]] = {}
    for streams in steps:
        for rank, stream in streams.items():
            busy.setdefault(rank, []).append(stream.busy_s / stream.count)
    middle = {rank: median(times) for rank, times in busy.items()}
    spread_s = max(max(times) - middle[rank] for rank, times in busy.items())
    shortest = [
        (
            min(stream.busy_s / stream.count for stream in streams.values()),
            float(min(stream.count for stream in streams.values())),
            median(stream.bytes / stream.count for stream in streams.values()),
        )
        for streams in steps
    ]
    return Collective(middle, spread_s, _taken(shortest))
