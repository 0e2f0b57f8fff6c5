"""Sums one iteration's records, computes the time in which the rank did not wait, and lists its passes and messages.

A rank waits in an operation

- from the start of the wait to the end of the operation, if the wait was recorded (``wait_ns``; a wait that began after
  the end does not count);
- not at all, if a wait would have been recorded and was not. This holds for operations whose end is recorded by the
  wait (END_BY_WAIT), and for asynchronous operations on a group on which other waits were recorded in the same
  iteration (buckets that DDP reduced before its gradients were complete);
- from start to end otherwise: either the caller was inside the call all the time, or it is unknown where it waited.

The last rule deliberately counts overlapped communication as waiting, although the rank may have computed meanwhile.
When a peer slows down, this rank's operations begin no earlier and end later, so their union can only grow, and
``self_s`` of a victim never grows because of another rank. If computation during an operation counted as own time, the
own time would grow in iterations that another rank made longer. A rank that is slow itself arrives last, so that its
operations are short and its ``self_s`` grows. ``StreamSummary.blocked_s`` is a finer estimate: an operation whose wait
was not recorded counts as waiting from the last record that its thread began before the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.event_buffer import Rows, chosen
from keepstep.agent.ranks.intervals import NOTHING, Times, Union, clipped
from keepstep.agent.ranks.time_between_calls import time_between_calls
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.core.summary import BlockKind, BlockSummary, GroupInfo, IterationSummary, StreamSummary

# Enum members as plain integers: looking them up and comparing them costs more than comparing whole arrays.
_PHASE, _P2P = int(Kind.PHASE), int(Kind.P2P)
_GC, _OPTIMIZER, _DATA, _BACKWARD = (
    int(code) for code in (Phase.GC, Phase.OPTIMIZER, Phase.DATA, Phase.BACKWARD)
)
_ASYNC = int(Flag.ASYNC)
_END_BY_WAIT = int(Flag.END_BY_WAIT)
_KNOWN_ASYNC = int(Flag.ASYNC | Flag.SYNC_KNOWN)
# Phases by priority: a moment that lies in several of them counts as the first.
_PHASES = (_GC, _OPTIMIZER, _DATA, _BACKWARD)
_KINDS: tuple[tuple[BlockKind, int, int], ...] = (
    ("forward", _PHASE, int(Phase.MODEL)),
    ("backward", _PHASE, _BACKWARD),
    ("send", _P2P, int(Op.SEND)),
    ("recv", _P2P, int(Op.RECV)),
)
MOST_BLOCKS = 4096  # most blocks of one rank in one iteration


def summarise(
    cut: Cut,
    rank: int,
    groups: Mapping[int, str],
    *,
    told: Collection[int] | None = None,
    on_device: bool = False,
) -> IterationSummary:
    """The summary of one iteration of ``rank``; ``groups`` are names by the ring's group numbers.

    ``told``: the groups whose streams are told; None: all. ``on_device``: whether it may wait unseen from one call to
    the next, as on groups of a device that is not measured.

    Of iterations that were cut together it is the last one's, with their mean times and no streams.

    Phase times such as ``data_s`` are own time: waits are left out, and a moment that lies in several phases counts
    once. So ``self_s`` less all of them is the forward pass and everything outside of phases. ``start_s`` and the times
    of streams are shifted as if all pauses had come before the iteration's start.
    """
    rows = cut.rows
    communicates = rows["kind"] != _PHASE
    operations = chosen(rows, communicates)
    begin, until = waited(operations, cut.end_ns)
    taken = Union(*clipped(begin, until, cut.start_ns, cut.end_ns)).joined(cut.pauses)
    self_ns = cut.end_ns - cut.start_ns - taken.total_ns
    own = dict.fromkeys(_PHASES, 0)
    if len(operations) < len(rows):
        phases = chosen(rows, ~communicates)
        codes = phases["op"]
        present = set(codes.tolist())
        for phase in _PHASES:
            if phase not in present:
                continue
            found = chosen(phases, codes == phase) if len(present) > 1 else phases
            ends = np.where(found["end_ns"] == 0, cut.end_ns, found["end_ns"])
            span = Union(*clipped(found["start_ns"], ends, cut.start_ns, cut.end_ns))
            own[phase] = span.less(taken)
            taken = taken.joined(span)
    second = 1e-9 / cut.steps
    between_ns, received_ns = time_between_calls(operations, cut) if on_device and cut.steps == 1 else (-1, 0)
    return IterationSummary(
        rank=rank,
        step=cut.step,
        start_s=cut.end_ns * 1e-9 - cut.duration_ns * second,
        duration_s=cut.duration_ns * second,
        self_s=self_ns * second,
        blocked_s=(cut.duration_ns - self_ns) * second,
        data_s=own[_DATA] * second,
        backward_s=own[_BACKWARD] * second,
        optimizer_s=own[_OPTIMIZER] * second,
        gc_s=own[_GC] * second,
        evaluation_s=cut.evaluation_ns * second,
        checkpoint_s=cut.checkpoint_ns * second,
        between_calls_s=between_ns * 1e-9 if between_ns >= 0 else -1.0,
        after_receives_s=received_ns * 1e-9,
        streams=_streams_told(operations, begin, until, cut, groups, told) if cut.steps == 1 else (),
    )


def waited(operations: Rows, end_ns: int) -> tuple[Times, Times]:
    """Start and end of the rank's wait in each operation; ``end_ns`` replaces ends that are not known yet."""
    starts: Times = operations["start_ns"]
    waits: Times = operations["wait_ns"]
    ends = np.where(operations["end_ns"] == 0, end_ns, operations["end_ns"])
    seen = waits > 0
    begin = np.where(seen, waits, starts)
    return np.where(~seen & _would_be_seen(operations, seen), ends, begin), ends


def blocked(in_flight: Rows) -> bool:
    """Whether the rank waits in one of these operations now, and did not only begin it to wait for it later."""
    operations = chosen(in_flight, in_flight["kind"] != _PHASE)
    if not len(operations):
        return False
    flags = operations["flags"]
    later = ((flags & _END_BY_WAIT) != 0) | ((flags & _KNOWN_ASYNC) == _KNOWN_ASYNC)
    return bool(((operations["wait_ns"] > 0) | ~later).any())


def _would_be_seen(operations: Rows, seen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For which operations a wait would have been recorded if there had been one."""
    flags = operations["flags"]
    certain = (flags & _END_BY_WAIT) != 0
    asynchronous = (flags & _KNOWN_ASYNC) == _KNOWN_ASYNC
    if bool(asynchronous.any()):
        groups = operations["group"]
        certain |= asynchronous & np.isin(groups, groups[asynchronous & seen])
    return certain


def streams_of(
    operations: Rows, start_ns: int, end_ns: int, groups: Mapping[int, GroupInfo]
) -> tuple[StreamSummary, ...]:
    """The streams of operations that lasted from their start to their end, in an iteration without pauses."""
    start_ns = min(start_ns, int(operations["start_ns"].min(initial=start_ns)))
    cut = Cut(0, start_ns, end_ns, operations, NOTHING)
    names = {number: group.name for number, group in groups.items()}
    return _streams(operations, operations["start_ns"], operations["end_ns"], cut, names)


def _streams_told(
    operations: Rows,
    begin: Times,
    until: Times,
    cut: Cut,
    groups: Mapping[int, str],
    told: Collection[int] | None,
) -> tuple[StreamSummary, ...]:
    if told is not None:
        if not told:
            return ()
        theirs = np.isin(operations["group"], list(told))
        operations, begin, until = chosen(operations, theirs), begin[theirs], until[theirs]
    return _streams(operations, begin, until, cut, groups)


def _streams(
    operations: Rows, begin: Times, until: Times, cut: Cut, groups: Mapping[int, str]
) -> tuple[StreamSummary, ...]:
    if not len(operations):
        return ()
    begin = _surely_blocked(operations, begin, until)
    fresh = operations["start_ns"] >= cut.start_ns
    if not fresh.all():
        operations, begin, until = chosen(operations, fresh), begin[fresh], until[fresh]
        if not len(operations):
            return ()
    key = operations["group"].astype(np.int64) << 40
    key |= operations["op"].astype(np.int64) << 32
    key |= operations["peer"].astype(np.int64) & 0xFFFFFFFF
    if bool((key[1:] < key[:-1]).any()):
        order = np.argsort(key, kind="stable")
        operations, key, begin, until = chosen(operations, order), key[order], begin[order], until[order]
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
    heads = chosen(operations, first)
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
        for (group, op, peer, seq), count, (start, end, busy, blocked, size), short in zip(
            heads[["group", "op", "peer", "seq"]].tolist(),
            counts.tolist(),
            zip(*totals.tolist(), strict=True),
            fastest.tolist(),
            strict=True,
        )
    )


def _without(pauses: Union, times: NDArray[np.int64]) -> Times:
    """``times``, shifted as if all pauses had come before the iteration."""
    return times + (pauses.total_ns - pauses.until(times))


def _surely_blocked(operations: Rows, begin: Times, until: Times) -> Times:
    """The starts of waits, moved behind the last record that the same thread began before each operation ended."""
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


def blocks_of(cut: Cut, rank: int) -> tuple[BlockSummary, ...]:
    """The blocks of an iteration, numbered from 0 for each kind and peer; none if there are more than 4,096."""
    rows = chosen(cut.rows, cut.rows["start_ns"] >= cut.start_ns)
    operations = chosen(cut.rows, cut.rows["kind"] != _PHASE)
    begin, until = waited(operations, cut.end_ns)
    waits = Union(*clipped(begin, until, cut.start_ns, cut.end_ns)).joined(cut.pauses)
    found: list[BlockSummary] = []
    for kind, code, op in _KINDS:
        blocks = chosen(rows, (rows["kind"] == code) & (rows["op"] == op))
        if len(blocks) + len(found) > MOST_BLOCKS:
            return ()
        found += _blocks(kind, blocks, waits, cut, rank)
    return tuple(found)


def _blocks(kind: BlockKind, rows: Rows, waits: Union, cut: Cut, rank: int) -> list[BlockSummary]:
    rows = chosen(rows, np.argsort(rows["start_ns"], kind="stable"))
    starts = rows["start_ns"]
    ends = np.where(rows["end_ns"] == 0, cut.end_ns, np.minimum(rows["end_ns"], cut.end_ns))
    own = ends - starts - waits.within(starts, ends)
    numbers: dict[int, int] = {}
    found: list[BlockSummary] = []
    for start, end, alone, peer in zip(
        starts.tolist(), ends.tolist(), own.tolist(), rows["peer"].tolist(), strict=True
    ):
        number = numbers.get(peer, 0)
        numbers[peer] = number + 1
        found.append(
            BlockSummary(
                rank, cut.step, kind, peer, number, start * 1e-9, (end - start) * 1e-9, max(alone, 0) * 1e-9
            )
        )
    return found
