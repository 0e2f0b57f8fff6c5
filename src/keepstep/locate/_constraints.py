"""What each operation says about the offset between the clocks of two nodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.events import MESSAGES, SYNCHRONISING, Op, ends_of
from keepstep.core.summary import ClockSample

_FROM_ROOT = frozenset({Op.BROADCAST, Op.SCATTER})
_TO_ROOT = frozenset({Op.REDUCE, Op.GATHER})

_Key = tuple[str, int, int, int]  # group, sequence number, sender, receiver (-1 for collectives)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What one operation shows: low <= x[node] - x[hub] <= high, x being the seconds to add to a node's clock."""

    low_s: float
    high_s: float
    middle_s: float  # difference of the two ends, which are nearly simultaneous; nan where they need not be
    time_s: float  # when the operation ended, on the node's clock

    @property
    def guess_s(self) -> float:
        """A finite value for the offset that fits roughly."""
        return first_finite(self.middle_s, (self.low_s + self.high_s) / 2, self.low_s, self.high_s)


def first_finite(*values: float) -> float:
    """The first of the values that is finite; 0 if none is."""
    return next(filter(math.isfinite, values), 0.0)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What one node saw of one operation."""

    start_s: float  # the last start among the node's ranks
    end_s: float  # the first end among the node's ranks
    mean_end_s: float


@dataclass(frozen=True, slots=True)
class _Shared:
    """An operation that several nodes took part in. Every starter's start comes before every ender's end."""

    marks: Mapping[str, _Mark]
    starters: frozenset[str]
    enders: frozenset[str]


def constraints_between_nodes(
    samples: Mapping[str, Sequence[ClockSample]],
) -> tuple[str, dict[tuple[str, str], list[Constraint]]]:
    """The reference node, and all constraints by (hub, node), in breadth-first order from the reference.

    The samples of all nodes are matched, and each operation bounds the offsets between its hub and its other members.
    The hub is the member nearest to the reference node, so the work is linear in the number of samples.
    """
    shared = _match(samples)
    per_node: dict[str, list[int]] = {}
    for number, operation in enumerate(shared):
        for node in operation.marks:
            per_node.setdefault(node, []).append(number)
    if not per_node:
        return min(samples, default=""), {}
    reference = min(per_node, key=lambda node: (-len(per_node[node]), node))
    pairs: dict[tuple[str, str], list[Constraint]] = {}
    seen_nodes, seen_operations = {reference}, set[int]()
    queue = deque([reference])
    while queue:
        hub = queue.popleft()
        for number in per_node[hub]:
            if number in seen_operations:
                continue
            seen_operations.add(number)
            for node in shared[number].marks:
                constraint = _between(shared[number], hub, node) if node != hub else None
                if constraint is None:
                    continue
                pairs.setdefault((hub, node), []).append(constraint)
                if node not in seen_nodes:
                    seen_nodes.add(node)
                    queue.append(node)
    return reference, pairs


def _match(samples: Mapping[str, Sequence[ClockSample]]) -> list[_Shared]:
    """The operations of which several nodes have samples, without those whose samples do not fit together."""
    operations: dict[_Key, list[tuple[str, ClockSample]]] = {}
    for node, rows in samples.items():
        for row in rows:
            key = row.group, row.seq, *ends_of(row.op, row.rank, row.peer)
            operations.setdefault(key, []).append((node, row))
    several = (rows for rows in operations.values() if any(node != rows[0][0] for node, _ in rows))
    return [operation for rows in several if (operation := _shared(rows)) is not None]


def _shared(rows: Sequence[tuple[str, ClockSample]]) -> _Shared | None:
    """The operation that the samples (with their nodes) belong to; None when they cannot belong to one."""
    first = rows[0][1]
    p2p = first.op in MESSAGES
    ranks, ops = {row.rank for _, row in rows}, {row.op for _, row in rows}
    fits = ops >= MESSAGES if p2p else len(ops) == 1
    if not fits or len(ranks) != len(rows) or any(row.end_s < row.start_s for _, row in rows):
        return None
    by_node: dict[str, list[ClockSample]] = {}
    for node, row in rows:
        by_node.setdefault(node, []).append(row)
    marks = {
        node: _Mark(
            max(row.start_s for row in here),
            min(row.end_s for row in here),
            sum(row.end_s for row in here) / len(here),
        )
        for node, here in by_node.items()
    }
    everybody = frozenset(marks)
    if first.op in SYNCHRONISING:
        return _Shared(marks, everybody, everybody)
    if p2p:
        senders, receivers = ({node for node, row in rows if row.op == op} for op in (Op.SEND, Op.RECV))
        return _Shared(marks, frozenset(senders), frozenset(receivers))
    root = frozenset(node for node, row in rows if row.rank == row.peer)
    if first.op in _FROM_ROOT:
        return _Shared(marks, root, everybody - root)
    if first.op in _TO_ROOT:
        return _Shared(marks, everybody - root, root)
    return _Shared(marks, frozenset(), frozenset())


def _between(operation: _Shared, hub: str, node: str) -> Constraint | None:
    """What the operation says about the two clocks; None when it bounds their offset from neither side."""
    here, there = operation.marks[hub], operation.marks[node]
    low, high, middle = -math.inf, math.inf, math.nan
    if hub in operation.starters and node in operation.enders:
        low = here.start_s - there.end_s
    if node in operation.starters and hub in operation.enders:
        high = here.end_s - there.start_s
    if math.isinf(low) and math.isinf(high):
        return None
    if math.isfinite(low) and math.isfinite(high):
        middle = here.mean_end_s - there.mean_end_s
    return Constraint(low, high, middle, there.end_s)
