"""One iteration's records to sums per (group, operation, peer), and the time in which the rank waited for nobody.

A rank waits in an operation

- from the start of the wait to its end, where the wait was seen (``wait_ns``; one that began after the end is none);
- not at all, where a wait would have been seen and was not: ends told by the wait (END_BY_WAIT), and operations known
  to be asynchronous on a group on which other waits were seen in the same iteration (what DDP reduced before its
  gradients were complete);
- from start to end otherwise: the caller was in the call all along, or it went on and nobody saw where it waited.

The last rule counts overlapped communication as waiting although the rank may have computed meanwhile, and that is
meant. When a peer slows down, this rank's operations begin no earlier and end later, so their union can only grow:
``self_s`` of a victim never grows because of somebody else. Crediting the rank with what it provably did while an
operation was in flight would credit more in iterations that are longer for another's sake, which breaks exactly that.
The rank that is slow itself arrives last, its operations are short, and its ``self_s`` grows.
``StreamSummary.blocked_s`` is the finer guess: there an operation whose wait was not seen counts from the last thing
its thread began before it ended.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.intervals import Times, Union, clipped
from keepstep.agent.ranks.iterations import Cut
from keepstep.core.events import Flag, Kind, Phase
from keepstep.core.summary import IterationSummary, StreamSummary

# Plain numbers: members of enumerations cost more to look up and compare than the arrays they are compared with.
_PHASE = int(Kind.PHASE)
_GC, _OPTIMIZER, _DATA, _BACKWARD = (
    int(code) for code in (Phase.GC, Phase.OPTIMIZER, Phase.DATA, Phase.BACKWARD)
)
_ASYNC = int(Flag.ASYNC)
_END_BY_WAIT = int(Flag.END_BY_WAIT)
_KNOWN_ASYNC = int(Flag.ASYNC | Flag.SYNC_KNOWN)
# What a moment that lies in several phases is counted as: the first of these.
_PHASES = (_GC, _OPTIMIZER, _DATA, _BACKWARD)


def summarise(cut: Cut, rank: int, groups: Mapping[int, str]) -> IterationSummary:
    """The summary of one iteration of ``rank``; ``groups`` names the ring's group ids.

    Phase times (``data_s`` and so on) are the rank's own: waits in them are left out, and a moment that lies in several
    counts once, so that ``self_s`` less all of them is the forward pass and what no phase marks. ``start_s`` and the
    streams' times count as if the pauses had come before the iteration's start.
    """
    rows = cut.rows
    communicates = rows["kind"] != _PHASE
    operations = rows[communicates]
    begin, until = waited(operations, cut.end_ns)
    taken = Union(*clipped(begin, until, cut.start_ns, cut.end_ns)).joined(cut.pauses)
    self_ns = cut.end_ns - cut.start_ns - taken.total_ns
    own = dict.fromkeys(_PHASES, 0)
    if len(operations) < len(rows):
        phases = rows[~communicates]
        codes = phases["op"]
        present = set(codes.tolist())
        for phase in _PHASES:
            if phase not in present:
                continue
            found = phases[codes == phase] if len(present) > 1 else phases
            ends = np.where(found["end_ns"] == 0, cut.end_ns, found["end_ns"])
            span = Union(*clipped(found["start_ns"], ends, cut.start_ns, cut.end_ns))
            own[phase] = span.less(taken)
            taken = taken.joined(span)
    return IterationSummary(
        rank=rank,
        step=cut.step,
        start_s=(cut.end_ns - cut.duration_ns) * 1e-9,
        duration_s=cut.duration_ns * 1e-9,
        self_s=self_ns * 1e-9,
        blocked_s=(cut.duration_ns - self_ns) * 1e-9,
        data_s=own[_DATA] * 1e-9,
        backward_s=own[_BACKWARD] * 1e-9,
        optimizer_s=own[_OPTIMIZER] * 1e-9,
        gc_s=own[_GC] * 1e-9,
        evaluation_s=cut.evaluation_ns * 1e-9,
        checkpoint_s=cut.checkpoint_ns * 1e-9,
        streams=_streams(operations, begin, until, cut, groups),
    )


def waited(operations: Rows, end_ns: int) -> tuple[Times, Times]:
    """From when to when the rank waited in each operation (see above); ``end_ns`` stands in for ends not yet known."""
    starts: Times = operations["start_ns"]
    waits: Times = operations["wait_ns"]
    ends = np.where(operations["end_ns"] == 0, end_ns, operations["end_ns"])
    seen = waits > 0
    begin = np.where(seen, waits, starts)
    return np.where(~seen & _would_be_seen(operations, seen), ends, begin), ends


def blocked(in_flight: Rows) -> bool:
    """Whether the rank waits in one of these records: not in what it only began and will wait for later."""
    operations = in_flight[in_flight["kind"] != _PHASE]
    if not len(operations):
        return False
    flags = operations["flags"]
    later = ((flags & _END_BY_WAIT) != 0) | ((flags & _KNOWN_ASYNC) == _KNOWN_ASYNC)
    return bool(((operations["wait_ns"] > 0) | ~later).any())


def _would_be_seen(operations: Rows, seen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which operations' waits, had there been any, would have been seen."""
    flags = operations["flags"]
    certain = (flags & _END_BY_WAIT) != 0
    asynchronous = (flags & _KNOWN_ASYNC) == _KNOWN_ASYNC
    if bool(asynchronous.any()):
        groups = operations["group"]
        certain |= asynchronous & np.isin(groups, groups[asynchronous & seen])
    return certain


def _streams(
    operations: Rows, begin: Times, until: Times, cut: Cut, groups: Mapping[int, str]
) -> tuple[StreamSummary, ...]:
    if not len(operations):
        return ()
    begin = _surely_blocked(operations, begin, until)
    fresh = operations["start_ns"] >= cut.start_ns
    if not fresh.all():
        operations, begin, until = operations[fresh], begin[fresh], until[fresh]
        if not len(operations):
            return ()
    key = operations["group"].astype(np.int64) << 40
    key |= operations["op"].astype(np.int64) << 32
    key |= operations["peer"].astype(np.int64) & 0xFFFFFFFF
    order = np.argsort(key, kind="stable")
    operations, key, begin, until = operations[order], key[order], begin[order], until[order]
    first = np.concatenate(([0], np.flatnonzero(key[1:] != key[:-1]) + 1))
    counts = np.diff(np.concatenate((first, [len(key)])))
    starts = operations["start_ns"]
    ends = np.where(operations["end_ns"] == 0, cut.end_ns, operations["end_ns"])
    length = ends - starts
    origin_ns = cut.end_ns - cut.duration_ns
    paused = cut.pauses.total_ns > 0
    sums: NDArray[np.int64] = np.stack(
        (
            _without(cut.pauses, starts) if paused else starts - origin_ns,
            _without(cut.pauses, ends) if paused else ends - origin_ns,
            length,
            np.maximum(until - begin, 0),
            operations["bytes"].astype(np.int64),
        )
    )
    if paused:
        sums[:2] -= origin_ns
    totals: NDArray[np.int64] = np.add.reduceat(sums, first, axis=1)
    fastest = np.minimum.reduceat(length, first)
    heads = operations[first]
    return tuple(
        StreamSummary(
            group=groups.get(group, f"?{group}"),
            op=op,
            peer=peer,
            count=count,
            bytes=size,
            first_seq=seq,
            start_s=start / count * 1e-9,
            end_s=end / count * 1e-9,
            busy_s=busy * 1e-9,
            blocked_s=blocked * 1e-9,
            fastest_s=short * 1e-9,
        )
        for group, op, peer, seq, count, (start, end, busy, blocked, size), short in zip(
            heads["group"].tolist(),
            heads["op"].tolist(),
            heads["peer"].tolist(),
            heads["seq"].tolist(),
            counts.tolist(),
            zip(*totals.tolist(), strict=True),
            fastest.tolist(),
            strict=True,
        )
    )


def _without(pauses: Union, times: NDArray[np.int64]) -> Times:
    """``times`` moved to where they would be if every pause had come before the iteration."""
    return times + (pauses.total_ns - pauses.until(times))


def _surely_blocked(operations: Rows, begin: Times, until: Times) -> Times:
    """``begin`` of ``waited`` without what the same thread provably did while the operation was in flight."""
    guessed = ((operations["flags"] & _ASYNC) != 0) & (begin == operations["start_ns"]) & (until > begin)
    if not guessed.any():
        return begin
    sure: Times = np.array(begin)
    threads = operations["thread"]
    for thread in set(threads[guessed].tolist()):
        here = threads == thread
        begun = np.sort(operations["start_ns"][here])
        mine = guessed & here
        last = begun[np.maximum(np.searchsorted(begun, until[mine], "left") - 1, 0)]
        sure[mine] = np.maximum(begin[mine], np.minimum(last, until[mine]))
    return sure
