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

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.event_buffer import Rows, chosen
from keepstep.agent.ranks.intervals import NOTHING, Times, Union, clipped
from keepstep.agent.ranks.records import own_times, streams, waits
from keepstep.agent.ranks.time_between_calls import time_between_calls
from keepstep.core.events import Flag, Kind, Op, Phase
from keepstep.core.summary import BlockKind, BlockSummary, GroupInfo, IterationSummary, StreamSummary

# Enum members as plain integers: looking them up and comparing them costs more than comparing whole arrays.
_PHASE, _P2P = int(Kind.PHASE), int(Kind.P2P)
_END_BY_WAIT = int(Flag.END_BY_WAIT)
_KNOWN_ASYNC = int(Flag.ASYNC | Flag.SYNC_KNOWN)
_KINDS: tuple[tuple[BlockKind, int, int], ...] = (
    ("forward", _PHASE, int(Phase.MODEL)),
    ("backward", _PHASE, int(Phase.BACKWARD)),
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
    rows, pauses = cut.rows, (cut.pauses.starts, cut.pauses.ends)
    taken_ns, gc_ns, optimizer_ns, data_ns, backward_ns = own_times(rows, cut.start_ns, cut.end_ns, *pauses)
    self_ns, duration_ns, steps = cut.end_ns - cut.start_ns - taken_ns, cut.duration_ns, cut.steps
    second = 1e-9 / steps
    tells = steps == 1 and (told is None or len(told) > 0)
    between_ns, received_ns = time_between_calls(cut) if on_device and steps == 1 else (-1, 0)
    return IterationSummary(
        rank=rank,
        step=cut.step,
        start_s=cut.end_ns * 1e-9 - duration_ns * second,
        duration_s=duration_ns * second,
        self_s=self_ns * second,
        blocked_s=(duration_ns - self_ns) * second,
        data_s=data_ns * second,
        backward_s=backward_ns * second,
        optimizer_s=optimizer_ns * second,
        gc_s=gc_ns * second,
        evaluation_s=cut.evaluation_ns * second,
        checkpoint_s=cut.checkpoint_ns * second,
        between_calls_s=between_ns * 1e-9 if between_ns >= 0 else -1.0,
        after_receives_s=received_ns * 1e-9,
        streams=_named(streams(rows, cut.start_ns, cut.end_ns, *pauses, told), groups) if tells else (),
    )


def waited(operations: Rows, end_ns: int) -> tuple[Times, Times]:
    """Start and end of the rank's wait in each operation; ``end_ns`` replaces ends that are not known yet."""
    begin, until = waits(operations, end_ns)
    return np.frombuffer(begin, np.int64), np.frombuffer(until, np.int64)


def blocked(in_flight: Rows) -> bool:
    """Whether the rank waits in one of these operations now, and did not only begin it to wait for it later."""
    operations = chosen(in_flight, in_flight["kind"] != _PHASE)
    if not len(operations):
        return False
    flags = operations["flags"]
    later = ((flags & _END_BY_WAIT) != 0) | ((flags & _KNOWN_ASYNC) == _KNOWN_ASYNC)
    return bool(((operations["wait_ns"] > 0) | ~later).any())


def streams_of(
    operations: Rows, start_ns: int, end_ns: int, groups: Mapping[int, GroupInfo]
) -> tuple[StreamSummary, ...]:
    """The streams of operations that lasted from their start to their end, in an iteration without pauses."""
    start_ns = min(start_ns, int(operations["start_ns"].min(initial=start_ns)))
    names = {number: group.name for number, group in groups.items()}
    nothing = NOTHING.starts, NOTHING.ends
    return _named(streams(operations, start_ns, end_ns, *nothing, blocked_throughout=True), names)


def _named(sums: Sequence[tuple[int, ...]], groups: Mapping[int, str]) -> tuple[StreamSummary, ...]:
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
        for group, op, peer, seq, count, start, end, busy, blocked, size, short in sums
    )


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
