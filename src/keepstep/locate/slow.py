"""Who slows the job down: first localisation from medians per rank and transfers per path.

The principle is *self time*: the time in which a rank waited for nobody. A slow rank's grows, its victims' does not,
they wait longer instead. When no rank's self time explains the slowdown, the transfers are looked at: the time an
operation takes after its last member arrived (MegaTrace §III-C, GREYHOUND §4.3).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Confidence, Culprit, Diagnosis
from keepstep.core.iteration_table import distinct, table_of
from keepstep.core.ranges import fold_ranks
from keepstep.core.slow_steps import UNSTEADY
from keepstep.core.summary import CPU_CAUSES, HostCause, IterationSummary
from keepstep.locate._arrivals import arrival_evidence
from keepstep.locate._between_calls import slow_host
from keepstep.locate._growth import MIN_RATIO, Growth, growth_against_peers, growth_since
from keepstep.locate._held_by_host import waits_grown
from keepstep.locate._profile import Floats, Ints
from keepstep.locate._slow_links import (
    SlowLinks,
    blame_links,
    links_by_counters,
    transfers_against_peers,
    transfers_since,
)
from keepstep.locate._stages import chains
from keepstep.locate._steadiness import slowest_in_turn_s, steady_ranks
from keepstep.locate.infer import layout_of

MIN_PEER_RATIO = 1.15  # least ratio of a slow rank's self time to its peers', when there is no healthy time
MIN_SHARE = 0.3  # least part of the job's slowdown that the worst rank must account for
MIN_JOB_SLOWDOWN = 1.03
_ENOUGH_SHARE = 0.6  # part of the slowdown from which on there is no need to look at links
_NOISE_FACTOR = 3.0  # standard errors by which a slow rank must have grown
_MOST_NOISE = 0.12  # part of self time: even more noise must not hide a rank that explains the slowdown
_EVEN_NOISE = 0.05  # part of self time: work that differs by more from step to step is uneven
_USUAL_NOISE = 0.02  # part of self time that is assumed where too few iterations show the noise
_ENOUGH_RANKS = 8  # fewer do not show how far ranks differ by chance
_FAR = 6.0  # robust standard deviations of all ranks' growth
_LEAST_SPREAD = 0.003  # smallest standard deviation of all ranks' growth that is believed
_MAX_CULPRITS = 64
_HOST_EXPLAINS = 0.5  # part of a rank's growth that a host cause must account for to be named as the cause
_MOST_UNSEEN = 0.5  # part of a GPU's growth that may be waiting in collectives which did not block its stream
_LEAST_WAIT = 0.25  # part of a GPU's growth that another rank must wait longer, if it slows the job down
_SURE_RATIO = 1.1  # growth of a rank's own time that is not taken for noise on a busy machine
_TOO_FEW = "more iterations: in few that differ a rank may be the slow one by chance"
_LEAST_HOST_SHARE = 0.05  # part of a rank's time; a smaller loss to a host cause is not mentioned


def locate_slow(evidence: Evidence) -> Diagnosis:
    """Name the ranks or links that make the job slower, worst first; nobody when the evidence does not carry it.

    It reads ``before``, ``after``, ``groups``, ``nodes``, ``clocks``, ``causes``, ``layout``, ``traffic``,
    ``ports``.
    """
    before, after = table_of(evidence.before), table_of(evidence.after)
    if not len(after):
        return _unknown((), ("profiles of the slow iterations: no rank sent one",))
    evidence = replace(evidence, before=before, after=after)
    silent = sorted(set(evidence.nodes).difference(distinct(after.column("rank")).tolist()))
    missing = (f"profiles of ranks {fold_ranks(silent)}: the cause may lie there",) if silent else ()
    layout = functools.cache(lambda: layout_of(evidence))
    growth = growth_since(before, after) if len(before) else growth_against_peers(after, layout())
    if growth is None:
        return _unknown((), (*missing, "iterations of the same ranks before and after"))
    if growth.before is not None and growth.job_after_s < MIN_JOB_SLOWDOWN * growth.job_before_s:
        fact = f"iterations take {growth.job_before_s * 1e3:.0f} -> {growth.job_after_s * 1e3:.0f} ms"
        return _unknown((fact,), missing, "the job is not slower in the given iterations")
    evidence = replace(evidence, causes=_that_explain(growth, evidence.causes))
    slow = _slow_ranks(growth)
    chosen = _awaited(growth, _that_computed(evidence, growth, slow))
    if starved := len(chosen) == 0 and bool(silent):
        chosen = _starved(growth, evidence.causes)
    explained = float(growth.share[chosen].max(initial=0.0))
    links = SlowLinks()
    if max(explained, growth.share_of_all) < _ENOUGH_SHARE:
        if growth.before is None:
            transfers = transfers_against_peers(evidence, layout())
        else:
            transfers = transfers_since(evidence, growth.lost_s)
        # A slow rank's own operations overlap its slow compute: they prove no slow link beside it.
        blamed = {int(rank) for rank in growth.ranks[chosen]}
        apart = [transfer for transfer in transfers if blamed.isdisjoint(transfer.ranks)]
        links = blame_links(apart, evidence, growth.lost_s)
    if explained < MIN_SHARE and explained < links.share:
        chosen = chosen[:0]
    surely, turns = chosen, tuple[str, ...]()
    if not starved:
        chosen, surely, turns = _steady(growth, after, slow, chosen)
    if turns and not len(chosen):
        return _unknown(turns, (*missing, "iterations in which one rank is the slow one"), UNSTEADY)
    if len(chosen) == 0 and not links.culprits:
        nobody = _nobody(growth, links, missing, evidence.causes)
        torchs = [group for group in evidence.groups.values() if not group.is_communicator]
        if all(group.records_waits for group in torchs) or growth.on_gpu.all():
            return nobody  # Waits are known, so no witness is needed.
        return _by_witnesses(nobody, evidence, growth)
    stages: Mapping[int, int] = {}
    if len(chosen):
        few = before if len(before) else after
        stages = layout().stages if evidence.layout else chains(few.newest_steps()).stages
    diagnosis = _diagnosis(evidence, growth, chosen, stages, links, missing)
    return diagnosis.doubted(_TOO_FEW, {None, *growth.ranks[surely].tolist()})


def _slow_ranks(growth: Growth) -> Ints:
    """Positions of the ranks whose own time explains the slowdown, worst first."""
    over_common = growth.gain_s - (growth.common - 1.0) * growth.base_s
    noise = growth.after.noise_s if growth.before is None else growth.before.noise_s
    noise = np.maximum(np.minimum(noise, _MOST_NOISE * growth.base_s), _USUAL_NOISE * growth.base_s)
    counts = growth.after.counts.astype(np.float64)
    of_before = 0 if growth.before is None else 1.6 / growth.before.counts
    error = noise * np.sqrt(1.6 / np.maximum(counts, 1) + of_before)
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


def _awaited(growth: Growth, chosen: Ints) -> Ints:
    """The chosen ranks, or none if no other rank waits longer than before.

    What a GPU takes longer for while it would wait anyway slows nobody down.
    """
    others = np.setdiff1d(np.arange(len(growth.ranks)), chosen)
    if growth.before is None or not len(chosen) or not len(others) or not growth.on_gpu.all():
        return chosen
    longer = float((growth.after.blocked_s - growth.before.blocked_s)[others].max())
    return chosen if longer >= _LEAST_WAIT * float(growth.gain_s[chosen].max()) else chosen[:0]


def _that_computed(evidence: Evidence, growth: Growth, chosen: Ints) -> Ints:
    """The chosen ranks without those that were in collectives for as much longer, waiting for others of them.

    What blocked their streams explains such a wait only in part, as messages have blocked them, too. A rank that waits
    for longer than it has grown holds nobody up, so that only the one that has grown most is named in spite of that.
    """
    if growth.before is None or len(chosen) < 2 or not growth.on_gpu.all():
        return chosen
    waits, gain_s = waits_grown(evidence, growth.ranks[chosen].tolist()), growth.gain_s[chosen]
    waits_s = np.array([waits[int(rank)] for rank in growth.ranks[chosen]])
    unseen_s = waits_s - np.maximum(growth.after.blocked_s - growth.before.blocked_s, 0.0)[chosen]
    holds_up = (waits_s < gain_s) | (gain_s == gain_s.max())
    return chosen[(unseen_s < _MOST_UNSEEN * gain_s) & holds_up]


def _steady(
    growth: Growth, after: Sequence[IterationSummary], slow: Ints, chosen: Ints
) -> tuple[Ints, Ints, tuple[str, ...]]:
    """The chosen ranks that are slow in most slow iterations, those that surely are, and lines on the others."""
    ranks, base_s = growth.ranks, dict(zip(growth.ranks.tolist(), growth.base_s.tolist(), strict=True))
    slow_s = (growth.job_before_s + growth.job_after_s) / 2 if growth.before is not None else 0.0
    if not len(chosen):
        known = growth.before is not None and growth.share_of_all < _ENOUGH_SHARE
        longer_s = slowest_in_turn_s(after, base_s, slow_s) if known else 0.0
        return chosen, chosen, (UNSTEADY,) if longer_s >= _ENOUGH_SHARE * growth.slowdown_s else ()
    some = (ranks[slow].tolist(), ranks[chosen].tolist())
    before = growth.before
    middle_s = float(np.median(growth.base_s))
    usual_s = float(np.median(before.noise_s)) if before is not None else 0.0
    usual_s = min(max(usual_s, _USUAL_NOISE * middle_s), _EVEN_NOISE * middle_s)
    steady, surely, turns = steady_ranks(after, base_s, *some, slow_s, usual_s)
    kept, sure = (np.array([rank in those for rank in some[1]], np.bool_) for those in (steady, surely))
    return chosen[kept], chosen[sure], turns


def _alone(growth: Growth, over_common: Floats) -> NDArray[np.bool_]:
    """Mask of ranks that grew by little, but by as much as the job, and by far more than chance explains."""
    if len(growth.ranks) < _ENOUGH_RANKS:
        return np.zeros(len(growth.ranks), np.bool_)
    middle = float(np.median(growth.ratio))
    spread = 1.4826 * float(np.median(np.abs(growth.ratio - middle)))
    return (
        (growth.share >= _ENOUGH_SHARE)
        & (growth.ratio - middle >= _FAR * max(spread, _LEAST_SPREAD))
        & (over_common >= (MIN_JOB_SLOWDOWN - 1.0) * growth.job_before_s)
    )


def _that_explain(growth: Growth, causes: Sequence[HostCause]) -> tuple[HostCause, ...]:
    """The causes without those that keep a host from its work while its GPU has enough of it."""
    ahead = set(growth.ranks[growth.on_gpu & ~growth.follows_host].tolist())
    return tuple(one for one in causes if one.cause not in CPU_CAUSES or one.rank not in ahead)


def _starved(growth: Growth, causes: Sequence[HostCause]) -> Ints:
    """Positions of all ranks, if a cause that an agent saw explains the growth of each.

    Then all ranks that reported are slow alike, and the ranks that are not slow did not report.
    """
    graver = [cause for cause in causes if cause.share >= _LEAST_HOST_SHARE]
    lost = {cause.rank: cause.share * growth.job_after_s for cause in graver}
    gains = zip(growth.ranks.tolist(), growth.gain_s.tolist(), strict=True)
    explained = all(lost.get(rank, 0.0) >= _HOST_EXPLAINS * gain_s > 0 for rank, gain_s in gains)
    return np.arange(len(growth.ranks) if explained else 0)


def _by_witnesses(nobody: Diagnosis, evidence: Evidence, growth: Growth) -> Diagnosis:
    """The diagnosis with whom other witnesses name, where waiting cannot be told from work.

    On a device's backend a victim's own time grows as the culprit's does, and transfers have no times. Where waits are
    recorded it does not, and a cause on a few ranks does not explain that all have become slower.
    """
    culprits = _held_up(evidence, growth)
    links = SlowLinks() if culprits else links_by_counters(evidence)
    culprits += links.culprits
    if not culprits and growth.before is not None:
        host = slow_host(evidence, growth.slowdown_s)
        told = (*host.evidence, *nobody.evidence)
        if host.culprits:
            return Diagnosis("slow", host.culprits, host.victims, told)
        nobody = replace(nobody, evidence=told)
    blamed = {culprit.rank for culprit in culprits}
    blamed.update(rank for culprit in culprits if culprit.link for rank in culprit.link.ranks)
    victims = tuple(rank for rank in growth.ranks.tolist() if rank not in blamed) if culprits else ()
    told = (*nobody.evidence, *links.evidence)
    summary = links.summary or nobody.summary
    return replace(nobody, culprits=culprits, victims=victims, evidence=told, summary=summary)


def _held_up(evidence: Evidence, growth: Growth) -> tuple[Culprit, ...]:
    """The few ranks of which an agent saw a cause that explains the slowdown."""
    known = set(growth.ranks.tolist())
    graver = [
        cause
        for cause in sorted(evidence.causes, key=lambda cause: -cause.share)
        if cause.rank in known and cause.share * growth.job_after_s >= _HOST_EXPLAINS * growth.slowdown_s
    ]
    worst = {cause.rank: cause for cause in reversed(graver)}
    if not 0 < len(worst) <= max(1, len(known) // 4):
        return ()
    return tuple(
        Culprit(
            *(rank, None, evidence.nodes.get(rank, ""), "", 0.0, "medium", cause.cause),
            "; ".join(filter(None, (f"{cause.share:.0%} of its time lost, no other rank's", cause.detail))),
        )
        for rank, cause in sorted(worst.items())
    )


def _diagnosis(
    evidence: Evidence,
    growth: Growth,
    chosen: Ints,
    stages: Mapping[int, int],
    links: SlowLinks,
    missing: tuple[str, ...],
) -> Diagnosis:
    """The verdict on the ranks at positions ``chosen`` and on ``links``."""
    lines: list[str] = []
    last = True
    if len(chosen):
        last, told = arrival_evidence(evidence, int(growth.ranks[chosen[0]]))
        # The host's calls were looked at as they were made; on the GPU it takes both witnesses to be sure.
        last = last and (bool(told) or not growth.on_gpu[chosen[0]])
        lines = _self_evidence(growth, chosen) + told
    culprits = [_culprit(evidence, growth, int(position), stages, last) for position in chosen]
    if growth.before is None:
        wanted = "a healthy time, as the job was slow from the first iterations on: peers are the measure"
        missing = (*missing, wanted)
    blamed = {int(growth.ranks[p]) for p in chosen}
    blamed |= {rank for culprit in links.culprits if culprit.link for rank in culprit.link.ranks}
    named, told = (*culprits, *links.culprits), (*lines, *links.evidence)
    return Diagnosis("slow", named, _victims(growth, blamed), told, missing + links.missing, links.summary)


def _culprit(
    evidence: Evidence, growth: Growth, position: int, stages: Mapping[int, int], last: bool
) -> Culprit:
    """The rank at ``position`` as a culprit. ``last``: whether it arrives after its peers, as a slow rank does."""
    rank = int(growth.ranks[position])
    stage, cause = _stage_and_cause(growth, position)
    details: list[str] = []
    if rank in stages:
        details.append(f"pipeline stage {stages[rank]}")
    on_host = bool(growth.follows_host[position])
    if on_host:
        details.append("its GPU waits for the host")
    host = _host_cause(evidence, rank)
    if host is not None:
        lost_s = host.share * growth.job_after_s
        if lost_s >= _HOST_EXPLAINS * float(growth.gain_s[position]):
            cause = host.cause
        why = f", {host.detail}" if host.detail else ""
        details.append(f"{host.cause}: {host.share:.0%} of the time lost{why}")
    confidence: Confidence = "high"
    if growth.before is None:
        confidence = "medium" if len(growth.ranks) >= 3 else "low"
    elif not last or float(growth.share[position]) < 0.5 or float(growth.ratio[position]) < _SURE_RATIO:
        confidence = "medium"
    elif cause == "run queue" or (host is not None and host.cause == "run queue" and on_host):
        confidence = "medium"  # other processes that take its CPU come and go
    ratio = round(float(growth.ratio[position]), 2)
    node = evidence.nodes.get(rank, "")
    return Culprit(rank, None, node, stage, ratio, confidence, cause, "; ".join(details))


def _stage_and_cause(growth: Growth, position: int) -> tuple[str, str]:
    """Where in the step the rank's own time grew, and the cause that this suggests."""
    if growth.on_gpu[position] and not growth.follows_host[position]:
        return "", "compute on the GPU"
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
    if growth.on_gpu[position]:
        return worst, "work on the host"
    if worst in ("forward", "backward") and min(parts["forward"], parts["backward"]) >= 0.25 * gain:
        return "forward and backward", "compute"
    return worst, "compute"


def _host_cause(evidence: Evidence, rank: int) -> HostCause | None:
    """The worst cause that an agent saw for the rank, or for the whole node of a job on one node."""
    one_node = len(set(evidence.nodes.values())) == 1
    fitting = [c for c in evidence.causes if c.rank == rank or (c.rank < 0 and one_node)]
    worst = max(fitting, key=lambda c: c.share, default=None)
    return worst if worst is not None and worst.share >= _LEAST_HOST_SHARE else None


def _self_evidence(growth: Growth, chosen: Ints) -> list[str]:
    """Lines on how the self time of the slow ranks and of the others has grown."""
    lines: list[str] = []
    for position in chosen[:3]:
        rank, base, now = growth.ranks[position], growth.base_s[position], growth.after.self_s[position]
        against = "peers'" if growth.before is None else "own"
        line = f"rank {rank}: {against} time {base * 1e3:.0f} -> {now * 1e3:.0f} ms"
        if growth.before is not None:
            share = min(float(growth.share[position]), 1.0)
            line += f", {share:.0%} of the job's +{growth.slowdown_s * 1e3:.0f} ms"
        lines.append(line)
    others = np.setdiff1d(np.arange(len(growth.ranks)), chosen)
    if len(others):
        ratio = growth.ratio[others]
        lines.append(f"{len(others)} other ranks: own time x{ratio.min():.2f} to x{ratio.max():.2f}")
        if growth.before is not None:
            waits = (growth.after.blocked_s - growth.before.blocked_s)[others]
            lines.append(f"they wait {float(np.median(waits)) * 1e3:+.0f} ms more per iteration")
    return lines


def _victims(growth: Growth, blamed: set[int]) -> tuple[int, ...]:
    """Ranks that wait longer than before and are not blamed."""
    if growth.before is None:
        waits_more = growth.after.blocked_s >= 0.1 * growth.job_after_s
    else:
        waits_more = growth.after.blocked_s - growth.before.blocked_s >= 0.25 * growth.slowdown_s
    return tuple(rank for rank in growth.ranks[waits_more].tolist() if rank not in blamed)


def _nobody(
    growth: Growth, links: SlowLinks, missing: tuple[str, ...], causes: Sequence[HostCause]
) -> Diagnosis:
    """The diagnosis when nobody can be named: all ranks are slower alike, or the cause is unknown."""
    evidence = list(links.evidence)
    if growth.before is not None:
        least, most = float(growth.ratio.min()), float(growth.ratio.max())
        facts = f"own time of all {len(growth.ranks)} ranks x{least:.2f} to x{most:.2f}"
        together = growth.share_of_all
        if together >= MIN_SHARE:
            hosts = _seen([cause for cause in causes if cause.share >= _LEAST_HOST_SHARE])
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


def _seen(causes: Sequence[HostCause]) -> list[str]:
    """The causes by name, each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for cause in causes:
        ranks.setdefault(cause.cause, []).extend([cause.rank] if cause.rank >= 0 else [])
    return [f"{name} on ranks {fold_ranks(on)}" if on else name for name, on in sorted(ranks.items())]


def _unknown(
    evidence: tuple[str, ...], missing: tuple[str, ...], summary: str = "cause unknown"
) -> Diagnosis:
    return Diagnosis("slow", (), (), evidence, missing, summary)
