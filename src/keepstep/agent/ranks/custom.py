"""Cuts iterations of loops without an optimizer, by the period of their communication and backward passes alone.

The cut is placed after the operation that is followed by the longest gap, because that is where such a loop computes.
Steps are numbered by the sequence number of the operation before the cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.event_buffer import EventBuffer, Rows
from keepstep.agent.ranks.records import symbols
from keepstep.core.events import Kind, Op
from keepstep.detect.period import find_period

_FIRST_LOOK = 48
_LAST_LOOK = 1 << 15
_PERIODS = 6
_AGREEMENT = 0.97
# Least time before a period counts: in a pipeline's first step micro-batches repeat, too.
_SPAN_NS = 3_000_000_000
_QUIET_NS = 50_000_000
# Calls of a set-up repeat, too, but within microseconds, in bursts: so the median of iterations has a least length, and
# is at least this part of their ninth decile.
_LEAST_NS, _LEAST_STEADY = 1_000_000, 0.1
# After a look in vain the next one waits for so long for each record, a hundred times what the look took.
_PAUSE_NS = 100_000


class CustomLoop:
    """Finds the period of a rank's symbols, and then where each repetition ends."""

    def __init__(self) -> None:
        self._usual: NDArray[np.uint64] | None = None
        self._per_step = 1  # operations per iteration in the stream whose sequence numbers count the steps
        self._look_at = _FIRST_LOOK
        self._next_ns = 0  # when the period may be looked for again
        self._after_ticket = -1

    def edges(self, buffer: EventBuffer, now_ns: int) -> list[tuple[int, int]]:
        """The end in ns and the step of every finished iteration in ``buffer``."""
        if self._usual is None and (buffer.count < self._look_at or now_ns < self._next_ns):
            return []
        rows = buffer.repeating_from(self._after_ticket + 1)
        if self._usual is None and not self._learn(rows):
            self._look_at = min(max(2 * buffer.count, _FIRST_LOOK), _LAST_LOOK)
            self._next_ns = now_ns + _PAUSE_NS * len(rows)
            return []
        return self._repetitions(rows, now_ns)

    def _learn(self, rows: Rows) -> bool:
        if len(rows) < _FIRST_LOOK or int(rows["start_ns"][-1]) - int(rows["start_ns"][0]) < _SPAN_NS:
            return False
        numbers = _symbols(rows)
        length = find_period(numbers.tolist())
        if length is None or len(rows) < _PERIODS * length:
            return False
        # Micro-batches repeat inside a step, too, but not through most of the records.
        settled = numbers[len(numbers) // 4 :]
        if float((settled[length:] == settled[:-length]).mean()) < _AGREEMENT:
            return False
        took_ns = np.diff(rows["start_ns"][len(numbers) // 4 :: length])
        if float(np.median(took_ns)) < max(_LEAST_NS, _LEAST_STEADY * float(np.quantile(took_ns, 0.9))):
            return False
        recent = rows[len(rows) - (_PERIODS - 1) * length :]
        ends = np.where(recent["end_ns"] == 0, recent["start_ns"], recent["end_ns"])
        gaps: NDArray[Any] = recent["start_ns"][1:] - np.maximum.accumulate(ends)[:-1]
        whole = gaps[: (len(gaps) // length) * length]
        last = int(np.argmax([np.median(whole[place::length]) for place in range(length)]))
        one = recent[last + 1 : last + 1 + length]
        self._usual = _symbols(one)
        self._per_step = int(np.count_nonzero(_streams(one) == _streams(one)[-1]))
        return True

    def _repetitions(self, rows: Rows, now_ns: int) -> list[tuple[int, int]]:
        usual = self._usual
        assert usual is not None
        found: list[tuple[int, int]] = []
        numbers, length, place = _symbols(rows), len(usual), 0
        while place + length <= len(numbers):
            if not bool((numbers[place : place + length] == usual).all()):
                place += 1
                continue
            whole = (len(numbers) - place) // length
            same = (np.reshape(numbers[place : place + whole * length], (whole, length)) == usual).all(axis=1)
            count = whole if same.all() else int(same.argmin())
            following = rows["start_ns"][place + length :: length][:count].astype(np.int64)
            run: Rows = np.reshape(rows[place : place + count * length], (count, length))
            place += count * length
            last_start, last_end = run["start_ns"].max(axis=1).astype(np.int64), run["end_ns"].max(axis=1)
            if place == len(numbers) and not run["end_ns"][-1].all() and now_ns - last_start[-1] < _QUIET_NS:
                count -= 1  # the last operations of this iteration may still be under way
            ends_ns = np.maximum(last_start, last_end.astype(np.int64))
            latest = np.maximum(last_start[: len(following)], following)
            ends_ns[: len(following)] = np.minimum(ends_ns[: len(following)], latest)
            if count:
                steps = (run["seq"][:count, -1].astype(np.int64) - 1) // self._per_step
                found += zip(ends_ns[:count].tolist(), steps.tolist(), strict=True)
                self._after_ticket = int(run["ticket"][count - 1, -1])
        if not found and len(numbers) > 8 * length + 64:
            # The loop has changed, so its period is learned anew.
            self._usual, self._look_at = None, _FIRST_LOOK
        return found


def _symbols(rows: Rows) -> NDArray[np.uint64]:
    return np.frombuffer(symbols(rows)[0], np.uint64)


def _streams(rows: Rows) -> NDArray[np.int64]:
    """A number for each record's stream: phases by code, collectives by group, P2P by group, peer and direction."""
    kinds = rows["kind"].astype(np.int64)
    direction = np.where(kinds == Kind.COLLECTIVE, 0, rows["op"].astype(np.int64))
    direction = np.where((kinds == Kind.P2P) & (direction != Op.SEND), Op.RECV, direction)
    peer = np.where(kinds == Kind.P2P, rows["peer"].astype(np.int64), -1)
    return (((kinds << 8 | direction) << 16) + rows["group"].astype(np.int64)) * (1 << 32) + peer
