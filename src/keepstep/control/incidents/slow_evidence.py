"""What profiles and a validation say of one slowdown, in numbers: pure functions of what agents have sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from keepstep.control.cluster import Cluster
from keepstep.core.incident import Culprit, Incident, Link
from keepstep.core.summary import BlockSummary, IterationSummary
from keepstep.core.validation import Validation
from keepstep.report.validation import of_device, of_link
from keepstep.validate.judge import cause_of
from keepstep.validate.suspects import suspicious_groups

_PACE_NODES = 64  # most nodes whose heartbeats are looked at
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


def is_block(one: BlockSummary) -> bool:
    """Possible numbers."""
    times = (one.start_s, one.duration_s, one.own_s)
    return all(0 <= time_s < math.inf for time_s in times) and one.index >= 0


def with_measured(
    incident: Incident, outcome: Validation, culprits: Sequence[Culprit], proof: Sequence[str]
) -> Incident:
    """The incident with what was measured; ``culprits``: who stood out; ``proof``: that, in words."""
    blamed = {one.rank for one in culprits} | {
        rank for one in culprits if one.link for rank in one.link.ranks
    }
    return replace(
        incident,
        culprits=tuple(culprits) or incident.culprits,
        victims=tuple(rank for rank in incident.victims if rank not in blamed),
        evidence=(*proof, *incident.evidence),
        missing=(*(() if culprits else incident.missing), *outcome.missing[:4]),
    )


def lost_s(incident: Incident, until_step: int, treated_steps: int, treated_lost_s: float) -> float | None:
    """Seconds of training that it has cost until this step; None: its pace is not known.

    ``treated_steps``: made with a remedy in force, which have cost ``treated_lost_s``.
    """
    before_s, after_s = incident.iteration_before_s, incident.iteration_after_s
    if not before_s or not after_s or incident.onset_step is None:
        return None
    untreated = max(until_step - incident.onset_step - treated_steps, 0)
    return max(untreated * (after_s - before_s) + treated_lost_s, 0.0)


def newest_pace_s(cluster: Cluster) -> float | None:
    """How long iterations take by the heartbeats of the first nodes; None: nothing is known."""
    times: list[float] = []
    for node in list(cluster.nodes.values())[:_PACE_NODES]:
        if node.beat is not None and not node.silent:
            times += [one.iteration_s for one in node.beat.ranks[:1] if one.iteration_s > 0]
    return median(times) if times else None
