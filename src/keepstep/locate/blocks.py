"""Which micro-batch of a slow rank is slow, and whether the step would be any faster without it.

Blocks are asked for only of the pipelines that a slow rank is in (MegaTrace §III-C prunes to the straggling replica in
the same way). A delay that the pipeline's bubbles or another delay take up is no cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from keepstep.core.errors import TraceError
from keepstep.core.events import Op
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.operations import Operation, OperationKind
from keepstep.core.summary import BlockSummary, IterationSummary
from keepstep.locate.clocks import ClockOffsets
from keepstep.locate.what_if import StepGraph, step_graphs

MOST_RANKS = 256  # whose blocks are asked for
_ONE_BLOCK = 0.75  # of what the rank's blocks grew: it is this one
_ABSORBED = 0.1  # of what all culprits cost together: this one costs nothing
_COMPUTE = ("forward", "backward")
_P2P = (int(Op.SEND), int(Op.RECV))

_Block = tuple[str, int]  # kind, index
Floats = npt.NDArray[np.float64]


def pipelines(summaries: Iterable[IterationSummary]) -> dict[int, int]:
    """Rank -> lowest rank of its pipeline replica: the ranks that messages join."""
    home: dict[int, int] = {}

    def root(rank: int) -> int:
        while home.setdefault(rank, rank) != rank:
            rank = home[rank] = home[home[rank]]
        return rank

    for summary in summaries:
        first = root(summary.rank)
        for stream in summary.streams:
            if stream.op in _P2P and stream.peer >= 0:
                low, high = sorted((first, root(stream.peer)))
                home[high] = first = low
    return {rank: root(rank) for rank in list(home)}


def blocks_wanted(culprits: Sequence[Culprit], summaries: Iterable[IterationSummary]) -> tuple[int, ...]:
    """The ranks whose blocks tell more of these culprits: all of their pipelines, as far as there is room."""
    home = pipelines(summaries)
    wanted: list[int] = []
    for first in dict.fromkeys(home[one.rank] for one in culprits if one.rank in home):
        members = [rank for rank, root in home.items() if root == first]
        if len(wanted) + len(members) <= MOST_RANKS:
            wanted += members
    return tuple(sorted(wanted))


def sharpen(
    diagnosis: Diagnosis,
    blocks: Sequence[BlockSummary],
    onset_step: int,
    after: Sequence[IterationSummary],
    stages: Mapping[int, int],
    nodes: Mapping[int, str],
    offsets: ClockOffsets | None = None,
) -> Diagnosis:
    """Say which block of each slow rank grew, and drop the ranks whose delay is absorbed.

    Args:
        diagnosis: of a slowdown, with the ranks that are slow.
        blocks: of the ranks in ``blocks_wanted``, from steps before and since ``onset_step``.
        after: the slow iterations; tells when each ended.
        stages: pipeline stage by rank.
        nodes: node name by rank.
        offsets: the nodes' clocks; without them no step over several nodes is replayed.
    """
    found = _Medians.of(blocks, onset_step)
    culprits = tuple(_with_block(one, found) for one in diagnosis.culprits)
    slow = [one.rank for one in culprits if one.rank is not None and found.grown(one.rank)]
    graph = _graph([one for one in blocks if one.step >= onset_step], after, stages, nodes, offsets)
    if graph is None or not slow:
        return replace(diagnosis, culprits=culprits)
    costs = _Costs(graph, found, slow)
    absorbed = [rank for rank in slow if costs.is_absorbed(rank)] if len(slow) > 1 else []
    told = [f"without {_whose(rank)} delay a step would take {costs.without([rank]):.3g} s, not {costs.actual_s:.3g} s"
            for rank in slow if rank not in absorbed][:2]  # fmt: skip
    told += [
        f"{_whose(rank)} delay is absorbed: the step would be no shorter without it" for rank in absorbed
    ]
    return replace(
        diagnosis,
        culprits=tuple(one for one in culprits if one.rank not in absorbed),
        evidence=(*diagnosis.evidence, *told),
    )


def _whose(rank: int) -> str:
    return f"rank {rank}'s"


@dataclass(frozen=True, slots=True)
class _Medians:
    """Seconds of each compute block of each rank, before the onset and since: rank -> block -> (before, since)."""

    seconds: Mapping[int, Mapping[_Block, tuple[float, float]]]

    @staticmethod
    def of(blocks: Sequence[BlockSummary], onset_step: int) -> _Medians:
        times: dict[int, dict[_Block, tuple[list[float], list[float]]]] = defaultdict(dict)
        for one in blocks:
            if one.kind in _COMPUTE:
                pair = times[one.rank].setdefault((one.kind, one.index), ([], []))
                pair[one.step >= onset_step].append(one.own_s)
        return _Medians(
            {
                rank: {
                    block: (float(np.median(before)), float(np.median(since)))
                    for block, (before, since) in rows.items()
                    if before and since
                }
                for rank, rows in times.items()
            }
        )

    def grown(self, rank: int) -> dict[_Block, float]:
        """By how much each block grew; only those that did."""
        return {
            block: since - before
            for block, (before, since) in self.seconds.get(rank, {}).items()
            if since > 1.05 * before
        }


def _with_block(culprit: Culprit, found: _Medians) -> Culprit:
    """The micro-batch that alone accounts for the rank's delay goes into the culprit's detail."""
    if culprit.rank is None or culprit.rank not in found.seconds:
        return culprit
    grown, of_rank = found.grown(culprit.rank), found.seconds[culprit.rank]
    if not grown or len(of_rank) <= len(_COMPUTE):  # one micro-batch: the stage has said it
        return culprit
    block = max(grown, key=lambda one: grown[one])
    if grown[block] < _ONE_BLOCK * sum(grown.values()):
        return culprit
    before, since = of_rank[block]
    told = f"in {block[0]} of micro-batch {block[1]}: {before * 1e3:.0f} -> {since * 1e3:.0f} ms"
    return replace(culprit, stage=block[0], detail="; ".join(filter(None, (culprit.detail, told))))


class _Costs:
    """What a step takes with some of the slow ranks as fast as they were before."""

    def __init__(self, graph: StepGraph, found: _Medians, slow: Sequence[int]) -> None:
        self._graph, self._slow = graph, slow
        self._healthy: dict[int, Floats] = {}
        for place, node in enumerate(graph.nodes):
            rank, kind, index = node.key
            before = found.seconds.get(rank, {}).get((kind, index))
            if rank in slow and before is not None:
                self._healthy[place] = np.minimum(graph.durations[place], before[0])
        self.actual_s = self.without([])
        self._least_s = self.without(slow)

    def without(self, ranks: Iterable[int]) -> float:
        """Mean seconds of a step in which these ranks are healthy."""
        healthy = set(ranks)
        durations: Floats = np.array(self._graph.durations)
        for place, seconds in self._healthy.items():
            if self._graph.nodes[place].key[0] in healthy:
                durations[place] = seconds
        return float(self._graph.replay(durations).mean())

    def is_absorbed(self, rank: int) -> bool:
        """It costs nothing as things are, and would cost nothing without the other delays."""
        together = self.actual_s - self._least_s
        now = self.actual_s - self.without([rank])
        alone = self.without([other for other in self._slow if other != rank]) - self._least_s
        return together > 0 and max(now, alone) < _ABSORBED * together


def _graph(
    blocks: Sequence[BlockSummary],
    after: Sequence[IterationSummary],
    stages: Mapping[int, int],
    nodes: Mapping[int, str],
    offsets: ClockOffsets | None,
) -> StepGraph | None:
    """The steps that all of these ranks have told of, as one graph; None where that cannot be had."""
    ranks = {one.rank for one in blocks}
    if offsets is None and len({nodes.get(rank, "") for rank in ranks}) > 1:
        return None
    ends = {(one.rank, one.step): one.start_s + one.duration_s for one in after}
    by_step: dict[int, list[BlockSummary]] = defaultdict(list)
    for one in blocks:
        by_step[one.step].append(one)
    homes = _homes(blocks)
    operations: list[Operation] = []
    for step, rows in by_step.items():
        if {one.rank for one in rows} == ranks and all((rank, step) in ends for rank in ranks):
            operations += _operations(rows, ends, homes, stages, nodes, offsets)
    try:
        return step_graphs(operations)[0] if operations else None
    except TraceError:  # an order of blocks that no message explains
        return None


def _homes(blocks: Sequence[BlockSummary]) -> dict[int, int]:
    home = {one.rank: one.rank for one in blocks}
    for _ in range(len(home)):
        changed = False
        for one in blocks:
            if one.peer in home:
                low = min(home[one.rank], home[one.peer])
                changed = changed or (home[one.rank], home[one.peer]) != (low, low)
                home[one.rank] = home[one.peer] = low
        if not changed:
            break
    return home


def _operations(
    rows: Sequence[BlockSummary],
    ends: Mapping[tuple[int, int], float],
    homes: Mapping[int, int],
    stages: Mapping[int, int],
    nodes: Mapping[int, str],
    offsets: ClockOffsets | None,
) -> list[Operation]:
    """One step's blocks and messages; all ranks meet at its end."""

    def on_one_clock(rank: int, time_s: float) -> float:
        return time_s if offsets is None else offsets.to_reference_s(nodes.get(rank, ""), time_s)

    last = max((stages.get(one.rank, 0) for one in rows), default=0)
    found: list[Operation] = []
    done: dict[int, float] = {}
    for one in rows:
        stage, kind = stages.get(one.rank, 0), one.kind
        name: OperationKind
        if kind == "forward" or kind == "backward":
            name, seconds = kind, one.own_s
            done[one.rank] = max(done.get(one.rank, 0.0), one.start_s + seconds)
        elif one.peer in stages:
            downstream = _is_downstream(stage, stages[one.peer], last)
            seconds = one.duration_s
            if kind == "send":
                name = "forward-send" if downstream else "backward-send"
            else:
                name = "backward-recv" if downstream else "forward-recv"
        else:
            continue
        start_s = on_one_clock(one.rank, one.start_s)
        found.append(Operation(one.rank, one.step, homes[one.rank], stage, name, one.index, start_s, seconds))
    for rank, done_s in done.items():
        step = rows[0].step
        rest_s = max(ends[rank, step] - done_s, 0.0)
        found.append(
            Operation(
                rank,
                step,
                homes[rank],
                stages.get(rank, 0),
                "norm-sync",
                0,
                on_one_clock(rank, done_s),
                rest_s,
            )
        )
    return found


def _is_downstream(stage: int, other: int, last: int) -> bool:
    """Whether ``other`` is the next stage; with interleaved stages the last one's next is the first."""
    if last >= 2 and {stage, other} == {0, last}:
        return stage == last
    return other > stage
