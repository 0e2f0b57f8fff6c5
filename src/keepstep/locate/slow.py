"""Who slows the job down: first localisation from medians per rank and transfers per path.

The principle is *self time*: the time in which a rank waited for nobody. A slow rank's grows, its victims' does not,
they wait longer instead. When no rank's self time explains the slowdown, the transfers are looked at: the time an
operation takes after its last member arrived (MegaTrace §III-C, GREYHOUND §4.3).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.iteration_table import column, distinct, newest_steps
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import GroupInfo, HostCause, IterationSummary, PeerTraffic
from keepstep.locate._arrivals import arrival_evidence
from keepstep.locate._links import SlowLinks, blame_links, transfers_against_peers, transfers_since
from keepstep.locate._profile import Floats, Ints, Profile, profile
from keepstep.locate._stages import chains
from keepstep.locate.clocks import Clocks
from keepstep.locate.infer import InferredLayout, infer_layout

MIN_RATIO = 1.08  # of self time to its healthy value, over what all ranks share
MIN_PEER_RATIO = 1.15  # the same against peers, when there is no healthy value
MIN_SHARE = 0.3  # of the job's slowdown that the worst rank must account for
MIN_JOB_SLOWDOWN = 1.03
_ENOUGH_SHARE = 0.6  # no need to look at links
_NOISE_FACTOR = 3.0
_MOST_NOISE = 0.12  # of self time: what is noisier still must not hide a rank that explains the slowdown
_USUAL_NOISE = 0.02  # of self time, where too few iterations tell
_LOST = 0.2  # of an iteration; a link is blamed from its least share of that on, 3 %
_ENOUGH_RANKS = 8  # to tell what is chance
_FAR = 6.0  # robust standard deviations of all ranks' growth
_LEAST_SPREAD = 0.003
_MAX_CULPRITS = 64
_HOST_EXPLAINS = 0.5  # of what a rank's own time grew: enough to be its cause
_LEAST_HOST_SHARE = 0.05  # of a rank's time, lost to what its agent saw


@dataclass(frozen=True, slots=True)
class _Growth:
    """What changed, per rank; arrays of shape (ranks,). ``base_s`` is the healthy self time or that of peers."""

    before: Profile | None
    after: Profile
    base_s: Floats
    gain_s: Floats  # of self time
    ratio: Floats
    common: float  # the ratio that all ranks share
    slowdown_s: float  # of the job, per iteration
    job_before_s: float
    job_after_s: float

    @property
    def ranks(self) -> Ints:
        return self.after.ranks

    @property
    def share(self) -> Floats:
        """Each rank's gain of self time over the job's slowdown."""
        return self.gain_s / max(self.slowdown_s, 1e-9)

    @property
    def lost_s(self) -> float:
        """What a link must explain a part of: without a healthy time at least a part of the iteration that matters."""
        return self.slowdown_s if self.before is not None else max(self.slowdown_s, _LOST * self.job_after_s)

    @property
    def share_of_all(self) -> float:
        """What the growth common to all ranks is of the job's; 0 when there is hardly any.

        Ratios, not seconds: when all ranks take twice as long, so do the bubbles between them.
        """
        if self.common < MIN_RATIO:
            return 0.0
        return (self.common - 1.0) / max(self.job_after_s / self.job_before_s - 1.0, 1e-9)


def locate_slow(
    before: Sequence[IterationSummary],
    after: Sequence[IterationSummary],
    groups: Mapping[str, GroupInfo],
    nodes: Mapping[int, str],
    clocks: Clocks | None = None,
    causes: Sequence[HostCause] = (),
    layout: InferredLayout | None = None,
    traffic: Sequence[PeerTraffic] = (),
) -> Diagnosis:
    """Name the ranks or links that make the job slower, worst first; nobody when the evidence does not carry it.

    Args:
        before: iterations of all ranks from healthy steps; empty when the job was slow from the first.
        after: iterations of all ranks from slow steps.
        groups: the process groups by name.
        nodes: node name by rank, of all ranks of the job.
        clocks: of the nodes; sharpens arrival order and messages, not needed.
        causes: what agents saw outside the processes.
        layout: roles of groups and stages of ranks; inferred when not given, and only as far as it is needed.
        traffic: what nodes sent to each other over TCP before and after; tells pairs apart inside a collective.
    """
    if not after:
        return _unknown((), ("profiles of the slow iterations: no rank sent one",))
    silent = sorted(set(nodes).difference(distinct(column(after, "rank")).tolist()))
    missing = (f"profiles of ranks {fold_ranks(silent)}: the cause may lie there",) if silent else ()
    few = newest_steps(before or after)
    inferred = functools.cache(lambda: layout or infer_layout(groups, few))
    growth = _growth_since(before, after) if before else _growth_against_peers(after, inferred())
    if growth is None:
        return _unknown((), (*missing, "iterations of the same ranks before and after"))
    if growth.before is not None and growth.job_after_s < MIN_JOB_SLOWDOWN * growth.job_before_s:
        fact = f"iterations take {growth.job_before_s * 1e3:.0f} -> {growth.job_after_s * 1e3:.0f} ms"
        return _unknown((fact,), missing, "the job is not slower in the given iterations")
    chosen = _slow_ranks(growth)
    if len(chosen) == 0 and silent:
        chosen = _starved(growth, causes, nodes)
    explained = float(growth.share[chosen].max(initial=0.0))
    links = SlowLinks()
    if max(explained, growth.share_of_all) < _ENOUGH_SHARE:
        if growth.before is None:
            transfers = transfers_against_peers(after, groups, nodes, clocks, inferred())
        else:
            transfers = transfers_since(before, after, groups, nodes, clocks, growth.lost_s)
        # a slow rank's own operations overlap its slow compute: they prove no slow link beside it
        blamed = {int(rank) for rank in growth.ranks[chosen]}
        apart = (
            [transfer for transfer in transfers if blamed.isdisjoint(transfer.ranks)] if blamed else transfers
        )
        links = blame_links(apart, nodes, growth.lost_s, traffic)
    if explained < MIN_SHARE and explained < links.share:
        chosen = chosen[:0]
    if len(chosen) == 0 and not links.culprits:
        return _nobody(growth, links, missing, causes)
    stages: Mapping[int, int] = {}
    if len(chosen):
        stages = chains(few).stages if layout is None else layout.stages
    return _diagnosis(growth, chosen, stages, links, missing, groups, nodes, clocks, causes, after)


def _growth_against_peers(after: Sequence[IterationSummary], layout: InferredLayout) -> _Growth:
    now = profile(after)
    base = _peer_base(now, layout)
    gain = now.self_s - base
    job = float(np.median(now.duration_s))
    slowdown = max(float(gain.max(initial=0.0)), 1e-9)
    ratio = now.self_s / np.maximum(base, 1e-9)
    return _Growth(None, now, base, gain, ratio, 1.0, slowdown, job - slowdown, job)


def _growth_since(before: Sequence[IterationSummary], after: Sequence[IterationSummary]) -> _Growth | None:
    """None when no rank tells of both."""
    then, now = profile(before), profile(after)
    shared = np.intersect1d(then.ranks, now.ranks)
    if len(shared) == 0:
        return None
    then, now = then.at(shared), now.at(shared)
    ratio = now.self_s / np.maximum(then.self_s, 1e-9)
    # a rank's victims do not grow, and up to a third may be slow themselves: the low quantile is what all share
    common = max(1.0, float(np.quantile(ratio, 0.3, method="lower")))
    job_before, job_after = float(np.median(then.duration_s)), float(np.median(now.duration_s))
    slowdown = max(job_after - job_before, 1e-9)
    gain = now.self_s - then.self_s
    return _Growth(then, now, then.self_s, gain, ratio, common, slowdown, job_before, job_after)


def _peer_base(now: Profile, layout: InferredLayout) -> Floats:
    """Per rank the lower median of self time among the ranks of its pipeline stage."""
    stage = np.array([layout.stages.get(int(rank), -1) for rank in now.ranks])
    base: Floats = np.zeros(len(stage))
    for index in np.unique(stage):
        here = stage == index
        ordered = np.sort(now.self_s[here])
        base[here] = ordered[(len(ordered) - 1) // 2]
    return base


def _slow_ranks(growth: _Growth) -> Ints:
    """Positions of the ranks whose own time explains the slowdown, worst first."""
    over_common = growth.gain_s - (growth.common - 1.0) * growth.base_s
    noise = growth.after.noise_s if growth.before is None else growth.before.noise_s
    noise = np.maximum(np.minimum(noise, _MOST_NOISE * growth.base_s), _USUAL_NOISE * growth.base_s)
    counts = growth.after.counts.astype(np.float64)
    error = noise * np.sqrt(
        1.6 / np.maximum(counts, 1) + (0 if growth.before is None else 1.6 / growth.before.counts)
    )
    least = MIN_PEER_RATIO if growth.before is None else MIN_RATIO
    slow = (
        (growth.ratio >= least * growth.common)
        & (over_common > _NOISE_FACTOR * error)
        & (over_common >= 0.04 * growth.job_before_s)
    )
    if growth.before is not None:
        slow |= _alone(growth, over_common)
    worst = float(over_common[slow].max(initial=0.0))
    slow &= over_common >= 0.1 * worst
    if growth.before is not None and worst < MIN_SHARE * growth.slowdown_s:
        return np.zeros(0, dtype=np.int64)
    positions = np.flatnonzero(slow)
    return positions[np.argsort(-over_common[positions], kind="stable")][:_MAX_CULPRITS]


def _alone(growth: _Growth, over_common: Floats) -> NDArray[np.bool_]:
    """Ranks that grew little but by all that the job did, and far more than any chance among so many ranks."""
    if len(growth.ranks) < _ENOUGH_RANKS:
        return np.zeros(len(growth.ranks), np.bool_)
    middle = float(np.median(growth.ratio))
    spread = 1.4826 * float(np.median(np.abs(growth.ratio - middle)))
    return (
        (growth.share >= _ENOUGH_SHARE)
        & (growth.ratio - middle >= _FAR * max(spread, _LEAST_SPREAD))
        & (over_common >= (MIN_JOB_SLOWDOWN - 1.0) * growth.job_before_s)
    )


def _starved(growth: _Growth, causes: Sequence[HostCause], nodes: Mapping[int, str]) -> Ints:
    """All that told anything are slow alike, but agents saw why, and the others' nodes are silent."""
    lost = {
        cause.rank: cause.share * growth.job_after_s for cause in causes if cause.share >= _LEAST_HOST_SHARE
    }
    gains = zip(growth.ranks.tolist(), growth.gain_s.tolist(), strict=True)
    found = [
        place
        for place, (rank, gain_s) in enumerate(gains)
        if lost.get(rank, 0.0) >= _HOST_EXPLAINS * gain_s > 0
    ]
    return np.array(found if len(found) == len(growth.ranks) else [], dtype=np.int64)


def _diagnosis(
    growth: _Growth,
    chosen: Ints,
    stages: Mapping[int, int],
    links: SlowLinks,
    missing: tuple[str, ...],
    groups: Mapping[str, GroupInfo],
    nodes: Mapping[int, str],
    clocks: Clocks | None,
    causes: Sequence[HostCause],
    after: Sequence[IterationSummary],
) -> Diagnosis:
    evidence: list[str] = []
    last = True
    if len(chosen):
        evidence.extend(_self_evidence(growth, chosen))
        arrival = arrival_evidence(after, int(growth.ranks[chosen[0]]), groups, nodes, clocks)
        evidence.extend(arrival.text)
        last = arrival.last is not False
    culprits = [_culprit(growth, int(position), stages, nodes, causes, last) for position in chosen]
    culprits += links.culprits
    evidence += links.evidence
    if growth.before is None:
        missing = (
            *missing,
            "a healthy time: the job was slow from the first iteration, peers are the measure",
        )
    blamed = {int(growth.ranks[p]) for p in chosen}
    blamed |= {rank for culprit in links.culprits if culprit.link for rank in culprit.link.ranks}
    return Diagnosis(
        "slow",
        tuple(culprits),
        _victims(growth, blamed),
        tuple(evidence),
        missing + links.missing,
        links.summary,
    )


def _culprit(
    growth: _Growth,
    position: int,
    stages: Mapping[int, int],
    nodes: Mapping[int, str],
    causes: Sequence[HostCause],
    last: bool,
) -> Culprit:
    rank = int(growth.ranks[position])
    stage, cause = _stage_and_cause(growth, position)
    details: list[str] = []
    if rank in stages:
        details.append(f"pipeline stage {stages[rank]}")
    host = _host_cause(rank, causes, nodes)
    if host is not None:
        lost_s = host.share * growth.job_after_s
        if lost_s >= _HOST_EXPLAINS * float(growth.gain_s[position]):
            cause = host.cause
        details.append(
            f"{host.cause}: {host.share:.0%} of the time lost{', ' + host.detail if host.detail else ''}"
        )
    confidence: Literal["high", "medium", "low"] = "high"
    if growth.before is None:
        confidence = "medium" if len(growth.ranks) >= 3 else "low"
    elif not last or float(growth.share[position]) < 0.5:
        confidence = "medium"
    ratio = round(float(growth.ratio[position]), 2)
    return Culprit(rank, None, nodes.get(rank, ""), stage, ratio, confidence, cause, "; ".join(details))


def _stage_and_cause(growth: _Growth, position: int) -> tuple[str, str]:
    """Where in the step the rank's own time grew, and what that says of the cause."""
    if growth.before is None:
        return "", "compute"
    gain = float(growth.gain_s[position])

    def grown(name: str) -> float:
        return float(getattr(growth.after, name)[position] - getattr(growth.before, name)[position])

    if grown("gc_s") >= 0.5 * gain:
        return "gc", "garbage collection"
    parts = {name: max(grown(f"{name}_s"), 0.0) for name in ("data", "backward", "optimizer")}
    parts["forward"] = max(gain - sum(parts.values()), 0.0)
    worst = max(parts, key=lambda name: parts[name])
    if worst == "data":
        return "data", "data loading"
    if worst in ("forward", "backward") and min(parts["forward"], parts["backward"]) >= 0.25 * gain:
        return "forward and backward", "compute"
    return worst, "compute"


def _host_cause(rank: int, causes: Sequence[HostCause], nodes: Mapping[int, str]) -> HostCause | None:
    one_node = len(set(nodes.values())) == 1
    fitting = [c for c in causes if c.rank == rank or (c.rank < 0 and one_node)]
    worst = max(fitting, key=lambda c: c.share, default=None)
    return worst if worst is not None and worst.share >= _LEAST_HOST_SHARE else None


def _self_evidence(growth: _Growth, chosen: Ints) -> list[str]:
    lines: list[str] = []
    for position in chosen[:3]:
        rank, base, now = growth.ranks[position], growth.base_s[position], growth.after.self_s[position]
        against = "peers'" if growth.before is None else "own"
        share = min(float(growth.share[position]), 1.0)
        extra = (
            "" if growth.before is None else f", {share:.0%} of the job's +{growth.slowdown_s * 1e3:.0f} ms"
        )
        lines.append(f"rank {rank}: {against} time {base * 1e3:.0f} -> {now * 1e3:.0f} ms{extra}")
    others = np.setdiff1d(np.arange(len(growth.ranks)), chosen)
    if len(others):
        ratio = growth.ratio[others]
        lines.append(f"{len(others)} other ranks: own time x{ratio.min():.2f} to x{ratio.max():.2f}")
    if growth.before is not None and len(others):
        waits = (growth.after.blocked_s - growth.before.blocked_s)[others]
        lines.append(f"they wait {float(np.median(waits)) * 1e3:+.0f} ms more per iteration")
    return lines


def _victims(growth: _Growth, blamed: set[int]) -> tuple[int, ...]:
    if growth.before is None:
        waits_more = growth.after.blocked_s >= 0.1 * growth.job_after_s
    else:
        waits_more = growth.after.blocked_s - growth.before.blocked_s >= 0.25 * growth.slowdown_s
    return tuple(rank for rank in growth.ranks[waits_more].tolist() if rank not in blamed)


def _nobody(
    growth: _Growth, links: SlowLinks, missing: tuple[str, ...], causes: Sequence[HostCause]
) -> Diagnosis:
    evidence = list(links.evidence)
    if growth.before is not None:
        least, most = float(growth.ratio.min()), float(growth.ratio.max())
        facts = f"own time of all {len(growth.ranks)} ranks x{least:.2f} to x{most:.2f}"
        together = growth.share_of_all
        if together >= MIN_SHARE:
            hosts = sorted({cause.cause for cause in causes if cause.share >= _LEAST_HOST_SHARE})
            evidence.append(f"{facts}: all ranks alike, {min(together, 1.0):.0%} of the slowdown")
            evidence.extend(f"agents saw {cause}" for cause in hosts)
            wanted = "what grew for all ranks: work per step, clocks of the devices, a shared resource"
            return _unknown(tuple(evidence), (*missing, wanted), "all ranks are slower alike")
        evidence.append(facts)
    if not links.missing:
        best = float(growth.share.max(initial=0.0))
        share = "" if growth.before is None else f" (the worst rank explains {max(best, 0.0):.0%})"
        missing = (*missing, f"neither one rank's own time nor one transfer explains the slowdown{share}")
        if growth.before is None:
            missing = (*missing, "a healthy time to compare with")
    return _unknown(tuple(evidence), missing + links.missing, links.summary or "cause unknown")


def _unknown(
    evidence: tuple[str, ...], missing: tuple[str, ...], summary: str = "cause unknown"
) -> Diagnosis:
    return Diagnosis("slow", (), (), evidence, missing, summary)
