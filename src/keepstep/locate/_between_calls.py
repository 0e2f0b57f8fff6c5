"""Who is slow where waits are not recorded: the pipeline's hosts tell by the time from call to call (MegaTrace §III-B).

The host of a rank that waits for others shows that after it has called a receive. A slow rank's host takes longer
between its other calls, and waits no longer for messages. A host may also wait there for others unseen, so nobody is
named unless all other ranks are seen to wait for messages, and all with whom the rank shares larger collectives are
slow like it. Ranks of one tensor-parallel group, held up inside each other's kernels, look alike in this; among them
the culprit comes last to small collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit
from keepstep.core.iteration_table import IterationTable, distinct, medians, table_of
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import SMALL_BYTES, StreamSummary

_LEAST_BEFORE, _LEAST_AFTER = 2, 3  # iterations of each rank
_LEAST_OWN = 0.5  # part of the job's growth by which a slow rank's own time must have grown
_ALIKE = 0.7  # part of the greatest growth of own time; ranks above it cannot be told apart by it
_LEAST_CLEAR = 0.4  # part of the greatest growth of own time; that of all other ranks is below it
_LEAST_WAIT = 0.3  # part of the job's growth by which all others must wait longer for messages
_MOST_WAIT = 0.1  # part of the job's growth by which a slow rank may do so
_LEAST_LATE = 0.01  # part of the job's growth; a mean lateness of a step that is less shows nothing
_LEAST_LATE_S = 0.001  # hosts come later than each other by less than this by chance
_LATE_ALIKE = 0.5  # part of the greatest lateness; ranks above it cannot be told apart by it


@dataclass(frozen=True, slots=True)
class SlowHost:
    """The rank that is slow, if one alone can be; its victims; what was seen."""

    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()


def slow_host(evidence: Evidence, slowdown_s: float) -> SlowHost:
    """Who is slow by the hosts' calls. ``slowdown_s``: by how much the job's iterations have grown."""
    before, after = (
        rows.where(rows.column("between_calls_s") >= 0)
        for rows in (table_of(evidence.before), table_of(evidence.after))
    )
    own_before, own_after = _known(before, _LEAST_BEFORE), _known(after, _LEAST_AFTER)
    ranks = sorted(own_after)
    if len(ranks) < 2 or ranks != sorted(own_before) or not set(evidence.nodes) <= set(ranks):
        return SlowHost()
    own = {rank: own_after[rank] - own_before[rank] for rank in ranks}
    waits_before, waits_after = medians(before, "after_receives_s"), medians(after, "after_receives_s")
    waits = {rank: waits_after[rank] - waits_before[rank] for rank in ranks}
    greatest = max(own.values())
    alike = [rank for rank in ranks if own[rank] >= _ALIKE * greatest]
    others = [rank for rank in ranks if rank not in alike]
    if not (
        greatest >= _LEAST_OWN * slowdown_s > 0
        and others
        and all(own[rank] < _LEAST_CLEAR * greatest for rank in others)
        and all(waits[rank] >= _LEAST_WAIT * slowdown_s for rank in others)
        and all(waits[rank] <= _MOST_WAIT * slowdown_s for rank in alike)
        and _all_in_step(after, evidence, alike)
    ):
        return SlowHost()
    first, least = alike[0], min(waits[rank] for rank in others)
    lines = [
        f"ranks {fold_ranks(alike)}: {own_before[first]:.3g} -> {own_after[first]:.3g} s between calls, "
        f"the others wait {least:.3g} s or more longer for messages"
    ]
    named = alike
    if len(alike) > 1:
        late = _grown_lateness(evidence, before, after, alike)
        latest = max(late.values(), default=0.0)
        least = max(_LATE_ALIKE * latest, _LEAST_LATE * slowdown_s, _LEAST_LATE_S)
        named = [rank for rank in late if late[rank] >= least]
        if len(named) != 1:
            return SlowHost(evidence=(*lines, "which of these is slow does not show"))
        lines.append(
            f"last of these to small collectives: {fold_ranks(named)}, by {latest:.3g} s more than before"
        )
    (rank,) = named
    ratio = round(own_after[rank] / max(own_before[rank], 1e-9), 2)
    told = "its host took longer between calls while the others waited for messages"
    culprit = Culprit(rank, None, evidence.nodes.get(rank, ""), "", ratio, "medium", "compute", told)
    return SlowHost((culprit,), tuple(one for one in ranks if one != rank), tuple(lines))


def _known(rows: IterationTable, least: int) -> dict[int, float]:
    """The median time between calls of the ranks of which at least so many iterations are there."""
    counts: Counter[int] = Counter(rows.column("rank").tolist())
    return {rank: own for rank, own in medians(rows, "between_calls_s").items() if counts[rank] >= least}


def _all_in_step(after: IterationTable, evidence: Evidence, alike: Sequence[int]) -> bool:
    """Whether these ranks have larger collectives with each other alone, all of them."""
    shared: dict[int, set[int]] = {rank: {rank} for rank in alike}
    for row in after.newest_steps().of_ranks(alike):
        for stream in row.streams:
            if stream.peer < 0 and not _is_small(stream):
                if stream.group not in evidence.groups:
                    return False
                shared[row.rank].update(evidence.groups[stream.group].members)
    return all(members == set(alike) for members in shared.values())


def _is_small(stream: StreamSummary) -> bool:
    return stream.bytes <= SMALL_BYTES * stream.count


def _grown_lateness(
    evidence: Evidence, before: IterationTable, after: IterationTable, ranks: Sequence[int]
) -> dict[int, float]:
    """By how much more than before each of these ranks comes after the first of them to its small collectives.

    Of the groups, that with the greatest growth counts. Empty where clocks do not tell.
    """
    then, now = _lateness(evidence, before, ranks), _lateness(evidence, after, ranks)
    return {
        rank: max(now[key][rank] - then[key][rank] for key in then.keys() & now.keys())
        for rank in ranks
        if then.keys() & now.keys()
    }


def _lateness(
    evidence: Evidence, rows: IterationTable, ranks: Collection[int]
) -> Mapping[tuple[str, int], Mapping[int, float]]:
    """By group and operation: how long after the first rank each rank comes on average; medians over steps."""
    nodes = {evidence.nodes.get(rank, "") for rank in ranks}
    offsets = evidence.offsets_among(nodes) if len(nodes) > 1 else None
    if len(nodes) > 1 and offsets is None:
        return {}
    late: dict[tuple[str, int], dict[int, list[float]]] = {}
    mine = rows.of_ranks(ranks)
    for step in distinct(mine.column("step")).tolist():
        came: dict[tuple[str, int, int], dict[int, float]] = {}
        for row in mine.where(mine.column("step") == step):
            node = evidence.nodes.get(row.rank, "")
            for stream in row.streams:
                if stream.peer < 0 and _is_small(stream):
                    at_s = row.start_s + stream.start_s
                    at_s = offsets.to_reference_s(node, at_s) if offsets is not None else at_s
                    came.setdefault((stream.group, stream.op, stream.count), {})[row.rank] = at_s
        for (group, op, _), times in came.items():
            if len(times) == len(ranks):
                first_s = min(times.values())
                for rank, at_s in times.items():
                    late.setdefault((group, op), {}).setdefault(rank, []).append(at_s - first_s)
    return {key: {rank: median(times) for rank, times in of.items()} for key, of in late.items()}
