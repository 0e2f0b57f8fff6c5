"""What profiles and a validation say of one slowdown, in numbers: pure functions of what agents have sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.control.cluster import Cluster
from keepstep.core.incident import Culprit, Link
from keepstep.core.summary import BlockSummary, IterationSummary
from keepstep.core.validation import Validation
from keepstep.report.validation import of_device, of_link
from keepstep.validate.judge import cause_of
from keepstep.validate.suspects import suspicious_groups

LARGE_WORLD = 4096  # ranks; in larger jobs less is asked for and looked at


def measured_culprits(
    outcome: Validation, suspected: Sequence[Culprit], nodes: Mapping[int, str]
) -> tuple[Culprit, ...]:
    """Devices and links that stand out; surely to blame where the profiles had suspected them.

    ``nodes``: names, by rank.
    """
    ranks = {one.rank for one in suspected if one.rank is not None}
    pairs = {frozenset(one.link.ranks) for one in suspected if one.link}
    found: list[Culprit] = []
    for device in outcome.devices:
        rank, sure = device.figure.rank, "high" if device.figure.rank in ranks else "medium"
        found.append(
            Culprit(
                rank,
                None,
                nodes.get(rank, ""),
                "",
                1 / device.share,
                sure,
                cause_of(device),
                of_device(device),
            )
        )
    for slow in outcome.links:
        ends = (slow.source, slow.target)
        link = Link(ends, (nodes.get(ends[0], ""), nodes.get(ends[1], "")))
        sure = "high" if frozenset(ends) in pairs else "medium"
        found.append(Culprit(None, link, "", "transfer", 1 / slow.share, sure, "network", of_link(slow)))
    return tuple(found)


def suspects_of(
    cluster: Cluster, after: Sequence[IterationSummary], culprits: Sequence[Culprit], slowdown_s: float
) -> tuple[tuple[int, ...], ...]:
    """Groups that a validation should test; in a large job only the newest of these iterations are looked at."""
    if cluster.known_ranks > LARGE_WORLD:
        newest = max((row.step for row in after), default=0)
        after = [row for row in after if row.step == newest]
    return suspicious_groups(after, cluster.groups, culprits, sorted(cluster.node_of), slowdown_s)


def firmness(culprits: Sequence[Culprit]) -> int:
    """How sure the first culprit is; 0 without one."""
    return 1 + ("low", "medium", "high").index(culprits[0].confidence) if culprits else 0


def is_block(one: BlockSummary) -> bool:
    """Possible numbers."""
    times = (one.start_s, one.duration_s, one.own_s)
    return all(0 <= time_s < math.inf for time_s in times) and one.index >= 0


def pace(rows: Sequence[IterationSummary]) -> float | None:
    """Median over ranks of the ranks' median iteration time."""
    from keepstep.core.iteration_table import medians

    return median(medians(rows, "duration_s").values()) if len(rows) else None


def ratios(before: Sequence[IterationSummary], after: Sequence[IterationSummary]) -> dict[int, float]:
    """How many times as long iterations take after as before, by rank."""
    from keepstep.core.iteration_table import medians

    if not len(before) or not len(after):
        return {}
    old, new = medians(before, "duration_s"), medians(after, "duration_s")
    return {rank: new[rank] / old[rank] for rank in old if rank in new and old[rank] > 0}


def middle(steps: Counter[int]) -> int:
    """The median of counted steps; -1 for none."""
    half, seen = sum(steps.values()) / 2, 0
    for step in sorted(steps):
        seen += steps[step]
        if seen >= half:
            return step
    return -1


def middle_s(times: Sequence[float]) -> float | None:
    """Their median; None without any."""
    return median(times) if times else None
