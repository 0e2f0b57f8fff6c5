"""How long the transfers themselves took: after the last member arrived, in every group and between every pair."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median

from keepstep.core.events import MESSAGES, Op, ends_of
from keepstep.core.evidence import Evidence
from keepstep.core.group_names import shown_name
from keepstep.core.node_clocks import ClockOffsets
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.locate._profile import MAD_TO_SIGMA
from keepstep.locate.clock_offsets import MAX_DRIFT


@dataclass(frozen=True, slots=True)
class Path:
    """A collective stream of a group, or (``source`` >= 0) the messages from one rank to another."""

    group: str
    op: int
    source: int = -1
    target: int = -1
    # What users are shown for ``group``; empty: its own name.
    shown: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.source >= 0:
            return f"rank {self.source} to rank {self.target}"
        return f"{self.shown or shown_name(self.group)} {Op(self.op).name}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """The times of one path's transfers, healthy and now; medians over iterations."""

    path: Path
    ranks: tuple[int, ...]
    count: float  # operations per iteration
    nbytes: float  # bytes per operation
    before_s: float  # healthy time per operation, an upper bound
    after_s: float  # time per operation now, an upper bound
    error_s: float = 0.0  # how far ``after_s - before_s`` may be off, by clocks and noise
    of_peers: bool = False  # ``before_s`` is what comparable paths take now, for want of a healthy time

    @property
    def gain_s(self) -> float:
        """How much longer the path takes, seconds per iteration."""
        return (self.after_s - self.before_s) * self.count

    @property
    def ratio(self) -> float:
        """How many times longer a transfer takes."""
        return self.after_s / self.before_s if self.before_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Taken:
    """The time of one path's transfers now: an upper bound per operation, as a median over iterations."""

    seconds: float
    count: float  # operations per iteration
    nbytes: float  # bytes per operation
    error_s: float  # possible error of ``seconds``, by noise and clocks


@dataclass(frozen=True, slots=True)
class _Message:
    """Means per operation of the messages of one pair in one iteration, or medians of these over iterations."""

    latency_s: float  # the receive's end less the send's start, on uncorrected clocks
    receiving_s: float
    count: float
    nbytes: float
    at_s: float


_Step = tuple[Path, int]  # path, step number


@dataclass(frozen=True, slots=True)
class Collective:
    """The times of one path's collectives, medians over iterations."""

    busy_s: Mapping[int, float]  # seconds per operation that each member is in it
    spread_s: float  # how far a member's worst iteration lies above its median, the largest of all members
    taken: Taken  # times of the member that is in it for the shortest time in each iteration

    @property
    def shortest_s(self) -> float:
        """The member that arrives last waits for nobody: this bounds the transfer from above."""
        return min(self.busy_s.values())

    def growth_s(self, before: Collective) -> float:
        """How much longer a transfer takes than ``before``.

        A slower transfer takes every member longer, while a late member's own time does not grow: the least growth
        of all members is the transfer's.
        """
        return min(busy_s - before.busy_s.get(rank, 0.0) for rank, busy_s in self.busy_s.items())


def collective_transfers(
    summaries: Sequence[IterationSummary], groups: Mapping[str, GroupInfo]
) -> dict[Path, Collective]:
    """The times of all collectives. Iterations without a member of a group say nothing about that group."""
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
    return {replace(path, shown=groups[path.group].shown): _collective(steps) for path, steps in rows.items()}


def message_transfers(evidence: Evidence) -> list[Transfer]:
    """Every pair's messages, before and after.

    A transfer is no longer than the receive, and no longer than from the send's start to the receive's end. Of the
    latter the *growth* is known without comparing clocks, but for their drift; so the smaller growth is the transfer's.
    """
    old, new = _messages(evidence.before), _messages(evidence.after)
    offsets = _between_ends(old.keys() & new.keys(), evidence)
    transfers: list[Transfer] = []
    for path in [path for path in new if path in old]:
        ranks, then, now = (path.source, path.target), _middle(old[path]), _middle(new[path])
        ends = evidence.nodes.get(path.source, ""), evidence.nodes.get(path.target, "")
        grown, error = _latency_growth(ends, then, now, offsets)
        if grown < 2 * error:  # clocks drift less from the last healthy iteration to the first slow one
            last, first = max(old[path], key=lambda row: row.at_s), min(new[path], key=lambda row: row.at_s)
            grown, error = _latency_growth(ends, last, first, offsets)
        latency, bound = _latency(ends, then, offsets)
        # The healthy latency counts where the clocks are known better than that.
        known = bound == 0 or latency > 2 * bound
        base = min(then.receiving_s, latency) if known else then.receiving_s
        growth = min(grown, now.receiving_s - then.receiving_s)
        transfers.append(Transfer(path, ranks, now.count, now.nbytes, base, base + growth, error))
    return transfers


def messages_now(evidence: Evidence) -> dict[Path, Taken]:
    """The time of every pair's messages: at most that of the receive, and that from the send's start to its end."""
    found: dict[Path, Taken] = {}
    messages = _messages(evidence.after)
    offsets = _between_ends(messages, evidence)
    for path, rows in messages.items():
        ends = evidence.nodes.get(path.source, ""), evidence.nodes.get(path.target, "")
        latency, bound = _latency(ends, _middle(rows), offsets)
        taken = _taken([(row.receiving_s, row.count, row.nbytes) for row in rows])
        if latency + bound < taken.seconds:
            taken = Taken(latency + bound, taken.count, taken.nbytes, taken.error_s + bound)
        found[path] = taken
    return found


def _between_ends(paths: Iterable[Path], evidence: Evidence) -> ClockOffsets | None:
    """The clocks of the nodes between which these messages go."""
    nodes = evidence.nodes
    pairs = ((nodes.get(path.source, ""), nodes.get(path.target, "")) for path in paths)
    names = {node for pair in pairs if pair[0] != pair[1] for node in pair}
    return evidence.offsets_among(names)


def _messages(summaries: Sequence[IterationSummary]) -> dict[Path, list[_Message]]:
    """For every pair and iteration the messages of which both ends are known."""
    sends: dict[tuple[str, int, int, int], tuple[StreamSummary, float]] = {}
    receives: dict[tuple[str, int, int, int], tuple[StreamSummary, float]] = {}
    for summary in summaries:
        for stream in summary.streams:
            if stream.count and stream.op in MESSAGES:
                key = stream.group, *ends_of(stream.op, summary.rank, stream.peer), summary.step
                (sends if stream.op == Op.SEND else receives)[key] = (stream, summary.start_s)
    rows: dict[Path, list[_Message]] = {}
    for key, (receive, receiver_s) in receives.items():
        if key not in sends:
            continue
        send, sender_s = sends[key]
        if (send.count, send.first_seq) != (receive.count, receive.first_seq):
            continue
        group, source, target, _ = key
        latency = (receiver_s + receive.end_s) - (sender_s + send.start_s)
        receiving, nbytes = receive.busy_s / receive.count, send.bytes / send.count
        message = _Message(latency, receiving, receive.count, nbytes, receiver_s)
        rows.setdefault(Path(group, int(Op.SEND), source, target), []).append(message)
    return rows


def _middle(rows: Sequence[_Message]) -> _Message:
    return _Message(*map(median, zip(*map(astuple, rows), strict=True)))


def _latency_growth(
    ends: tuple[str, str], then: _Message, now: _Message, offsets: ClockOffsets | None
) -> tuple[float, float]:
    """(growth of the latency between two nodes, its error by clocks), in seconds."""
    growth_s, elapsed_s = now.latency_s - then.latency_s, now.at_s - then.at_s
    source, target = ends
    if source == target:
        return growth_s, 0.0
    drift, error = 0.0, 2 * MAX_DRIFT
    if offsets is not None and source in offsets.nodes and target in offsets.nodes:
        one, other = offsets.nodes[source], offsets.nodes[target]
        if other.drift_bound + one.drift_bound < error:
            drift, error = other.drift - one.drift, other.drift_bound + one.drift_bound
    return growth_s + drift * elapsed_s, error * abs(elapsed_s)


def _latency(ends: tuple[str, str], row: _Message, offsets: ClockOffsets | None) -> tuple[float, float]:
    """Seconds from the send's start to the receive's end, and their possible error; infinite without common clocks."""
    source, target = ends
    if source == target:
        return max(row.latency_s, 0.0), 0.0
    if offsets is None or source not in offsets.nodes or target not in offsets.nodes:
        return math.inf, 0.0
    at_s = row.at_s
    at_source_s = at_s + offsets.offset_s(target, at_s) - offsets.offset_s(source)
    shift = offsets.offset_s(target, at_s) - offsets.offset_s(source, at_source_s)
    bound = offsets.bound_s(target, at_s) + offsets.bound_s(source, at_source_s)
    return row.latency_s + shift, bound


def _taken(values: Sequence[tuple[float, float, float]]) -> Taken:
    """Medians of (seconds, count, bytes); the error is that of a median, from a robust spread."""
    seconds, count, nbytes = map(median, zip(*values, strict=True))
    spread = MAD_TO_SIGMA * median(abs(value[0] - seconds) for value in values)
    return Taken(seconds, count, nbytes, 1.25 * spread / math.sqrt(len(values)))


def _collective(steps: Sequence[Mapping[int, StreamSummary]]) -> Collective:
    """One path's collectives from the streams of all members, iteration by iteration."""
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
