"""Pure functions over what agents have sent about a slowdown: culprits, suspects, cost and pace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.locators import Locators
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Incident, Link
from keepstep.core.ranges import fold_nodes
from keepstep.core.summary import LASTING_CAUSES, BlockSummary, IterationSummary
from keepstep.core.validation import Validation
from keepstep.report.validation import of_device, of_link
from keepstep.validate.judge import cause_of
from keepstep.validate.suspects import suspicious_groups

_CAUSES_S = 2.0  # how often the causes that agents tell are looked at
_PACE_NODES = 64  # nodes whose heartbeats tell the pace of the job
IN_FORCE = "S2,"  # how the name of an action begins that may still be in force after a restart
LARGE_WORLD = 4096  # in jobs with more ranks, less is asked for and looked at


@dataclass(frozen=True, slots=True)
class Healthy:
    """What was seen of the ranks before a slowdown, by rank: own times in seconds; pipeline stages, None: not known."""

    own_s: Mapping[int, float]
    stages: Mapping[int, int] | None

    @classmethod
    def of(cls, locators: Locators, evidence: Evidence) -> Healthy | None:
        """What the iterations before the onset tell; None without any."""
        if not len(evidence.before):
            return None
        from keepstep.core.iteration_table import medians

        stages: Mapping[int, int] | None = None
        with suppress(Exception):  # what agents send may be anything
            stages = locators.stages(evidence)
        return cls(medians(evidence.before, "self_s"), stages)


def measured_culprits(
    outcome: Validation, suspected: Sequence[Culprit], nodes: Mapping[int, str]
) -> tuple[Culprit, ...]:
    """Culprits: devices and links that stood out in a validation; with high confidence if they were suspected before.

    ``nodes``: node names by rank.
    """
    ranks = {one.rank for one in suspected if one.rank is not None}
    pairs = {frozenset(one.link.ranks) for one in suspected if one.link}
    found: list[Culprit] = []
    for device in outcome.devices:
        rank, sure = device.figure.rank, "high" if device.figure.rank in ranks else "medium"
        told = cause_of(device), of_device(device)
        found.append(Culprit(rank, None, nodes.get(rank, ""), "", 1 / device.share, sure, *told))
    for slow in outcome.links:
        ends = (slow.source, slow.target)
        link = Link(ends, (nodes.get(ends[0], ""), nodes.get(ends[1], "")))
        sure = "high" if frozenset(ends) in pairs else "medium"
        slower = 1 / slow.share if slow.share else 0.0  # nothing came over it
        found.append(Culprit(None, link, "", "transfer", slower, sure, "network", of_link(slow)))
    return tuple(found)


def suspects_of(
    cluster: Cluster, after: Sequence[IterationSummary], culprits: Sequence[Culprit], slowdown_s: float
) -> tuple[tuple[int, ...], ...]:
    """The groups that a validation should test. In a large job only the newest iterations are looked at."""
    if cluster.known_ranks > LARGE_WORLD:
        newest = max((row.step for row in after), default=0)
        after = [row for row in after if row.step == newest]
    return suspicious_groups(after, cluster.groups, culprits, sorted(cluster.node_of), slowdown_s)


class LateCauses:
    """What agents tell of blamed ranks' hosts and GPUs after a verdict: a low clock takes seconds to be known."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # What the last verdict knew; None: another controller has given it.
        self._known: frozenset[tuple[int, str]] | None = None
        self._again_s = 0.0

    def judged(self, incident: Incident | None, now_s: float) -> None:
        """Note what a verdict has been given with."""
        self._known = self._now(incident, now_s)

    def has_new(self, incident: Incident, now_s: float) -> bool:
        """Whether there are causes that the last verdict did not know; looked at once in two seconds."""
        if now_s < self._again_s:
            return False
        self._again_s = now_s + _CAUSES_S
        known, now = self._known, self._now(incident, now_s)
        self._known = now | known if known is not None else now
        return known is not None and not now <= known

    def _now(self, incident: Incident | None, now_s: float) -> frozenset[tuple[int, str]]:
        blamed = {one.rank for one in incident.culprits} if incident is not None else set[int | None]()
        causes = self._cluster.causes(now_s) if blamed else ()
        return frozenset(
            (one.rank, one.cause) for one in causes if one.rank in blamed and one.cause in LASTING_CAUSES
        )


def is_block(one: BlockSummary) -> bool:
    """Whether the numbers of a block are possible."""
    times = (one.start_s, one.duration_s, one.own_s)
    return all(0 <= time_s < math.inf for time_s in times) and one.index >= 0


def with_measured(
    incident: Incident, outcome: Validation, culprits: Sequence[Culprit], proof: Sequence[str]
) -> Incident:
    """The incident with the outcome of a validation; ``culprits``: who stood out; ``proof``: the same in words."""
    blamed = {rank for one in culprits for rank in (one.link.ranks if one.link else (one.rank,))}
    return replace(
        incident,
        culprits=tuple(culprits) or incident.culprits,
        victims=tuple(rank for rank in incident.victims if rank not in blamed),
        evidence=(*proof, *incident.evidence),
        missing=(*(() if culprits else incident.missing), *outcome.missing[:4]),
    )


def untreated_until(incident: Incident | None) -> int:
    """The first step that may have been made with a remedy of this incident in force; beyond all steps without one."""
    actions = incident.actions if incident is not None else ()
    steps = [one.step for one in actions if one.name.startswith(IN_FORCE) and one.step is not None]
    return min(steps) + 1 if steps else 1 << 62


def lost_s(incident: Incident, until_step: int, treated_steps: int, treated_lost_s: float) -> float | None:
    """Seconds of training that a slowdown has cost until this step; None: its pace is not known.

    ``treated_steps`` were made with a remedy in force; they have cost ``treated_lost_s``.
    """
    before_s, after_s = incident.iteration_before_s, incident.iteration_after_s
    if not before_s or not after_s or incident.onset_step is None:
        return None
    untreated = max(until_step - incident.onset_step - treated_steps, 0)
    return max(untreated * (after_s - before_s) + treated_lost_s, 0.0)


def silent_in_words(nodes: Sequence[str]) -> tuple[str, ...]:
    """What is missing of nodes whose agents did not answer."""
    return (f"profiles of {fold_nodes(nodes)}: no answer from there in time",) if nodes else ()


def newest_pace_s(cluster: Cluster) -> float | None:
    """The median iteration time in the heartbeats of the first nodes; None without any."""
    times: list[float] = []
    for node in list(cluster.nodes.values())[:_PACE_NODES]:
        if node.beat is not None and not node.silent:
            times += [one.iteration_s for one in node.beat.ranks[:1] if one.iteration_s > 0]
    return median(times) if times else None


def job_pace_s(rows: Sequence[IterationSummary]) -> float | None:
    """The median over all ranks of each rank's median iteration time; None without iterations."""
    from keepstep.core.iteration_table import medians

    return median(medians(rows, "duration_s").values()) if len(rows) else None


def ratios_of(
    before: Sequence[IterationSummary], after: Sequence[IterationSummary], field: str
) -> dict[int, float]:
    """How many times as long iterations, or their time in ``field``, take after the onset as before it, by rank."""
    from keepstep.core.iteration_table import medians

    if not len(before) or not len(after):
        return {}
    old, new = medians(before, field), medians(after, field)
    return {rank: new[rank] / old[rank] for rank in old if rank in new and old[rank] > 0}


def middle_s(times: Sequence[float]) -> float | None:
    """The median of some times; None without any."""
    return median(times) if times else None


def firmness(culprits: Sequence[Culprit]) -> int:
    """How sure the first culprit is, from 1 (low, or a path that is not known) to 3; 0 without a culprit."""
    if not culprits or (culprits[0].rank is None and culprits[0].link is None):
        return len(culprits[:1])
    return 1 + ("low", "medium", "high").index(culprits[0].confidence)


def middle_step(steps: Counter[int]) -> int:
    """The median of counted steps; -1 for none."""
    half, seen = sum(steps.values()) / 2, 0
    for step in sorted(steps):
        seen += steps[step]
        if seen >= half:
            return step
    return -1
