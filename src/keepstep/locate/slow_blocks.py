"""Which micro-batch of a slow rank is slow, and whether the step would be any faster without it.

Blocks are asked for only of the pipelines that a slow rank is in (MegaTrace §III-C prunes to the straggling replica in
the same way). A delay that the pipeline's bubbles or another delay take up is no cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from keepstep.core.events import MESSAGES
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.iteration_table import medians, table_of
from keepstep.core.summary import BlockSummary, IterationSummary
from keepstep.locate._step_costs import Excess, StepCosts, step_costs
from keepstep.locate.infer import layout_of
from keepstep.locate.slow import MIN_SHARE
from keepstep.locate.what_if import COMPUTE, Floats

MOST_RANKS = 256  # ranks whose blocks are asked for
_ONE_BLOCK = 0.75  # part of what the rank's blocks grew that one block must have grown to be named
_MOSTLY = 0.5  # part of what a rank's own time grew that its blocks must explain
_FAR = 1.5  # times what the block took before
_MOST_TOLD = 4

_Block = tuple[str, int]  # kind, index


def pipelines(ranks: Iterable[int], summaries: Sequence[IterationSummary]) -> set[int]:
    """All ranks that messages join with one of these, themselves included, as far as ``summaries`` tell."""
    table = table_of(summaries)
    found: set[int] = set()
    new = set(ranks)
    while new:
        rows = list(table.of_ranks(new))
        found.update(row.rank for row in rows)
        peers = {stream.peer for row in rows for stream in row.streams if stream.op in MESSAGES}
        new = {peer for peer in peers if peer >= 0} - found - new
    return found


def blocks_wanted(evidence: Evidence, culprits: Sequence[Culprit]) -> tuple[int, ...]:
    """The ranks whose blocks tell more of these culprits: their pipelines and the replicas that reduce with them.

    At most `MOST_RANKS`: the replicas are left out, or the last culprits' pipelines, where there is no room for them.
    """
    summaries = table_of(evidence.after).newest_steps()
    own: set[int] = set()
    for one in culprits:
        named = (one.rank,) if one.link is None else one.link.ranks
        more = own | pipelines([rank for rank in named if rank is not None and rank not in own], summaries)
        if len(more) > MOST_RANKS:
            break
        own = more
    groups = evidence.groups
    together = [groups[name].members for name in layout_of(evidence).groups_with("dp") if name in groups]
    beside = {rank for group in together if not own.isdisjoint(group) for rank in group}
    if len(beside) <= MOST_RANKS:
        beside = pipelines(beside, summaries)
    return tuple(sorted(own | beside if len(own | beside) <= MOST_RANKS else own))


def sharpen(evidence: Evidence, diagnosis: Diagnosis) -> Diagnosis:
    """Say which block of each slow rank grew, and drop the ranks and links whose delay is absorbed.

    ``diagnosis`` names the ranks and links that are slow. Of the evidence ``blocks``, ``onset_step``, ``before``,
    ``after``, ``groups``, ``layout``, ``nodes`` and ``clocks`` are read; without clocks no step over several nodes is
    replayed.
    """
    before, after = table_of(evidence.before), table_of(evidence.after)
    evidence = replace(evidence, before=before, after=after)
    found = _Medians.of(evidence.blocks, evidence.onset_step)
    diagnosis = replace(diagnosis, culprits=tuple(_with_block(one, found) for one in diagnosis.culprits))
    costs = step_costs(evidence, layout_of(evidence))
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
            else:  # a host cause of a node is one, however many ranks it hits
                starved[one.node, one.cause].append(one)
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
            one = Culprit(rank, None, evidence.nodes.get(rank, ""), "", ratio, "medium", "compute")
            causes.append(([_with_block(one, found)], costs.of_rank(rank, found.one_block(rank))))
    slowdown_s = float(np.median(after.column("duration_s")) - np.median(before.column("duration_s")))
    return _judged(diagnosis, causes, costs, slowdown_s)


def _judged(
    diagnosis: Diagnosis, causes: Sequence[tuple[list[Culprit], Excess]], costs: StepCosts, slowdown_s: float
) -> Diagnosis:
    """The diagnosis without the culprits whose delay costs nothing, with those beside them whose delay costs much."""
    absorbed = costs.absorbed([excess for _, excess in causes])
    culprits, told = list(diagnosis.culprits), list[str]()
    for (together, excess), nothing in zip(causes, absorbed, strict=True):
        without_s, known = costs.without(excess), together[0] in diagnosis.culprits
        if not known and (nothing or costs.actual_s - without_s < MIN_SHARE * slowdown_s):
            continue
        whose = f"{_whose(together)} delay"
        if nothing:
            culprits = [one for one in culprits if one not in together]
            told.append(f"{whose} is absorbed: the step would be no shorter without it")
            continue
        culprits += [] if known else together
        told.append(f"without {whose} a step would take {without_s:.3g} s, not {costs.actual_s:.3g} s")
    left = replace(diagnosis, culprits=tuple(culprits), evidence=(*diagnosis.evidence, *told[:_MOST_TOLD]))
    if culprits or not diagnosis.culprits:
        blamed = {one.rank for one in culprits}
        return replace(left, victims=tuple(rank for rank in left.victims if rank not in blamed))
    missing = "what lengthens the step: the delays that were seen cost it nothing"
    return replace(left, victims=(), missing=(*left.missing, missing), summary="cause unknown")


def _whose(culprits: Sequence[Culprit]) -> str:
    """Culprits of one cause in the possessive, e.g. ``rank 3's``."""
    first = culprits[0]
    if first.link is not None:
        return f"the link's between ranks {first.link.ranks[0]} and {first.link.ranks[1]}"
    return f"rank {first.rank}'s" if len(culprits) == 1 else f"{first.node}'s ({first.cause})"


@dataclass(frozen=True, slots=True)
class _Medians:
    """Median seconds of each block of computation of each rank, before the onset and since."""

    seconds: Mapping[int, Mapping[_Block, tuple[float, float]]]  # rank -> block -> (before, since)

    @staticmethod
    def of(blocks: Sequence[BlockSummary], onset_step: int) -> _Medians:
        times: dict[int, dict[_Block, tuple[list[float], list[float]]]] = defaultdict(dict)
        for one in blocks:
            if one.kind in COMPUTE:
                pair = times[one.rank].setdefault((one.kind, one.index), ([], []))
                pair[one.step >= onset_step].append(one.own_s)
        seconds: dict[int, dict[_Block, tuple[float, float]]] = {}
        for rank, rows in times.items():
            known = ((block, pair) for block, pair in rows.items() if all(pair))
            seconds[rank] = {block: (median(before), median(since)) for block, (before, since) in known}
        return _Medians(seconds)

    def explains(self, rank: int, growth_s: float) -> bool:
        """Whether the rank's blocks account for the growth of its own time."""
        return sum(self.grown(rank).values()) >= _MOSTLY * growth_s

    def stands_out(self, rank: int) -> bool:
        """Whether one block alone accounts for the rank's delay, and is far from what it was."""
        block = self.one_block(rank)
        if block is None:
            return False
        before, since = self.seconds[rank][block]
        return since >= _FAR * before

    def one_block(self, rank: int) -> _Block | None:
        """The block that alone accounts for what the rank's blocks have grown; None when there is none."""
        grown = self.grown(rank)
        block = max(grown, key=lambda one: grown[one], default=None)
        return None if block is None or grown[block] < _ONE_BLOCK * sum(grown.values()) else block

    def grown(self, rank: int) -> dict[_Block, float]:
        """By how much each block of the rank grew; only blocks that did."""
        return {
            block: since - before
            for block, (before, since) in self.seconds.get(rank, {}).items()
            if since > 1.05 * before
        }


def _with_block(culprit: Culprit, found: _Medians) -> Culprit:
    """The culprit, its detail with the micro-batch that alone accounts for the rank's delay, if there is one."""
    if culprit.rank is None or culprit.rank not in found.seconds:
        return culprit
    block, of_rank = found.one_block(culprit.rank), found.seconds[culprit.rank]
    if block is None or len(of_rank) <= len(COMPUTE):  # with one micro-batch, the stage says enough
        return culprit
    before, since = of_rank[block]
    told = f"in {block[0]} of micro-batch {block[1]}: {before * 1e3:.0f} -> {since * 1e3:.0f} ms"
    return replace(culprit, stage=block[0], detail="; ".join(filter(None, (culprit.detail, told))))
