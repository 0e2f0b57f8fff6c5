"""Hangs from the first finding to resumption: the states of all ranks are asked for, several times."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from keepstep.control.incidents.case import Case, Desk, blamed, is_port, is_traffic, unlocated
from keepstep.control.incidents.hang_evidence import tempered, work_for_themselves
from keepstep.control.incidents.job_words import cause_of_hang
from keepstep.control.incidents.locators import NO_WAITS
from keepstep.control.incidents.register import Saying
from keepstep.core.finding import Finding
from keepstep.core.incident import Culprit, Diagnosis, Event, Incident
from keepstep.core.ranges import fold_nodes
from keepstep.core.summary import STOPPED, PathProbe, PeerTraffic, RankState
from keepstep.wire.messages import States

logger = logging.getLogger("keepstep.control")

_AGAIN_S = 2.0  # between questions while the hang is not confirmed
_STALLED_S = 1.0  # data under way between two hosts without an acknowledgement for so long: stalled
_LOOKS_S = (0.05, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5)  # between the first questions where all ranks wait
_SHARPEN_S = (3.0, 10.0, 30.0)  # when to ask again after the verdict
_MOST_ASKED = 64  # nodes whose NCCL is asked by RAS: each agent asks about the whole job
_TRIES = 3  # questions after which a hang that a rank has reported counts as confirmed
_LOOKS_AT_SILENT = 8  # questions before ranks are blamed that no agent has told anything about
_FRESH_S = 10.0  # for so long a look at all ranks tells who holds the job up
_PROOF_AGAIN_S = 5.0  # least time between looks for a proof
_CONFIDENCES = ("low", "medium", "high")
_MOST_TRIES = 15  # questions after which an unconfirmed hang is dropped


class HangCase(Case):
    """One hang, or ranks in different collectives (``desync``)."""

    def __init__(self, desk: Desk, incident: Incident | None = None) -> None:
        self._desk, self.incident = desk, incident
        self._probes: Sequence[PathProbe] = ()
        self._probed = False  # a question about paths was decided, or nobody can be asked
        self._answers: Sequence[States] = ()  # the last answers that confirmed the hang
        self._unanswered: Sequence[str] = ()  # nodes that did not answer that question
        self._stuck: dict[int, Finding] = {}
        self._resumed: set[int] = set()
        self._first_s: float | None = None  # when the first finding came, on the controller's clock
        self._stuck_s = incident.stuck_s or 0.0 if incident else 0.0
        self._limit_s = 0.0
        self._wants_launched = False  # torch's recorder did not tell of all ranks on NCCL
        self._all_wait = False  # the case was opened because all ranks wait, not by a finding
        self._is_usual = False  # they wait no longer than usual: only calls that do not fit are a hang
        self._step = -1
        self.incarnation = 0  # in which ranks were found stuck, where findings opened the case
        self._tries = 0
        self._sharpened = len(_SHARPEN_S) if incident else 0
        self._asked_s = 0.0
        self._verdict_s = 0.0
        self._proof_s = math.inf  # when there may be a proof against all who are blamed, if nothing moves
        self._holding_up: frozenset[int] = frozenset()  # ranks that others waited for at the last look
        self._seen_s = -math.inf  # when that was
        self.ended: set[int] = set()  # ranks that keepstep has ended for the hang
        self._told: dict[frozenset[object], int] = {}  # highest confidence told, by who was blamed

    def found(self, finding: Finding, now_s: float) -> None:
        """Take one more rank that makes no progress into the case; the first has all ranks asked where they are."""
        if finding.rank in self._stuck and finding.rank not in self._resumed:
            return
        self._stuck[finding.rank] = finding
        self._resumed.discard(finding.rank)
        self._step = max(self._step, finding.step)
        self.incarnation = max(self.incarnation, finding.incarnation)
        if self.incident is not None:
            self._proof_s = min(self._proof_s, now_s + _PROOF_AGAIN_S)
        if self._first_s is None:
            self._first_s = now_s
            self._stuck_s, self._limit_s = finding.stuck_s, finding.limit_s
            if self.incident is None:
                self._ask(stacks=False, now_s=now_s)

    def all_wait(self, now_s: float) -> None:
        """Open the case without a finding: every rank waits for others longer than usual."""
        self._all_wait = True
        self._step = self._desk.cluster.newest_step
        self._first_s = now_s
        overdue = [one.overdue_s for one in self._desk.cluster.beats() if 0 < one.overdue_s < math.inf]
        self._stuck_s = self._limit_s = min(overdue, default=0.0)
        self._ask(stacks=False, now_s=now_s)

    def all_inside(self, now_s: float) -> None:
        """Open the case because all ranks are in operations: a hang only if their calls do not fit each other."""
        self._is_usual = self._all_wait = True
        self._step = self._desk.cluster.newest_step
        self._first_s = now_s
        self._stuck_s = self._limit_s = min((one.idle_s for one in self._desk.cluster.beats()), default=0.0)
        self._ask(stacks=False, now_s=now_s)

    def resumed(self, finding: Finding, now_s: float) -> None:
        """Note that one rank goes on; once most of the stuck ranks do, the case is closed."""
        self._resumed.add(finding.rank)
        if 2 * len(self._resumed) > max(len(self._stuck), 1):
            self._relieve(finding.step, now_s)

    def states(self, answers: Sequence[States], unanswered: Sequence[str], now_s: float) -> None:
        """Decide with what the agents have sent."""
        self.question = None
        if self.incident is not None and not answers:
            return
        self._answers, self._unanswered = answers, unanswered
        states = [state for answer in answers for state in answer.states]
        left = self._desk.cluster.left
        if self.incident is not None and any(not one.alive and one.rank not in left for one in states):
            return  # the job is being ended: states of its processes no longer show who held it up
        if self.incident is None:
            self._tries += 1
            going = self._going_on(states)
            if going and all(rank in going for rank in self._stuck):
                self.closed = True
                return
            if not self._confirmed(states, going):
                self._answers = ()
                self.closed = self._tries >= _MOST_TRIES
                return
            if self._is_usual and not self._stuck and not self._calls_differ(states):
                self.closed = True
                return
        diagnosis = self._decide(now_s)
        if diagnosis.paths and self.probing is None and (self.incident is not None or not self._probed):
            self.probing = self._desk.agents.ask_probes(diagnosis.paths, now_s)
            if self.probing is None:
                self.probed((), now_s)

    def probed(self, probes: Sequence[PathProbe], now_s: float, *, final: bool = True) -> None:
        """Decide again with what the agents have learned of the paths between them; more comes unless ``final``."""
        if not final and self.incident is not None:
            return
        if final:
            self.probing, self._probed = None, True
        self._probes = probes or self._probes
        if self._answers and (probes or self.incident is None):
            self._decide(now_s)

    def still_blames(self, ranks: Collection[int], now_s: float) -> bool:
        """Whether a look at all ranks a moment ago has shown that just these hold up others, and most of the job."""
        return self._holding_up.issuperset(ranks) and now_s - self._seen_s <= _FRESH_S

    def look_again(self, now_s: float) -> None:
        """Ask all ranks where they are, unless that is under way, or was done a moment ago."""
        if self.question is None and now_s - self._seen_s > _FRESH_S:
            self._ask(stacks=False, now_s=now_s)

    @property
    def last_states(self) -> dict[int, RankState]:
        """The states of ranks at the last decision, by rank."""
        return {state.rank: state for answer in self._answers for state in answer.states}

    def standing(self, rank: int) -> Finding | None:
        """The finding of a rank that is still stuck; None if it goes on, or was never stuck."""
        return None if rank in self._resumed else self._stuck.get(rank)

    def is_reached(self, node: str) -> bool:
        """Whether a probe of that node came back: then it is not lost, though the controller does not hear it."""
        return any(probe.target == node and probe.arrived for probe in self._probes)

    def tick(self, now_s: float) -> None:
        """Ask again when it is time."""
        if self.closed or self.question is not None:
            return
        if self.incident is None:
            if self._all_wait and not self._stuck and self._all_go_on():
                self.closed = True
            elif now_s - self._asked_s >= self._pause_s():
                self._ask(stacks=False, now_s=now_s)
        elif self._all_wait and not self._stuck and self._all_go_on():
            # No rank was stuck long enough that its agent reported it.
            self._relieve(self._desk.cluster.newest_step, now_s)
        elif self._sharpened < len(_SHARPEN_S) and now_s - self._verdict_s >= _SHARPEN_S[self._sharpened]:
            self._sharpened += 1
            self._ask(stacks=True, now_s=now_s)
        elif now_s >= self._proof_s:
            self._proof_s = math.inf
            self._ask(stacks=True, now_s=now_s)

    def _relieve(self, step: int, now_s: float) -> None:
        self._finish("relieved", now_s, "closes", relief_step=max(step, 0), stuck_s=self._stuck_for(now_s))

    def handed_over(self, now_s: float) -> Incident | None:
        """Close the case, but not its incident: it goes on with the deaths in which the hang ends."""
        self.closed = True
        return None if self.incident is None else replace(self.incident, stuck_s=self._stuck_for(now_s))

    def end(self, now_s: float) -> None:
        """Close the case, as the job has ended or a crash came after the hang."""
        self._finish("ended", now_s, "", stuck_s=self._stuck_for(now_s))

    def _publish(self, say: Saying) -> None:
        if self.incident is not None:
            self._desk.register.publish(self.incident, say, self.standing, self.last_states)

    def _ask(self, *, stacks: bool, now_s: float) -> None:
        self._asked_s = now_s
        launched = stacks and self._wants_launched
        self.question = self._desk.agents.ask_states(stacks, now_s, launched=launched)

    def _pause_s(self) -> float:
        """The time from one question to the next while the hang is not confirmed."""
        return _LOOKS_S[self._tries - 1] if self._all_wait and 0 < self._tries <= len(_LOOKS_S) else _AGAIN_S

    def _all_go_on(self) -> bool:
        cluster = self._desk.cluster
        waiting = cluster.overdue_nodes or cluster.inside_nodes
        return not waiting and all(one.alive for one in cluster.beats())

    def _stuck_for(self, now_s: float) -> float:
        return self._stuck_s + (now_s - self._first_s if self._first_s is not None else 0.0)

    def _going_on(self, states: Sequence[RankState]) -> set[int]:
        """The ranks that have made progress: since they were found stuck, or lately where they were not."""
        going: set[int] = set()
        for state in states:
            finding = self._stuck.get(state.rank)
            if finding is not None:
                moved = state.last_progress_s > finding.time_s
            else:
                moved = state.alive and state.now_s - state.last_progress_s < 0.5 * self._limit_s
            if moved:
                going.add(state.rank)
        return going

    def _calls_differ(self, states: Sequence[RankState]) -> bool:
        try:
            return self._desk.locators.calls_differ(states, self._desk.cluster.groups)
        except Exception:
            logger.exception("the calls of ranks could not be compared: no desync is told early")
            return False

    def _confirmed(self, states: Sequence[RankState], going: set[int]) -> bool:
        if self._all_wait and not self._stuck:
            # Nobody has moved since the first question. Of a node that does not answer that is not known.
            missed = set(self._unanswered) - self._desk.cluster.mute_nodes()
            return self._tries >= 2 and len(states) > 0 and not missed
        return (len(states) > 0 and 2 * len(going) < len(states)) or self._tries >= _TRIES

    def _decide(self, now_s: float) -> Diagnosis:
        old, states = self.incident, [state for answer in self._answers for state in answer.states]
        traffic = [one for answer in self._answers for one in answer.traffic if is_traffic(one)]
        by_rank = {state.rank: state for state in states}
        diagnosis = tempered(
            self._locate(states, traffic, now_s), by_rank, self.standing, self._desk.patience
        )
        self._proof_s = self._next_proof_s(diagnosis, by_rank, now_s)
        self._holding_up, self._seen_s = self._who_holds_up(diagnosis, by_rank), now_s
        silence = _is_silence(diagnosis.culprits)
        knows_less = not diagnosis.culprits or (silence and old is not None and not _is_silence(old.culprits))
        # Links that were blamed are acquitted once they have answered probes.
        acquitted = old is not None and self._probes and all(one.rank is None for one in old.culprits)
        if old is not None and old.culprits and knows_less and not acquitted:
            return diagnosis  # the incident keeps its earlier diagnosis, which knows more
        if (
            old is None
            and self._all_wait
            and not self._stuck
            and (not _is_locked_up(diagnosis, traffic) or _may_pause(diagnosis, by_rank))
        ):
            self.closed = self._tries >= _MOST_TRIES
            return (
                diagnosis  # a slow transfer, or a pause: agents will report the ranks that are in it too long
            )
        stuck = [one for rank in self._stuck if (one := self.standing(rank)) is not None]
        some_left = bool(self._desk.cluster.left)
        if old is None and work_for_themselves(states, stuck, some_left=some_left):
            self.closed = self._tries >= _MOST_TRIES
            return diagnosis  # those that left, or are about to, have done their part
        if old is None and self._step < 0 and not diagnosis.culprits:
            self.closed = self._tries >= _MOST_TRIES
            return diagnosis  # in the start-up nobody waits for those that do nothing yet
        if old is None and silence and not self._looked_at_silence():
            return diagnosis  # probes will show whether the node, a path to it, or only its agent has failed
        told = diagnosis
        if self._unanswered:
            late = f"states of {fold_nodes(self._unanswered)}: no answer from there in time"
            told = replace(diagnosis, missing=(*diagnosis.missing, late))
        stuck_s, step = self._stuck_for(now_s), self._step + 1
        first_s = self._first_s
        noticed = () if first_s is None else (Event("noticed", self._desk.unix_s(first_s), step),)
        began = {
            "onset_step": step,
            "detected_step": step,
            "onset_unix_s": self._desk.unix_s(now_s - stuck_s),
            "events": noticed,
        }
        if old is None:
            self._verdict_s = now_s
        reporting = len({state.rank for state in states})
        cause = cause_of_hang(told, by_rank)
        self._conclude(told, now_s, began, stuck_s=stuck_s, ranks_reporting=reporting, cause=cause)
        return diagnosis

    def _who_holds_up(self, diagnosis: Diagnosis, states: Mapping[int, RankState]) -> frozenset[int]:
        """The ranks that are blamed and alive, if others wait for them, and most ranks make no progress."""
        going = self._going_on(list(states.values()))
        waiting = [rank for rank in diagnosis.victims if rank in states and rank not in going]
        if not waiting or 2 * len(going) >= len(states):
            return frozenset()
        blamed = (one.rank for one in diagnosis.culprits if one.confidence != "low")
        return frozenset(rank for rank in blamed if rank is not None and rank not in going)

    def _next_proof_s(self, diagnosis: Diagnosis, states: Mapping[int, RankState], now_s: float) -> float:
        """When to look again whether those who are blamed without a proof have stood still for long enough."""
        unproven = [one.rank for one in diagnosis.culprits if one.rank in states and one.confidence != "high"]
        left = [
            self._desk.patience.left_s(states[rank], finding.limit_s)
            for rank in unproven
            if rank is not None and (finding := self.standing(rank)) is not None and states[rank].alive
        ]
        return now_s + max(max(left) + 1.0, _PROOF_AGAIN_S) if left else math.inf

    def _is_news(self, diagnosis: Diagnosis) -> bool:
        confidence = min((_CONFIDENCES.index(one.confidence) for one in diagnosis.culprits), default=0)
        who = blamed(diagnosis.culprits)
        before = self._told.get(who, -1)
        self._told[who] = max(before, confidence)
        return confidence > before

    def _looked_at_silence(self) -> bool:
        """Whether a silent node may be blamed: an agent that died is back within a few seconds."""
        return self._probed and self._tries >= (_TRIES if self._stuck else _LOOKS_AT_SILENT)

    def _locate(self, states: Sequence[RankState], traffic: Sequence[PeerTraffic], now_s: float) -> Diagnosis:
        desk, cluster = self._desk, self._desk.cluster
        try:
            evidence = desk.evidence(
                now_s,
                states=states,
                silent_nodes=cluster.silent_nodes(),
                traffic=traffic,
                ports=[one for answer in self._answers for one in answer.ports if is_port(one)],
                probes=self._probes,
                addresses=cluster.addresses(),
            )
            few = len(cluster.nodes) <= _MOST_ASKED
            self._wants_launched = few and desk.locators.wants_launched(evidence)
            if (by_counts := desk.locators.launched(evidence)) is not None:
                return by_counts
            diagnosis = desk.locators.hang(evidence)
            # Who is dead or stopped waits for nobody.
            known: set[int | None] = {
                state.rank for state in states if not state.alive or state.process_state in STOPPED
            }
            if desk.locators.waits_seen(evidence):
                hidden = desk.locators.hidden_waits(evidence) if diagnosis.kind == "hang" else ()
                known.update(one.rank for one in diagnosis.culprits if one.rank not in hidden)
            return diagnosis.doubted(NO_WAITS, known)
        except Exception as error:
            return unlocated("hang", error)


def _is_silence(culprits: Sequence[Culprit]) -> bool:
    """Whether these are blamed only because nothing was heard of them."""
    return bool(culprits) and all(culprit.cause == "silent" for culprit in culprits)


def _may_pause(diagnosis: Diagnosis, states: Mapping[int, RankState]) -> bool:
    """Whether a rank that is blamed does not wait for others, by its device.

    Has that done all that it was given, its host may be in a pause, such as a checkpoint. Has it not begun what is
    next, it may be in a long kernel.
    """
    blamed = {one.rank for one in diagnosis.culprits}
    devices = [state.device for rank, state in states.items() if rank in blamed]
    return any(
        one is not None
        and one.answered
        and one.is_whole
        and not any(f.begun is not False for f in one.in_flight)
        for one in devices
    )


def _is_locked_up(diagnosis: Diagnosis, traffic: Sequence[PeerTraffic]) -> bool:
    """Whether the hang cannot end by itself: not all ranks are in the transfer, or none of its data arrives."""
    if diagnosis.kind == "desync" or any(
        culprit.rank is not None or culprit.confidence == "high" for culprit in diagnosis.culprits
    ):
        return True
    return any(one.after_bytes == 0 and one.after_busy_s >= _STALLED_S for one in traffic)
