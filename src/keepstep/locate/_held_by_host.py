"""Ranks that only waited while their hosts waited for their GPUs: a check on own times, by the time in collectives.

A host that synchronises with its GPU while a collective goes on launches nothing meanwhile, so the compute stream is
not blocked by a wait but empty, and the rank's own time grows as if it had computed. Megatron does so after each
exchange of messages, while gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import table_of
from keepstep.core.summary import IterationSummary

_MOST_PEERS = 64  # ranks of a large group, enough to compare with

_Path = tuple[str, int]  # group, operation


def waits_grown(evidence: Evidence, ranks: Sequence[int]) -> dict[int, float]:
    """By how many seconds an iteration these ranks are longer in collectives than before, beyond the transfers.

    Collectives of several groups may go on at once, so the one that has grown most counts. A slower transfer takes all
    members longer, so what the member has grown by that grew least is left out.
    """
    wanted = set(ranks)
    peers = {
        name: {*wanted.intersection(group.members), *group.members[:: 1 + len(group.members) // _MOST_PEERS]}
        for name, group in evidence.groups.items()
        if len(group.members) > 1 and not wanted.isdisjoint(group.members)
    }
    asked = sorted(set[int]().union(*peers.values()))
    before = _busy(table_of(evidence.before).of_ranks(asked))
    after = _busy(table_of(evidence.after).of_ranks(asked))
    grown = dict.fromkeys(ranks, 0.0)
    for path in before.keys() & after.keys():
        members = peers.get(path[0], set[int]())
        known = members & before[path].keys() & after[path].keys()
        by_rank = {rank: after[path][rank] - before[path][rank] for rank in known}
        if len(by_rank) < 2 or len(by_rank) < len(members):
            continue
        for rank in wanted & known:
            grown[rank] = max(grown[rank], by_rank[rank] - min(by_rank.values()))
    return grown


def _busy(summaries: Sequence[IterationSummary]) -> Mapping[_Path, dict[int, float]]:
    """Seconds an iteration that each rank is in the collectives of each path, as medians."""
    rows: dict[_Path, dict[int, list[float]]] = {}
    for summary in summaries:
        for stream in summary.streams:
            if stream.peer < 0 and stream.count > 0:
                rows.setdefault((stream.group, stream.op), {}).setdefault(summary.rank, []).append(
                    stream.busy_s
                )
    return {path: {rank: median(values) for rank, values in ranks.items()} for path, ranks in rows.items()}
