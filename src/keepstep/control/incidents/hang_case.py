"""A hang from the first finding to resumption: the states of all ranks are asked for, and asked again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from keepstep.control.incidents.desk import Desk
from keepstep.control.incidents.locators import NO_WAITS
from keepstep.control.incidents.wording import how_to_say, is_traffic, noted, unlocated
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Culprit, Diagnosis, Event, Incident
from keepstep.core.ranges import fold_nodes
from keepstep.core.summary import PathProbe, PeerTraffic, RankState
from keepstep.wire.messages import States

_AGAIN_S = 2.0  # while it is not confirmed
_STALLED_S = 1.0  # data under way between two hosts and none of it acknowledged
_LOOKS_S = (0.05, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5)  # from one look to the next at ranks that all wait
_SHARPEN_S = (3.0, 10.0, 30.0)  # after the verdict
_TRIES = 3
_LOOKS_AT_SILENT = 8  # before ranks are blamed of which nothing is known
_MOST_TRIES = 15


class HangCase:
    """One hang, or ranks in different collectives (``desync``). ``incident`` is None until it is confirmed."""

    kind = "hang"

    def __init__(self, desk: Desk, incident: Incident | None = None) -> None:
        self._desk = desk
        self.incident = incident
        self.closed = False
        self.question: int | None = None
        self.probing: int | None = None  # the open question about paths
        self._probes: Sequence[PathProbe] = ()
        self._probed = False  # all answers of one question about paths have come, or none can
        self._answers: Sequence[States] = ()  # the last that confirmed it, and who did not answer
        self._unanswered: Sequence[str] = ()
        self._stuck: dict[int, Finding] = {}
        self._resumed: set[int] = set()
        self._first_s: float | None = None  # when the first finding came, on our clock
        self._stuck_s = incident.stuck_s or 0.0 if incident else 0.0
        self._limit_s = 0.0
        self._all_wait = False  # opened because all ranks wait, not by a finding
        self._step = -1
        self._tries = 0
        self._sharpened = len(_SHARPEN_S) if incident else 0
        self._asked_s = 0.0
        self._verdict_s = 0.0

    def found(self, finding: Finding, now_s: float) -> None:
        """One more rank makes no progress; the first asks all where they are."""
        if finding.rank in self._stuck and finding.rank not in self._resumed:
            return
        self._stuck[finding.rank] = finding
        self._resumed.discard(finding.rank)
        self._step = max(self._step, finding.step)
        if self._first_s is None:
            self._first_s = now_s
            self._stuck_s, self._limit_s = finding.stuck_s, finding.limit_s
            if self.incident is None:
                self._ask(stacks=False, now_s=now_s)

    def all_wait(self, now_s: float) -> None:
        """Every rank has told that it waits for others longer than usual: no finding is needed."""
        self._all_wait = True
        self._step = self._desk.cluster.newest_step
        self._first_s = now_s
        overdue = [one.overdue_s for one in self._desk.cluster.beats() if 0 < one.overdue_s < math.inf]
        self._stuck_s = self._limit_s = min(overdue, default=0.0)
        self._ask(stacks=False, now_s=now_s)

    def resumed(self, finding: Finding, now_s: float) -> None:
        """One rank goes on; a majority of those that were stuck closes the case."""
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
        if self.incident is not None and any(not state.alive for state in states):
            return  # somebody ends the job: what its processes say no longer tells who held it up
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
        diagnosis = self._decide(now_s)
        if diagnosis.paths and self.probing is None and (self.incident is not None or not self._probed):
            self.probing = self._desk.questions.ask_probes(diagnosis.paths, now_s)
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

    @property
    def last_states(self) -> dict[int, RankState]:
        """Where ranks were when it was last decided, by rank."""
        return {state.rank: state for answer in self._answers for state in answer.states}

    def standing(self, rank: int) -> Finding | None:
        """What was found of a rank that is stuck still."""
        return None if rank in self._resumed else self._stuck.get(rank)

    def acted(self, action: Action) -> None:
        """Note what was done about it."""
        if self.incident is not None and action not in self.incident.actions:
            actions = (*self.incident.actions, self._desk.register.stamped(action))
            self.incident = replace(self.incident, actions=actions)
            self._desk.register.publish(self.incident, "", self)

    def is_reached(self, node: str) -> bool:
        """Whether somebody's probe of that node came back: it is not lost, whatever we hear."""
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
            # no rank was stuck long enough to tell of it
            self._relieve(self._desk.cluster.newest_step, now_s)
        elif self._sharpened < len(_SHARPEN_S) and now_s - self._verdict_s >= _SHARPEN_S[self._sharpened]:
            self._sharpened += 1
            self._ask(stacks=True, now_s=now_s)

    def _relieve(self, step: int, now_s: float) -> None:
        self.closed = True
        if self.incident is not None:
            self.incident = replace(
                self.incident,
                relief_step=max(step, 0),
                status="relieved",
                stuck_s=self._stuck_for(now_s),
                closed_unix_s=self._desk.unix_s(now_s),
            )
            self._desk.register.publish(self.incident, "closes", self)

    def end(self, now_s: float) -> None:
        """The job ended, or a crash came after it."""
        self.closed = True
        if self.incident is not None:
            self.incident = replace(
                self.incident,
                status="ended",
                stuck_s=self._stuck_for(now_s),
                closed_unix_s=self._desk.unix_s(now_s),
            )
            self._desk.register.publish(self.incident, "", self)

    def _ask(self, *, stacks: bool, now_s: float) -> None:
        self._asked_s = now_s
        self.question = self._desk.questions.ask_states(stacks, now_s)

    def _pause_s(self) -> float:
        """From one question to the next while nothing is confirmed."""
        return _LOOKS_S[self._tries - 1] if self._all_wait and 0 < self._tries <= len(_LOOKS_S) else _AGAIN_S

    def _all_go_on(self) -> bool:
        cluster = self._desk.cluster
        return not cluster.overdue_nodes and all(one.alive for one in cluster.beats())

    def _stuck_for(self, now_s: float) -> float:
        return self._stuck_s + (now_s - self._first_s if self._first_s is not None else 0.0)

    def _going_on(self, states: Sequence[RankState]) -> set[int]:
        """Ranks that have made progress since they were found stuck, or lately if they were not."""
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

    def _confirmed(self, states: Sequence[RankState], going: set[int]) -> bool:
        if self._all_wait and not self._stuck:
            # nobody has moved since the first look; of a node that is heard but does not answer that is not known
            missed = set(self._unanswered) - self._desk.cluster.mute_nodes()
            return self._tries >= 2 and len(states) > 0 and not missed
        return (len(states) > 0 and 2 * len(going) < len(states)) or self._tries >= _TRIES

    def _decide(self, now_s: float) -> Diagnosis:
        desk = self._desk
        states = [state for answer in self._answers for state in answer.states]
        traffic = [one for answer in self._answers for one in answer.traffic if is_traffic(one)]
        diagnosis = self._locate(states, traffic)
        old = self.incident
        silence = _is_silence(diagnosis.culprits)
        knows_less = not diagnosis.culprits or (silence and old is not None and not _is_silence(old.culprits))
        if old is not None and old.culprits and knows_less and not self._acquitted(old):
            return diagnosis  # what was known is better
        if old is None and self._all_wait and not self._stuck and not _is_locked_up(diagnosis, traffic):
            self.closed = self._tries >= _MOST_TRIES
            return diagnosis  # a slow transfer, perhaps: ranks that are in it for too long will tell
        if old is None and silence and not self._looked_at_silence():
            return diagnosis  # probes will tell whether it is the node, a path to it, or its agent alone
        missing = diagnosis.missing
        if self._unanswered:
            missing = (*missing, f"states of {fold_nodes(self._unanswered)}: no answer from there in time")
        incident = Incident(
            number=old.number if old else desk.register.next_number(),
            kind="desync" if diagnosis.kind == "desync" else "hang",
            onset_step=old.onset_step if old else self._step + 1,
            detected_step=old.detected_step if old else self._step + 1,
            relief_step=None,
            job_slowdown=None,
            culprits=diagnosis.culprits,
            victims=diagnosis.victims,
            evidence=diagnosis.evidence,
            missing=missing,
            summary=diagnosis.summary,
            stuck_s=self._stuck_for(now_s),
            ranks_reporting=len({state.rank for state in states}),
            world_size=desk.cluster.known_ranks,
            detected_unix_s=old.detected_unix_s if old else desk.unix_s(now_s),
            actions=old.actions if old else (),
            onset_unix_s=old.onset_unix_s if old else desk.unix_s(now_s - self._stuck_for(now_s)),
            events=old.events if old else self._first_events(),
        )
        if old is None:
            self._verdict_s = now_s
        say = how_to_say(old, diagnosis)
        self.incident = noted(desk, incident, say, now_s)
        desk.register.publish(self.incident, say, self)
        return diagnosis

    def _first_events(self) -> tuple[Event, ...]:
        if self._first_s is None:
            return ()
        return (Event("noticed", self._desk.unix_s(self._first_s), self._step + 1),)

    def _looked_at_silence(self) -> bool:
        """An agent that died is back within a few seconds; until then its ranks are not blamed for its silence."""
        return self._probed and self._tries >= (_TRIES if self._stuck else _LOOKS_AT_SILENT)

    def _acquitted(self, old: Incident) -> bool:
        """Probes came back over the links that were blamed."""
        return bool(self._probes) and all(culprit.link is not None for culprit in old.culprits)

    def _locate(self, states: Sequence[RankState], traffic: Sequence[PeerTraffic]) -> Diagnosis:
        desk = self._desk
        cluster = desk.cluster
        try:
            diagnosis = desk.locators.hang(
                states,
                cluster.groups,
                cluster.node_of,
                cluster.silent_nodes(),
                desk.clocks(),
                traffic,
                self._probes,
                cluster.addresses(),
            )
            if desk.locators.waits_seen(states, cluster.groups):
                return diagnosis
            return diagnosis.doubted(NO_WAITS, [state.rank for state in states if not state.alive])
        except Exception as error:
            return unlocated("hang", error)


def _is_silence(culprits: Sequence[Culprit]) -> bool:
    """They are blamed, and nothing is known of them."""
    return bool(culprits) and all(culprit.cause == "silent" for culprit in culprits)


def _is_locked_up(diagnosis: Diagnosis, traffic: Sequence[PeerTraffic]) -> bool:
    """Whether it cannot end by itself: no transfer that all have entered, or one of which nothing arrives any more."""
    if diagnosis.kind == "desync" or any(
        culprit.rank is not None or culprit.confidence == "high" for culprit in diagnosis.culprits
    ):
        return True
    return any(one.after_bytes == 0 and one.after_busy_s >= _STALLED_S for one in traffic)
