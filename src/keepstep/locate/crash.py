"""Who died first: the other ranks die as a consequence, with errors about their connections."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from keepstep.core.events import phase_title
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.incident import Confidence, Culprit, Diagnosis
from keepstep.core.lost_connection import tells_of_another
from keepstep.core.node_clocks import ClockOffsets
from keepstep.core.ranges import fold_ranks

_SAME_MOMENT_S = 0.5  # deaths nearer to each other than this have no order
_MAX_CULPRITS = 64
_ENDED_BY_LAUNCHER = (128 + signal.SIGTERM, 128 + signal.SIGINT)


def locate_crash(evidence: Evidence) -> Diagnosis:
    """Name the process that died first of its own doing; those that lost their connection to it are victims.

    It reads ``findings``, ``states`` (of the ranks that are still there), ``nodes`` and ``clocks``. Without clocks,
    deaths on different nodes are told apart by their messages.
    """
    crashes = _one_per_rank([finding for finding in evidence.findings if finding.kind == "crash"])
    if not crashes:
        wanted = ("a finding about a process that died",)
        return Diagnosis("crash", missing=wanted, summary="cause unknown")
    offsets = evidence.offsets_among({finding.node for finding in crashes})
    clocks_known = offsets is not None or len({finding.node for finding in crashes}) == 1
    # When each process died: on the reference's clock where clocks are known, else on its own node's.
    times = {f.rank: offsets.to_reference_s(f.node, f.time_s) if offsets else f.time_s for f in crashes}
    order = sorted(
        crashes, key=lambda f: (_is_consequence(f), times[f.rank] if clocks_known else 0.0, f.rank)
    )
    first = order[0]
    tolerance_s = _tolerance_s(crashes, offsets)
    own = [finding for finding in order if not _is_consequence(finding)]
    together = [f for f in own if abs(times[f.rank] - times[first.rank]) <= tolerance_s] or [first]
    confidence = _confidence(first, together, crashes)
    culprits = tuple(_culprit(finding, evidence.nodes, confidence) for finding in together[:_MAX_CULPRITS])
    blamed = {finding.rank for finding in together}
    died = {finding.rank for finding in crashes}
    waiting = {state.rank for state in evidence.states if state.rank not in died and state.in_flight}
    victims = tuple(sorted((died | waiting) - blamed))
    lines = _lines(first, together, crashes, times, clocks_known, waiting)
    missing: list[str] = []
    if _is_consequence(first):
        missing.append("the first death: every message is about a lost connection")
    if not clocks_known and len(together) > 1:
        missing.append("clock offsets between the nodes: which of the deaths came first cannot be told")
    reason = f": {first.message[:120]}" if first.message else ""
    headline = f"rank {first.rank} died ({_death(first)}){reason}"
    return Diagnosis("crash", culprits, victims, lines, tuple(missing), headline)


def _one_per_rank(crashes: Sequence[Finding]) -> list[Finding]:
    """Agent and launcher may both report a death: the one with a message, then the earlier, counts."""
    best: dict[int, Finding] = {}
    for finding in sorted(crashes, key=lambda one: (not one.message, one.time_s)):
        best.setdefault(finding.rank, finding)
    return list(best.values())


def _is_consequence(finding: Finding) -> bool:
    """Whether the process died of another's death, or was ended because of it."""
    if finding.message:
        return tells_of_another(finding.message)
    return finding.exit_code in _ENDED_BY_LAUNCHER


def _tolerance_s(crashes: Sequence[Finding], offsets: ClockOffsets | None) -> float:
    """Deaths nearer to each other than this cannot be put in order."""
    if len({finding.node for finding in crashes}) == 1:
        return _SAME_MOMENT_S
    if offsets is None:
        return math.inf
    return _SAME_MOMENT_S + 2 * max(offsets.bound_s(finding.node, finding.time_s) for finding in crashes)


def _confidence(first: Finding, together: Sequence[Finding], crashes: Sequence[Finding]) -> Confidence:
    """How sure it is that the processes that died ``together`` are the cause of the other deaths."""
    if _is_consequence(first):
        return "low"
    if len(together) == 1:
        return "high"
    return "medium" if 2 * len(together) <= len(crashes) else "low"


def _culprit(finding: Finding, nodes: Mapping[int, str], confidence: Confidence) -> Culprit:
    node = finding.node or nodes.get(finding.rank, "")
    detail = "; ".join(filter(None, (_death(finding), finding.message[:300])))
    phase = phase_title(finding.phase)
    return Culprit(finding.rank, None, node, phase, 0.0, confidence, "process died", detail)


def _death(finding: Finding) -> str:
    with suppress(ValueError):
        return f"killed by {signal.Signals(finding.exit_code - 128).name}"
    return f"exit code {finding.exit_code}"


def _lines(
    first: Finding,
    together: Sequence[Finding],
    crashes: Sequence[Finding],
    times: Mapping[int, float],
    clocks_known: bool,
    waiting: set[int],
) -> tuple[str, ...]:
    lines = [f"rank {first.rank}: {_death(first)} at step {first.step}"]
    if len(together) > 1:
        # Errors of one program differ in numbers, such as ranks and addresses.
        errors = {re.sub(r"\d+", "#", finding.message) or finding.rank for finding in together}
        alike = "with the same error: it looks like the program" if len(errors) == 1 else "at the same moment"
        lines.append(f"ranks {fold_ranks(f.rank for f in together)} died {alike}")
    later = [finding for finding in crashes if finding not in together]
    lost = [finding.rank for finding in later if _is_consequence(finding)]
    if lost:
        lines.append(f"ranks {fold_ranks(lost)} lost their connections to it or were ended")
    own = [f.rank for f in later if not _is_consequence(f)]
    if own and clocks_known:
        after = min(times[rank] for rank in own) - times[first.rank]
        lines.append(f"ranks {fold_ranks(own)} died {after:.1f} s or more later with errors of their own")
    if waiting:
        lines.append(f"ranks {fold_ranks(waiting)} are left waiting in operations")
    return tuple(lines)
