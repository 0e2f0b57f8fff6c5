"""Iterations of one rank as its GPU had them, from what the NCCL shim has measured there.

A host that runs ahead tells nothing of when its GPU works and waits. So where the shim measures an iteration, its
duration, its own time and its transfers are the GPU's: the own time is the duration less the time for which
communication blocked the compute stream, less what the host itself was seen to wait (for Gloo, in between).
The phases are the host's, and tell of the GPU's time only where the GPU waits for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.event_buffer import Rows, chosen, joined
from keepstep.agent.ranks.records import of_kind
from keepstep.agent.ranks.summarise import streams_of
from keepstep.core.events import Device, Kind, Phase
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary

_DEVICE, _PHASE, _P2P = int(Kind.DEVICE), int(Kind.PHASE), int(Kind.P2P)
_ITERATION, _BLIND, _OPTIMIZER = int(Device.ITERATION), int(Device.BLIND), int(Phase.OPTIMIZER)
_MOST_PENDING = 256  # iterations of the host that wait for their GPU's
_LONGEST_NS = (
    5_000_000_000  # for which one does, besides twice the time by which the last one was later than it
)
_MOST_KEPT = 1 << 15  # records of operations
_GIVE_UP = 2048  # iterations of the host without one of the GPU, after which the host's count again


class _Measured(NamedTuple):
    """From one optimizer step to the next on the GPU, in ns."""

    start_ns: int  # when the host put the first boundary onto the stream
    began_ns: int  # when the GPU came to the two boundaries
    ended_ns: int
    blocked_ns: int


class DeviceTimes:
    """Takes iterations as the host had them and returns them as the GPU had them, in order.

    Attributes:
        active: whether the GPU's times are there: then only iterations with them are measures of the rank's speed.
        blind: iterations in which CUDA graphs were replayed, so that their communication was not seen.
    """

    def __init__(self) -> None:
        self.active = False
        self.blind = 0
        self._known: dict[int, _Measured] = {}  # by the number of optimizer steps at the end
        self._newest = 0  # the newest of these numbers, measured or not
        self._operations: deque[Rows] = deque()
        self._kept = 0
        # Iterations of the host, with the numbers of the optimizer steps that ended in each.
        self._pending: deque[tuple[Cut, IterationSummary, list[int]]] = deque()
        self._patience_ns = _LONGEST_NS
        self._without = 0  # iterations of the host since the last one that the GPU's times were known of

    def take(self, rows: Rows) -> None:
        """Take the shim's records that ended since the last call and have the GPU's times."""
        if not len(rows):
            return
        told = of_kind(rows, _DEVICE)
        if len(told) < len(rows):
            operations = chosen(rows, (rows["kind"] < _PHASE) & (rows["group"] >= 0))
            self._operations.append(operations)
            self._kept += len(operations)
            while self._kept > _MOST_KEPT and len(self._operations) > 1:
                self._kept -= len(self._operations.popleft())
        for op, _, _, start_ns, ended_ns, _, number, began_ns, blocked_ns in told:
            if op == _ITERATION and 0 <= blocked_ns <= ended_ns - began_ns:
                self._known[number] = _Measured(start_ns, began_ns, ended_ns, blocked_ns)
                self._newest = max(self._newest, number)
                self.active, self._without = True, 0
            elif op == _BLIND:
                self.blind += 1
                self._newest = max(self._newest, number)

    def add(self, cut: Cut, summary: IterationSummary) -> None:
        """Take an iteration as the host had it."""
        self._pending.append((cut, summary, _numbers(cut)))
        self._without += 1
        if self._without > _GIVE_UP:
            self.active = False

    def drain(
        self, now_ns: int | None, groups: Mapping[int, GroupInfo]
    ) -> list[tuple[Cut, IterationSummary, bool]]:
        """Iterations of which all is known by now, and whether their times are the GPU's.

        ``now_ns``: None: nothing more will be known, so that all of them are returned.
        """
        found: list[tuple[Cut, IterationSummary, bool]] = []
        while self._pending:
            cut, summary, numbers = self._pending[0]
            late = now_ns is None or now_ns - cut.end_ns > self._patience_ns
            if not (
                late
                or not self.active
                or len(self._pending) > _MOST_PENDING
                or not numbers
                or self._newest >= numbers[-1]
            ):
                break
            self._pending.popleft()
            measured = self._of(cut, numbers)
            for number in [one for one in self._known if numbers and one <= numbers[-1]]:
                del self._known[number]
            if not measured:
                found.append((cut, summary, False))
                continue
            found.append((cut, self._merged(cut, summary, measured, groups), True))
        return found

    def _of(self, cut: Cut, numbers: list[int]) -> list[_Measured]:
        """The iterations in this cut of which every optimizer step was measured, each as one."""
        each, more = divmod(len(numbers), cut.steps)
        if not numbers or more or cut.pauses.total_ns or cut.evaluation_ns or cut.checkpoint_ns:
            return []
        found: list[_Measured] = []
        for place in range(0, len(numbers), each):
            parts = [self._known[one] for one in numbers[place : place + each] if one in self._known]
            if len(parts) == each:
                took = sum(one.ended_ns - one.began_ns for one in parts)
                last = parts[-1]
                blocked = sum(one.blocked_ns for one in parts)
                found.append(_Measured(parts[0].start_ns, last.ended_ns - took, last.ended_ns, blocked))
        return found

    def _merged(
        self, cut: Cut, host: IterationSummary, measured: list[_Measured], groups: Mapping[int, GroupInfo]
    ) -> IterationSummary:
        second = 1e-9 / len(measured)
        took_s = sum(one.ended_ns - one.began_ns for one in measured) * second
        blocked_s = min(sum(one.blocked_ns for one in measured) * second + host.blocked_s, took_s)
        last = measured[-1]
        late_ns = max(last.ended_ns - cut.end_ns, 0) + 2 * (last.ended_ns - last.began_ns)
        self._patience_ns = _LONGEST_NS + 2 * late_ns
        return IterationSummary(
            rank=host.rank,
            step=host.step,
            start_s=last.began_ns * 1e-9,
            duration_s=took_s,
            self_s=took_s - blocked_s,
            blocked_s=blocked_s,
            data_s=host.data_s,
            backward_s=host.backward_s,
            optimizer_s=host.optimizer_s,
            gc_s=host.gc_s,
            evaluation_s=host.evaluation_s,
            checkpoint_s=host.checkpoint_s,
            ahead_s=max(last.ended_ns - cut.end_ns, 0) * 1e-9,
            between_calls_s=host.between_calls_s,
            after_receives_s=host.after_receives_s,
            streams=(
                *_with_waits(host, groups),
                *(self._streams(cut, last, groups) if cut.steps == 1 else ()),
            ),
        )

    def _streams(
        self, cut: Cut, measured: _Measured, groups: Mapping[int, GroupInfo]
    ) -> tuple[StreamSummary, ...]:
        """What the GPU transferred of the calls that the host made in this iteration."""
        if not self._operations:
            return ()
        rows = joined(list(self._operations)) if len(self._operations) > 1 else self._operations[0]
        starts = rows["start_ns"]
        later = chosen(rows, starts >= cut.end_ns)
        mine = chosen(rows, (starts >= cut.start_ns) & (starts < cut.end_ns))
        self._operations.clear()
        self._kept = len(later)
        if len(later):
            self._operations.append(later)
        if not len(mine):
            return ()
        return streams_of(_as_the_gpu_had_them(mine), measured.began_ns, measured.ended_ns, groups)


def _with_waits(host: IterationSummary, groups: Mapping[int, GroupInfo]) -> tuple[StreamSummary, ...]:
    """What the host itself transferred, as over Gloo beside NCCL."""
    if not host.streams:
        return ()
    names = {group.name for group in groups.values() if group.records_waits}
    return tuple(one for one in host.streams if one.group in names)


def _numbers(cut: Cut) -> list[int]:
    """The numbers of the optimizer steps that ended in this iteration."""
    ended = ((one[0], one[1], one[4]) for one in of_kind(cut.rows, _PHASE))
    return sorted(seq for op, seq, end_ns in ended if op == _OPTIMIZER and 0 < end_ns <= cut.end_ns)


def _as_the_gpu_had_them(rows: Rows) -> Rows:
    """Operations that start when the GPU came to them. Peers of messages are still ranks of the communicator."""
    rows["start_ns"] = np.where(rows["wait_ns"] > 0, rows["wait_ns"], rows["start_ns"])
    rows["wait_ns"] = 0
    rows["peer"][rows["kind"] != _P2P] = -1
    return rows
