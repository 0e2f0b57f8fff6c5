"""Which micro-batch of a slow rank is slow, and whether the step would be any faster without it.

Blocks are asked for only of the pipelines that a slow rank is in (MegaTrace §III-C prunes to the straggling replica in
the same way). A delay that the pipeline's bubbles or another delay take up is no cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepstep.core.events import Op
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.iteration_table import column, medians, of_ranks
from keepstep.core.summary import BlockSummary, GroupInfo, IterationSummary
from keepstep.locate._step_costs import Excess, Floats, StepCosts, step_costs
from keepstep.locate.clocks import Clocks
from keepstep.locate.infer import InferredLayout
from keepstep.locate.slow import MIN_SHARE

MOST_RANKS = 256  # whose blocks are asked for
_ONE_BLOCK = 0.75  # of what the rank's blocks grew: it is this one
_MOSTLY = 0.5  # of what a rank's own time grew
_FAR = 1.5  # times what the block took
_MOST_TOLD = 4
_COMPUTE = ("forward", "backward")
_P2P = (int(Op.SEND), int(Op.RECV))

_Block = tuple[str, int]  # kind, index


def pipelines(ranks: Iterable[int], summaries: Sequence[IterationSummary]) -> set[int]:
    """All ranks that messages join with one of these, themselves included, as far as ``summaries`` tell."""
    found: set[int] = set()
    new = set(ranks)
    while new:
        rows = of_ranks(summaries, sorted(new))
        found.update(row.rank for row in rows)
        peers = {stream.peer for row in rows for stream in row.streams if stream.op in _P2P}
        new = {peer for peer in peers if peer >= 0} - found - new
    return found


def blocks_wanted(
    culprits: Sequence[Culprit],
    summaries: Sequence[IterationSummary],
    groups: Mapping[str, GroupInfo],
    layout: InferredLayout,
) -> tuple[int, ...]:
    """The ranks whose blocks tell more of these culprits: their pipelines and the replicas that reduce with them.

    As far as there is room: without the replicas, or the last culprits' pipelines, where there is not.
    """
    own: set[int] = set()
    for one in culprits:
        named = (one.rank,) if one.link is None else one.link.ranks
        more = own | pipelines([rank for rank in named if rank is not None and rank not in own], summaries)
        if len(more) > MOST_RANKS:
            break
        own = more
    together = [groups[name].members for name in layout.groups_with("dp") if name in groups]
    beside = {rank for group in together if not own.isdisjoint(group) for rank in group}
    if len(beside) <= MOST_RANKS:
        beside = pipelines(beside, summaries)
    return tuple(sorted(own | beside if len(own | beside) <= MOST_RANKS else own))


def sharpen(
    diagnosis: Diagnosis,
    blocks: Sequence[BlockSummary],
    onset_step: int,
    before: Sequence[IterationSummary],
    after: Sequence[IterationSummary],
    groups: Mapping[str, GroupInfo],
    layout: InferredLayout,
    nodes: Mapping[int, str],
    clocks: Clocks | None = None,
) -> Diagnosis:
    """Say which block of each slow rank grew, and drop the ranks and links whose delay is absorbed.

    Args:
        diagnosis: of a slowdown, with the ranks and links that are slow.
        blocks: of the ranks in ``blocks_wanted``, from steps before and since ``onset_step``.
        before: healthy iterations.
        after: the slow iterations.
        groups: the process groups by name.
        layout: roles of groups and stages of ranks.
        nodes: node name by rank.
        clocks: of the nodes; without them no step over several nodes is replayed.
    """
    found = _Medians.of(blocks, onset_step)
    diagnosis = replace(diagnosis, culprits=tuple(_with_block(one, found) for one in diagnosis.culprits))
    costs = step_costs(blocks, onset_step, before, after, groups, layout, nodes, clocks)
    if costs is None:
        return diagnosis
    then, now = medians(before, "self_s"), medians(after, "self_s")
    causes: list[tuple[list[Culprit], Excess]] = []
    starved: dict[tuple[str, str], list[Culprit]] = defaultdict(list)
    for one in diagnosis.culprits:
        if one.link is not None:
            causes.append(([one], costs.of_link(one.link, after)))
        elif (
            one.rank in then and one.rank in now and found.explains(one.rank, now[one.rank] - then[one.rank])
        ):
            if one.cause == "compute":
                causes.append(([one], costs.of_rank(one.rank, found.one_block(one.rank))))
            else:
                starved[one.node, one.cause].append(one)  # one cause, whatever each rank's part
    for together in starved.values():
        excess: dict[int, Floats] = {}
        for one in together:
            excess |= costs.of_rank(one.rank) if one.rank is not None else {}
        causes.append((together, excess))
    causes = [(whose, excess) for whose, excess in causes if excess]
    named = {one.rank for one in diagnosis.culprits}
    for rank in sorted(found.seconds.keys() - named):
        if found.stands_out(rank) and then.get(rank, 0.0) > 0:
            ratio = round(now[rank] / then[rank], 2)
            one = Culprit(rank, None, nodes.get(rank, ""), "", ratio, "medium", "compute")
            causes.append(([_with_block(one, found)], costs.of_rank(rank, found.one_block(rank))))
    return _judged(diagnosis, causes, costs, _slowdown_s(before, after))


def _judged(
    diagnosis: Diagnosis,
    causes: Sequence[tuple[Sequence[Culprit], Excess]],
    costs: StepCosts,
    slowdown_s: float,
) -> Diagnosis:
    """Without the culprits whose delay costs nothing, with the ranks beside whose delay costs much."""
    absorbed = costs.absorbed([excess for _, excess in causes])
    culprits, told = list(diagnosis.culprits), list[str]()
    for (together, excess), nothing in zip(causes, absorbed, strict=True):
        without_s, known = costs.without(excess), together[0] in diagnosis.culprits
        if not known and (nothing or costs.actual_s - without_s < MIN_SHARE * slowdown_s):
            continue
        if nothing:
            culprits = [one for one in culprits if one not in together]
            told.append(f"{_whose(together)} delay is absorbed: the step would be no shorter without it")
            continue
        culprits += [] if known else together
        told.append(
            f"without {_whose(together)} delay a step would take {without_s:.3g} s, not {costs.actual_s:.3g} s"
        )
    left = replace(diagnosis, culprits=tuple(culprits), evidence=(*diagnosis.evidence, *told[:_MOST_TOLD]))
    if culprits or not diagnosis.culprits:
        blamed = {one.rank for one in culprits}
        return replace(left, victims=tuple(rank for rank in left.victims if rank not in blamed))
    missing = "what lengthens the step: the delays that were seen cost it nothing"
    return replace(left, victims=(), missing=(*left.missing, missing), summary="cause unknown")


def _whose(culprits: Sequence[Culprit]) -> str:
    first = culprits[0]
    if first.link is not None:
        return f"the link's between ranks {first.link.ranks[0]} and {first.link.ranks[1]}"
    return f"rank {first.rank}'s" if len(culprits) == 1 else f"{first.node}'s ({first.cause})"


def _slowdown_s(before: Sequence[IterationSummary], after: Sequence[IterationSummary]) -> float:
    return float(np.median(column(after, "duration_s")) - np.median(column(before, "duration_s")))


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

    def explains(self, rank: int, growth_s: float) -> bool:
        """Whether it is in its blocks that the rank's own time has grown."""
        return sum(self.grown(rank).values()) >= _MOSTLY * growth_s

    def stands_out(self, rank: int) -> bool:
        """Whether one block alone accounts for the rank's delay, and is far from what it was."""
        block = self.one_block(rank)
        if block is None:
            return False
        before, since = self.seconds[rank][block]
        return since >= _FAR * before

    def one_block(self, rank: int) -> _Block | None:
        """The block that alone accounts for what the rank's blocks have grown."""
        grown = self.grown(rank)
        block = max(grown, key=lambda one: grown[one], default=None)
        return None if block is None or grown[block] < _ONE_BLOCK * sum(grown.values()) else block

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
    block, of_rank = found.one_block(culprit.rank), found.seconds[culprit.rank]
    if block is None or len(of_rank) <= len(_COMPUTE):  # one micro-batch: the stage has said it
        return culprit
    before, since = of_rank[block]
    told = f"in {block[0]} of micro-batch {block[1]}: {before * 1e3:.0f} -> {since * 1e3:.0f} ms"
    return replace(culprit, stage=block[0], detail="; ".join(filter(None, (culprit.detail, told))))
