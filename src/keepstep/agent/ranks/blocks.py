"""Lists what one rank did in an iteration, in order: passes of micro-batches, and messages."""

from __future__ import annotations

import numpy as np

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.intervals import Union, clipped
from keepstep.agent.ranks.iterations import Cut
from keepstep.agent.ranks.summarise import waited
from keepstep.core.events import Kind, Op, Phase
from keepstep.core.summary import BlockKind, BlockSummary

_PHASE, _P2P = int(Kind.PHASE), int(Kind.P2P)
_KINDS: tuple[tuple[BlockKind, int, int], ...] = (
    ("forward", _PHASE, int(Phase.MODEL)),
    ("backward", _PHASE, int(Phase.BACKWARD)),
    ("send", _P2P, int(Op.SEND)),
    ("recv", _P2P, int(Op.RECV)),
)
MOST_BLOCKS = 4096  # most blocks of one rank in one iteration


def blocks_of(cut: Cut, rank: int) -> tuple[BlockSummary, ...]:
    """The blocks of an iteration, numbered from 0 for each kind and peer; none if there are more than 4,096."""
    rows = cut.rows[cut.rows["start_ns"] >= cut.start_ns]
    operations = cut.rows[cut.rows["kind"] != _PHASE]
    begin, until = waited(operations, cut.end_ns)
    waits = Union(*clipped(begin, until, cut.start_ns, cut.end_ns)).joined(cut.pauses)
    found: list[BlockSummary] = []
    for kind, code, op in _KINDS:
        chosen = rows[(rows["kind"] == code) & (rows["op"] == op)]
        if len(chosen) + len(found) > MOST_BLOCKS:
            return ()
        found += _blocks(kind, chosen, waits, cut, rank)
    return tuple(found)


def _blocks(kind: BlockKind, rows: Rows, waits: Union, cut: Cut, rank: int) -> list[BlockSummary]:
    rows = rows[np.argsort(rows["start_ns"], kind="stable")]
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
