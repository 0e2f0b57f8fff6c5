"""Who caused the death of a job's processes.

A process that dies of its own doing is the cause; the others lose their connections to it. Where all that died only
tell of others (a timeout, a lost connection), the cause is who they waited for: one that lives, or one that left.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.core.deaths import DIED, how_it_died, is_vague, testimony, was_asked
from keepstep.core.events import phase_title
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.incident import Confidence, Culprit, Diagnosis
from keepstep.core.lost_connection import is_of_another_type, ranks_named, tells_of_a_timeout
from keepstep.core.node_clocks import ClockOffsets
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import OpInFlight, RankState
from keepstep.locate._calls import ranks_of
from keepstep.locate._given_up import as_they_waited, waited_s
from keepstep.locate._left import LEFT, ONE_MORE, left_well, place_of
from keepstep.locate.hang import locate_hang
from keepstep.locate.mismatch import locate_mismatch
from keepstep.locate.waits import waits_seen

_SAME_MOMENT_S = 0.5  # deaths nearer to each other than this have no order
_LONG_S = (
    5.0  # a rank that failed after so long in an operation, without words, is taken to have lost patience
)
_MOST_CULPRITS = 64
_ABORTED = 128 + signal.SIGABRT


@dataclass(frozen=True, slots=True)
class _Deaths:
    """The deaths of one crash, arranged for the questions that the diagnosing functions ask."""

    given: Evidence
    all: Sequence[Finding]  # one a rank
    states: Mapping[int, RankState]  # state by rank, of the ranks that reported
    times: Mapping[int, float]  # when each died: on the reference's clock, else on its own node's
    clocks_known: bool
    tolerance_s: float  # deaths nearer to each other than this cannot be put in order

    def of(self, *kinds: str) -> list[Finding]:
        """The deaths of these kinds (`_kind`), in order of time."""
        found = [one for one in self.all if self._kind(one) in kinds]
        return sorted(found, key=lambda one: (self.times[one.rank] if self.clocks_known else 0.0, one.rank))

    def _kind(self, death: Finding) -> str:
        """What a death tells: ``own``, ``alone`` (no words, but it was in no operation), ``unclear`` or ``echo``."""
        told, state = testimony(death), self.states.get(death.rank)
        if told == "echo":
            return told
        failed = state is not None and bool(state.failed)
        if told == "own":
            # A process that has lost a peer may still crash at its end, or leave with words about that.
            return "unclear" if failed and is_vague(death) else told
        if was_asked(death) or failed:
            return "unclear"
        in_operation = state is not None and bool(state.in_flight)
        return "unclear" if death.exit_code == _ABORTED and in_operation else "alone"


def locate_crash(evidence: Evidence) -> Diagnosis:
    """Name who died of its own doing, or else who those that died waited for; nobody where that is not known.

    It reads ``findings`` (deaths, and ranks that left with exit code 0), ``states`` (of all ranks just after the first
    death), ``groups``, ``nodes`` and ``clocks``. Without clocks, deaths on different nodes are told apart by their
    messages.
    """
    crashes = _one_per_rank([finding for finding in evidence.findings if finding.kind == "crash"])
    if not crashes:
        wanted = ("a finding about a process that died",)
        return Diagnosis("crash", missing=wanted, summary="cause unknown")
    deaths = _arranged(evidence, crashes)
    own = deaths.of("own", "alone")
    if (mismatch := _diagnose_mismatch(deaths, own)) is not None:
        return mismatch
    if own and not _came_late(deaths, own[0]):
        return _diagnose_own(deaths, own)
    if explained := _diagnose_awaited(deaths):
        return explained
    if own:
        return _diagnose_own(deaths, own)
    if named := _diagnose_named(deaths):
        return named
    asked = [one for one in deaths.of("unclear") if was_asked(one)]
    if len(asked) == 1 and 2 * len(asked) <= len(evidence.nodes):
        return _diagnose_own(deaths, asked)
    if asked:
        return _diagnose_asked(deaths, asked)
    return _diagnose_unknown(deaths)


def _one_per_rank(crashes: Sequence[Finding]) -> list[Finding]:
    """Agent and launcher may both report a death: the one with a message, then the earlier, counts."""
    best: dict[int, Finding] = {}
    for finding in sorted(crashes, key=lambda one: (not one.message, one.time_s)):
        best.setdefault(finding.rank, finding)
    return list(best.values())


def _arranged(evidence: Evidence, crashes: Sequence[Finding]) -> _Deaths:
    offsets = evidence.offsets_among({finding.node for finding in crashes})
    one_node = len({finding.node for finding in crashes}) == 1
    times = {f.rank: offsets.to_reference_s(f.node, f.time_s) if offsets else f.time_s for f in crashes}
    states = {state.rank: state for state in evidence.states}
    known = offsets is not None or one_node
    return _Deaths(evidence, crashes, states, times, known, _tolerance_s(crashes, offsets))


def _tolerance_s(crashes: Sequence[Finding], offsets: ClockOffsets | None) -> float:
    """Deaths nearer to each other than this cannot be put in order."""
    if len({finding.node for finding in crashes}) == 1:
        return _SAME_MOMENT_S
    if offsets is None:
        return math.inf
    return _SAME_MOMENT_S + 2 * max(offsets.bound_s(finding.node, finding.time_s) for finding in crashes)


# --- those that died of their own doing ---------------------------------------------------------------------------


def _came_late(deaths: _Deaths, own: Finding) -> bool:
    """Whether others had lost patience before this rank died of an error, so that its death is not what they met."""
    before_s = deaths.times[own.rank] - deaths.tolerance_s
    return bool(own.message) and any(
        deaths.times[one.rank] < before_s and _has_timed_out(deaths, one)
        for one in deaths.of("echo", "unclear")
    )


def _has_timed_out(deaths: _Deaths, death: Finding) -> bool:
    if death.message:
        return tells_of_a_timeout(death.message)
    state = deaths.states.get(death.rank)
    return state is not None and any(waited_s(flight) >= _LONG_S for flight in state.failed)


def _diagnose_own(deaths: _Deaths, own: Sequence[Finding]) -> Diagnosis:
    """Name the process that died first of its own doing, and those that died so in the same moment."""
    first = own[0]
    together = [
        one for one in own if abs(deaths.times[one.rank] - deaths.times[first.rank]) <= deaths.tolerance_s
    ]
    confidence = _confidence(deaths, together)
    nodes = deaths.given.nodes
    culprits = tuple(_culprit(finding, nodes, confidence) for finding in together[:_MOST_CULPRITS])
    blamed = {finding.rank for finding in together}
    died = {finding.rank for finding in deaths.all}
    waiting = {s.rank for s in deaths.given.states if s.rank not in died and (s.in_flight or s.failed)}
    missing: list[str] = []
    if not deaths.clocks_known and len(together) > 1:
        missing.append("clock offsets between the nodes: which of the deaths came first cannot be told")
    if not first.message and testimony(first) != "own":
        missing.append(f"the last words of rank {first.rank}")
    lines = _lines(deaths, together, own, waiting - blamed)
    reason = f": {first.message[:120]}" if first.message else ""
    headline = f"rank {first.rank} died ({how_it_died(first)}){reason}"
    victims = tuple(sorted((died | waiting) - blamed))
    return Diagnosis("crash", culprits, victims, lines, tuple(missing), headline)


def _confidence(deaths: _Deaths, together: Sequence[Finding]) -> Confidence:
    """How sure it is that the processes that died ``together`` are the cause of the other deaths.

    A signal from outside ends no process because of another's death, unless it ends the whole job.
    """
    if any(testimony(one) != "own" for one in together):
        return "medium" if 2 * len(together) <= max(len(deaths.all), 2) else "low"
    if len(together) == 1:
        return "high"
    world = max(len(deaths.given.nodes), len(deaths.states), len(deaths.all))
    if all(not one.message for one in together) and len(together) < world:
        return "high"
    return "medium" if 2 * len(together) <= len(deaths.all) else "low"


def _culprit(finding: Finding, nodes: Mapping[int, str], confidence: Confidence) -> Culprit:
    node = finding.node or nodes.get(finding.rank, "")
    detail = "; ".join(filter(None, (how_it_died(finding), finding.message[:300])))
    phase = phase_title(finding.phase)
    return Culprit(finding.rank, None, node, phase, 0.0, confidence, DIED, detail)


def _lines(
    deaths: _Deaths, together: Sequence[Finding], own: Sequence[Finding], waiting: Collection[int]
) -> tuple[str, ...]:
    first, times = together[0], deaths.times
    at = f" at step {first.step}" if first.step >= 0 else ""
    lines = [f"rank {first.rank}: {how_it_died(first)}{at}"]
    if len(together) > 1:
        # Errors of one program differ in numbers, such as ranks and addresses.
        errors = {re.sub(r"\d+", "#", finding.message) or finding.rank for finding in together}
        alike = "with the same error: it looks like the program" if len(errors) == 1 else "at the same moment"
        lines.append(f"ranks {fold_ranks(f.rank for f in together)} died {alike}")
    lost = [one.rank for one in deaths.of("echo", "unclear") if one not in together]
    if lost:
        lines.append(f"{_ranks(lost)} lost their connections to it or were ended")
    later = [f.rank for f in own if f not in together]
    if later and deaths.clocks_known:
        after = min(times[rank] for rank in later) - times[first.rank]
        lines.append(f"{_ranks(later)} died {after:.1f} s or more later with errors of their own")
    if waiting:
        lines.append(f"{_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} left waiting in operations")
    return tuple(lines)


# --- those that died of what another did, or did not do -----------------------------------------------------------


def _diagnose_mismatch(deaths: _Deaths, own: Sequence[Finding]) -> Diagnosis | None:
    """Name who called a collective differently, where those that died of it were in an operation."""
    if any(
        not one.message or is_of_another_type(one.message) or not _seen_waiting(deaths, one.rank)
        for one in own
    ):
        return None
    found = locate_mismatch(deaths.given)
    if found is None:
        return None
    blamed = {one.rank for one in found.culprits}
    victims = tuple(sorted(({one.rank for one in deaths.all} | set(found.victims)) - blamed))
    lines = tuple(line for line in found.evidence if _still_holds(line))
    ends = _ends(deaths, [*own, *deaths.of("echo", "unclear")])
    return replace(found, kind="crash", victims=victims, evidence=(*lines, *ends))


def _diagnose_awaited(deaths: _Deaths) -> Diagnosis | None:
    """Name who those that died waited for; None where the operations of the ranks do not tell."""
    given, victims = deaths.given, deaths.of("echo", "unclear")
    timed_out = any(_has_timed_out(deaths, one) for one in victims)
    left = left_well(given)
    states = as_they_waited(given, timed_out=timed_out)
    waited = replace(given, states=states, findings=tuple(left.values()))
    found = locate_hang(waited)
    if not waits_seen(waited):
        return None
    unseen = {one.rank for one in victims if not _seen_waiting(deaths, one.rank)}
    culprits = tuple(one for one in found.culprits if _can_be_blamed(one, unseen, timed_out))
    if not timed_out and given.nodes.keys() - deaths.states.keys():
        # Who closed the connections may be one whose state is missing; it is none of those that lost theirs.
        lost = {one.rank for one in victims if one.message}
        culprits = tuple(one for one in culprits if one.rank not in lost or one.cause in (LEFT, ONE_MORE))
    if not culprits:
        return None
    by_exit = any(one.cause in (LEFT, ONE_MORE) for one in culprits)
    if not (timed_out or by_exit):
        # Who is gone has closed the connections; who has not come yet need not be the one.
        sure: Confidence = "medium" if len(culprits) == 1 else "low"
        culprits = tuple(replace(one, confidence=sure) for one in culprits)
    blamed = {one.rank for one in culprits if one.rank is not None}
    died = {one.rank for one in deaths.all}
    # One that came too late may have died of that, too.
    victims = [one for one in victims if one.rank not in blamed] or victims
    lines = [*_ends(deaths, victims), *(line for line in found.evidence if _still_holds(line))]
    summary = found.summary
    if not by_exit:
        summary = _gave_up(deaths, victims, _ranks(blamed) if blamed else "a link")
    return replace(
        found,
        kind="crash",
        culprits=culprits,
        victims=tuple(sorted((died | set(found.victims)) - blamed)),
        evidence=tuple(lines),
        summary=summary,
        paths=(),
    )


def _seen_waiting(deaths: _Deaths, rank: int) -> bool:
    """Whether it is known what a rank waited in when it died: else it may have waited for what is not recorded."""
    state = deaths.states.get(rank)
    return state is not None and bool(state.in_flight or state.failed)


def _can_be_blamed(culprit: Culprit, unseen: Collection[int], timed_out: bool) -> bool:
    if culprit.rank is not None:
        return culprit.rank not in unseen
    # A transfer in which all are stuck ends in timeouts; lost connections come from a death.
    return timed_out and culprit.link is not None and len(set(culprit.link.nodes)) == 2


def _still_holds(line: str) -> bool:
    """Whether a line about a hang is true of processes that are gone, and is not said elsewhere."""
    return "ranks reporting" not in line and "last progress" not in line


def _gave_up(deaths: _Deaths, victims: Sequence[Finding], whom: str) -> str:
    """The headline: who died of waiting for whom."""
    flights = [flight for one in victims for flight in _last_waits(deaths, one.rank)[:1]]
    where = f" in {place_of(flights)}" if flights else ""
    return f"{_ranks([one.rank for one in victims])} gave up waiting for {whom}{where}"


def _ends(deaths: _Deaths, victims: Sequence[Finding]) -> list[str]:
    """What the first of those that died waited in, how long, and its last words."""
    first = victims[0]
    alike = [one.rank for one in victims]
    flights = _last_waits(deaths, first.rank)
    text = f"{_ranks(alike)} died of waiting"
    if flights:
        longest_s = max(waited_s(flight) for flight in flights)
        after = f" after {longest_s:.0f} s" if longest_s >= 1 else ""
        text = f"{_ranks(alike)} failed{after} in {place_of(flights[:1])}"
    words = next((one.message for one in victims if one.message), "")
    return [f"{text}: {words[:160]}" if words else text]


def _last_waits(deaths: _Deaths, rank: int) -> tuple[OpInFlight, ...]:
    state = deaths.states.get(rank)
    return (*state.failed, *state.in_flight) if state is not None else ()


def _diagnose_named(deaths: _Deaths) -> Diagnosis | None:
    """Name the ranks of which the words of others say that they did not come, if they have not died of waiting, too."""
    victims = deaths.of("echo", "unclear")
    tellers = {one.rank: ranks_named(one.message) for one in victims}
    died = {one.rank for one in deaths.all}
    named = {rank for ranks in tellers.values() for rank in ranks} - died
    known = deaths.given.nodes
    named = {rank for rank in named if rank in known or not known}
    if not named:
        return None
    first = next(one for one in victims if named.intersection(tellers[one.rank]))
    detail = f"named by {_ranks([rank for rank, ranks in tellers.items() if named.intersection(ranks)])}"
    sure: Confidence = "medium" if 2 * len(named) <= max(len(known), 2) else "low"
    culprits = tuple(
        Culprit(rank, None, known.get(rank, ""), "", 0.0, sure, "did not come", detail)
        for rank in sorted(named)[:_MOST_CULPRITS]
    )
    lines = (f"rank {first.rank}: {first.message[:160]}",)
    missing = (f"what {_ranks(named)} did: no operation is known that lacks it",)
    summary = f"{_ranks([one.rank for one in victims])} gave up waiting for {_ranks(named)}"
    return Diagnosis("crash", culprits, tuple(sorted(died - named)), lines, missing, summary)


def _diagnose_asked(deaths: _Deaths, asked: Sequence[Finding]) -> Diagnosis:
    """Several were sent SIGTERM, SIGINT or SIGHUP, not by keepstep: somebody ends the job, or what a node has of it."""
    unknown = _diagnose_unknown(deaths)
    how = "/".join(sorted({how_it_died(one) for one in asked}))
    told = f"{_ranks([one.rank for one in asked])} {how}: sent from outside, as by a scheduler"
    return replace(
        unknown,
        evidence=(told, *unknown.evidence),
        missing=("who sent the signal", *unknown.missing[1:]),
        summary=f"{_ranks([one.rank for one in asked])} {how}, from outside",
    )


def _diagnose_unknown(deaths: _Deaths) -> Diagnosis:
    """Every word tells of others, and nobody is known whom they waited for."""
    victims = deaths.of("echo", "unclear")
    first = victims[0]
    died = {one.rank for one in deaths.all}
    waiting = {s.rank for s in deaths.given.states if s.rank not in died and (s.in_flight or s.failed)}
    missing = ["the first death: no rank's last words are about itself"]
    wordless = [one.rank for one in victims if not one.message]
    if wordless:
        missing.append(f"the last words of {_ranks(wordless)} (@record on main, or --redirects 3)")
    unseen = sorted(set(deaths.given.nodes) - deaths.states.keys())
    if unseen:
        missing.append(f"states of ranks {fold_ranks(unseen)}")
    lines = [*_ends(deaths, victims)]
    if waiting:
        lines.append(f"{_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} left waiting in operations")
    reason = f": {first.message[:120]}" if first.message else ""
    summary = f"rank {first.rank} died ({how_it_died(first)}){reason}"
    return Diagnosis("crash", (), tuple(sorted(died | waiting)), tuple(lines), tuple(missing), summary)


def _ranks(ranks: Iterable[int]) -> str:
    return ranks_of(sorted(set(ranks)))
