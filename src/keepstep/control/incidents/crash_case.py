"""Crashes: the first finding opens a case, those of the next moments join it, the verdict names the cause.

Agents are asked where the ranks were: those that died, whose rings are still there, and the others. Deaths that only
tell of others are the end of the hang that was open, and belong to its incident.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from keepstep.control.cluster import Node
from keepstep.control.incidents.case import Case, Desk, noted, same_culprits, unlocated
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.job_words import JobWords, cause_of, cause_of_hang
from keepstep.control.incidents.pair_probes import PairProbes, ask
from keepstep.core.deaths import DIED, is_vague, testimony, was_asked
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Culprit, Diagnosis, FailureCause, Incident, Recovery
from keepstep.core.lost_connection import tells_of_a_timeout
from keepstep.core.ranges import fold_nodes, fold_ranks
from keepstep.core.summary import PathProbe, RankState
from keepstep.core.told import Failure
from keepstep.wire.messages import States, Words

GATHER_S = 0.2  # wait from the first finding to the verdict: the findings of one crash come together
_ANSWERS_S = 1.0  # longest wait from the first finding for the states of ranks
# Longest wait where ranks have only lost connections: who closed them may take long to end, and launchers wait 2 s.
_LEAVING_S = 2.5
_LOST_S = 8.0  # longest wait for a node that is gone to be back or lost, where ranks tell only of others
_RECOVERED_S = 2.0  # wait, once the ranks run again, until their launchers have said what that took
_SHARPEN_S = 2.0  # wait from the verdict to a sharper one, if more has become known meanwhile
_MOST_FINDINGS = 1024
_MOST_STATES = 65_536
_MOST_WORDS = 120  # characters of a rank's last words in an event
logger = logging.getLogger("keepstep.control")

_UNREACHABLE = FailureCause(
    "network",
    "unreachable",
    "nodes cannot be reached: their hosts are down, or the network to them is cut",
    "medium",
    "see whether the host answers on another network, such as that of its management",
)
_PARTED = FailureCause(
    "other",
    "left",
    "a node was told from outside to leave: its pod is evicted, drained, preempted or deleted",
    "high",
    "see the events of its pod and its node",
)
_SIGNALLED = FailureCause(
    "other",
    "signalled",
    "ranks were sent a signal to end, from outside",
    "medium",
    "see whether the scheduler ended the job: a time limit, a preemption, somebody's cancellation",
)


class CrashCase(Case):
    """The first death of a job's incarnation, and the deaths that followed from it."""

    def __init__(self, desk: Desk, incident: Incident | None = None) -> None:
        self._desk, self.incident = desk, incident
        # The hang that was open at the first death, until that is explained.
        self._hang: HangCase | None = None
        self._continues = incident is not None and incident.kind != "crash"  # a hang's incident
        self._questions: set[int] = set()  # open questions about the states of ranks
        self._asked: set[int] = set()  # nodes that were asked
        self._asked_all = False  # whether all nodes were asked at once
        self._knows_own = False  # whether a rank is known that died of its own doing
        self._states: dict[int, RankState] = {}  # what they answered, by rank
        self._actions: list[Action] = []  # what was done before there was an incident
        self._findings: dict[int, Finding] = {}
        self._heard_unix_s: dict[int, float] = {}  # when each death was heard of, by rank
        self._lost: dict[str, tuple[int, ...]] = {}  # ranks by the name of their lost node
        self._parted: dict[str, str] = {}  # why those among them left whose launchers said so
        self._first_s: float | None = None
        self._news_s = 0.0  # when something came last
        self.incarnation = incident.incarnation if incident else -1  # in which ranks died; -1: not known
        self._has_new_words = False  # since the last decision
        self._words: JobWords | None = (
            None  # once the incarnation of these deaths is over, what was said in it
        )
        self._dirty = False  # something has come since the last decision
        self._decided_s: float | None = None
        self._pairs: PairProbes | None = None  # asked of agents, once, because the network has failed
        self._pairs_told = ""  # what they answered
        self._run_again_s = math.inf  # since when all ranks that died run again

    def found(self, finding: Finding, now_s: float) -> None:
        """Take the death of one more rank into the case."""
        if finding.rank in self._findings or len(self._findings) >= _MOST_FINDINGS:
            return
        done = self._desk.cluster.step_of(finding.rank)
        if done >= 0 or (finding.step < 0 and not finding.incarnation):
            finding = replace(finding, step=done + 1)  # an agent knows better than the launcher
        self._findings[finding.rank] = finding
        self._heard_unix_s[finding.rank] = self._desk.unix_s(now_s)
        self.incarnation = finding.incarnation
        self._began(now_s)
        self._ask(finding, now_s)

    def lost(self, node: Node, now_s: float, incarnation: int = -1) -> None:
        """Take the loss of a whole node into the case: neither its agent nor its launcher is connected."""
        self._lost[node.name] = node.ranks
        if node.parting:
            self._parted[node.name] = node.parting
        self.incarnation = max(self.incarnation, incarnation)
        self._began(now_s)

    def left(self, now_s: float) -> None:
        """Note that it has become known that a rank ended with exit code 0."""
        if self._findings:
            self._began(now_s)

    def heard(self, node: str, words: Words, *, is_new: bool) -> None:
        """Note what ranks or kernels have said, which ``is_new`` to the incarnation that is under way."""
        if self._words is not None:
            is_new = self._words.heard(node, words)
        if is_new and self._first_s is not None:
            self._dirty = self._has_new_words = True

    def keep_words(self, over: JobWords) -> None:
        """Keep what was said in the incarnation that the deaths have ended: nobody else needs it now."""
        self._words = self._words or over

    def follows(self, hang: HangCase) -> None:
        """Take over a hang that is open: it ends with these deaths, or they belong to it."""
        self._hang = hang

    def takes(self, question: int) -> bool:
        """Whether this case has asked the question."""
        return question in self._questions

    def states(self, question: int, answers: Sequence[States]) -> None:
        """Take the states of ranks; a verdict that was given without them is looked at again."""
        self._questions.discard(question)
        for state in [state for answer in answers for state in answer.states]:
            # A ring may still be that of the last incarnation, or already that of the next.
            is_of_now = state.incarnation in (-1, max(self.incarnation, 0))
            if is_of_now and len(self._states) < _MOST_STATES:
                self._states[state.rank] = state
                self._dirty = True
        for rank, finding in self._findings.items():
            state = self._states.get(rank)
            if state is not None and state.step >= 0:
                self._findings[rank] = replace(finding, step=state.step + 1)

    def probed(self, probes: Sequence[PathProbe], now_s: float) -> None:
        """Take the outcome of probes between pairs of nodes as evidence; it blames nobody."""
        self.probing = None
        if self._pairs is not None and (told := self._pairs.told(probes)):
            self._pairs_told = told
            if self.incident is not None:
                self.incident = replace(self.incident, evidence=(*self.incident.evidence, told))
                self._publish("")

    def acted(self, action: Action) -> None:
        """Note what was done about the incident; before there is one it waits."""
        if self.incident is None:
            self._actions.append(action)
        else:
            super().acted(action)

    def exit_code(self, now_s: float) -> int | None:
        """The exit code of the rank to blame, else of the first rank that died; None when it is not known."""
        culprits = self.incident.culprits if self.incident else self._locate(now_s, None).culprits
        blamed = [culprit.rank for culprit in culprits]
        for rank in [*blamed, *self._findings]:
            finding = self._findings.get(rank) if rank is not None else None
            if finding is not None and finding.exit_code:
                return finding.exit_code
        return None

    def tick(self, now_s: float) -> None:
        """Decide when the first moment is over, and once more a little later; notice when the ranks run again."""
        if self.closed or self._first_s is None:
            return
        if not self._dirty:
            self._watch_restart(now_s)
            return
        for death in [] if self._asked else [*self._findings.values()][:1]:
            self._ask(death, now_s)  # no agent was connected before
        if self._decided_s is None:
            is_due = self._knows_enough(now_s - self._first_s, now_s - self._news_s)
        else:
            is_due = now_s - self._decided_s >= (GATHER_S if self._has_new_words else _SHARPEN_S)
        if is_due:
            self.decide(now_s)

    def _knows_enough(self, since_s: float, quiet_s: float) -> bool:
        """Whether to give the verdict: so long after the first finding, and after what came last."""
        if since_s < GATHER_S:
            return False
        if self._knows_own or not self._findings:
            return True
        if self._questions and since_s < _ANSWERS_S:
            return False
        if since_s < _LOST_S and any(
            node.lost_s is not None and not node.left for node in self._desk.cluster.nodes.values()
        ):
            return False  # a node is gone, which may be what all others tell of
        if self._who_left():
            return quiet_s >= GATHER_S  # the others that left, too, are told now
        told = [finding for finding in self._findings.values() if finding.message]
        has_lost = bool(told) and not any(tells_of_a_timeout(finding.message) for finding in told)
        return not has_lost or since_s >= _LEAVING_S

    def decide(self, now_s: float) -> None:
        """Publish a verdict on what has come so far."""
        if not self._dirty:
            return
        self._dirty, self._has_new_words, self._decided_s = False, False, now_s
        cluster, old = self._desk.cluster, self.incident
        failure = self._failure()
        diagnosis = self._locate(now_s, failure)
        # Where only consequences were told, but the culprit is known all the same, these tell nothing more.
        cause = cause_of(failure) if failure.root or not diagnosis.culprits else None
        if self._lost and not _tells_why(cause):
            cause = _UNREACHABLE if self._vanished() else _PARTED
        elif not _tells_why(cause):
            cause = cause_of_hang(diagnosis, self._states) or cause
            if not diagnosis.culprits and any(was_asked(death) for death in self._findings.values()):
                cause = _SIGNALLED
        if cause is not None and cause.cause_class == "network" and self._pairs is None:
            self._pairs = ask(cluster, self._desk.agents, self._lost, now_s)
            self.probing = self._pairs.number if self._pairs is not None else None
        if self._pairs_told:
            diagnosis = replace(diagnosis, evidence=(*diagnosis.evidence, self._pairs_told))
        if self._hang is not None:
            hang, self._hang = self._hang, None
            died = {culprit.rank for culprit in diagnosis.culprits if culprit.cause == DIED}
            # None has died of its own doing but those that keepstep ended for the hang.
            if not self._lost and died <= hang.ended and (incident := hang.handed_over(now_s)) is not None:
                self._go_on(replace(incident, cause=cause or incident.cause), hang.ended, diagnosis, now_s)
                return
            hang.end(now_s)
        step = max((finding.step for finding in self._findings.values()), default=-1)
        step = step if step >= 0 else cluster.newest_step
        if old is not None and (self._continues or not diagnosis.culprits):
            blamed = {culprit.rank for culprit in old.culprits}
            victims = tuple(rank for rank in diagnosis.victims if rank not in blamed)
            self.incident = replace(old, victims=victims or old.victims, cause=cause or old.cause)
            self._publish("")
            return
        first_s = now_s if self._first_s is None else self._first_s
        self._conclude(
            diagnosis,
            now_s,
            {"onset_unix_s": self._desk.unix_s(first_s)},
            onset_step=step if step >= 0 else None,
            detected_step=step if step >= 0 else None,
            ranks_reporting=cluster.reporting_ranks,
            incarnation=max(self.incarnation, 0),
            cause=cause or (old.cause if old is not None else None),
        )
        told, tells = old is not None and _tells_why(old.cause), _tells_why(cause)
        if old is not None and tells and not told and same_culprits(old, diagnosis):
            self._publish("sharper")
        self._catch_up()

    def _go_on(self, incident: Incident, by_us: Collection[int], diagnosis: Diagnosis, now_s: float) -> None:
        """Make the hang's incident that of these deaths: it keeps its culprits, and tells how the ranks ended.

        ``by_us``: the ranks that keepstep ended for the hang.
        """
        known = {one.rank for one in incident.culprits}
        surer = not any(one.confidence == "high" for one in incident.culprits) and any(
            one.confidence == "high" and one.rank not in known for one in diagnosis.culprits
        )
        if not incident.culprits or surer:
            incident = replace(
                incident,
                culprits=diagnosis.culprits,
                evidence=diagnosis.evidence,
                missing=diagnosis.missing,
            )
        # That a living process may go on by itself is no doubt any more.
        sure = {one.rank for one in diagnosis.culprits if one.confidence == "high"}
        culprits = [replace(c, confidence="high") if c.rank in sure else c for c in incident.culprits]
        incident = replace(incident, culprits=tuple(culprits))
        told = _how_it_ended(self._findings, by_us)
        blamed = {culprit.rank for culprit in incident.culprits}
        victims = tuple(rank for rank in diagnosis.victims if rank not in blamed)
        incident = replace(
            incident,
            victims=victims or incident.victims,
            evidence=(told, *incident.evidence),
            incarnation=max(self.incarnation, 0),
        )
        self._continues = True
        self.incident = noted(self._desk, incident, "deaths", now_s, told)
        self._publish("" if by_us else "sharper")
        self._catch_up()

    def _catch_up(self) -> None:
        """Note what was done before there was an incident."""
        actions, self._actions = self._actions, []
        for action in actions:
            self.acted(action)

    def end(self, now_s: float) -> None:
        """Close the case, as the job has ended."""
        self.decide(now_s)
        self._finish("ended", now_s, "")

    def restarted(self, recovery: Recovery | None, now_s: float) -> None:
        """Close the case, as the job runs in a later incarnation; ``recovery`` None: none is known."""
        self.decide(now_s)
        step = self._desk.cluster.newest_step
        self._finish("relieved", now_s, "closes", relief_step=step if step >= 0 else None, recovery=recovery)

    def _ask(self, death: Finding, now_s: float) -> None:
        """Ask where the ranks are; of one that died of its own doing only its node, which knows its last step.

        Then GPUs are not asked about: ranks that stay in their processes would leave the training later for it.
        """
        cluster = self._desk.cluster
        is_own = testimony(death) == "own" and not is_vague(death)
        knew_own, self._knows_own = self._knows_own, self._knows_own or is_own
        if self._asked_all or (knew_own and not is_own):
            return
        home, agents = cluster.home(death.rank), set(cluster.agents())
        nodes = agents & {home.rank if home is not None else -1} if is_own else agents
        if not nodes <= self._asked:
            self._asked |= nodes
            self._asked_all = not is_own
            self._questions.add(self._desk.agents.ask_states(False, now_s, nodes, devices=not is_own))

    def _began(self, now_s: float) -> None:
        self._dirty, self._news_s = True, now_s
        if self._first_s is None:
            self._first_s = now_s

    def _watch_restart(self, now_s: float) -> None:
        """Close the case once the workers run again: what comes after that is another incident."""
        if self.incident is None or self._decided_s is None:
            return
        nodes = self._desk.cluster.nodes.values()
        if any(node.name in self._lost and node.agent is None for node in nodes):
            return
        since_s = self._decided_s + _SHARPEN_S
        beats = [node.beat for node in nodes if node.beat is not None and (node.heard_s or 0.0) > since_s]
        alive = {one.rank for beat in beats for one in beat.ranks if one.alive and one.step >= 0}
        ranks = self._desk.cluster.known_ranks  # fewer than before, where the job goes on with fewer nodes
        if not all(rank in alive or 0 < ranks <= rank for rank in self._findings):
            self._run_again_s = math.inf
        elif now_s - self._run_again_s >= _RECOVERED_S:
            self.restarted(None, now_s)
        else:
            self._run_again_s = min(self._run_again_s, now_s)

    def _failure(self) -> Failure:
        """What the words of ranks and kernels tell; nothing where they cannot be explained."""
        try:
            deaths = [(one, self._heard_unix_s[rank]) for rank, one in self._findings.items()]
            words = self._words or self._desk.words
            return words.failure(deaths, range(self._desk.cluster.known_ranks))
        except Exception:
            logger.exception(
                "what ranks and kernels said cannot be explained: the verdict is by deaths alone"
            )
            return Failure("", "", "")

    def _locate(self, now_s: float, failure: Failure | None) -> Diagnosis:
        desk = self._desk
        if self._lost:
            return self._lost_nodes()
        try:
            findings = [*self._findings.values(), *self._who_left()]
            evidence = desk.evidence(now_s, states=self._known_states(), findings=findings)
            diagnosis = desk.locators.crash(evidence)
            if failure is None:
                return diagnosis
            own = frozenset(rank for rank, death in self._findings.items() if testimony(death) == "own")
            places = evidence.nodes, desk.cluster.node_at_address()
            return desk.locators.by_words(diagnosis, failure, *places, own)
        except Exception as error:
            return unlocated("crash", error)

    def _who_left(self) -> list[Finding]:
        """The ranks that ended with exit code 0 in this incarnation."""
        left, incarnation = self._desk.cluster.left, max(self.incarnation, 0)
        return [finding for finding in left.values() if finding.incarnation == incarnation]

    def _known_states(self) -> list[RankState]:
        """The states of the ranks at the first death, as far as their agents have answered."""
        return [state for _, state in sorted(self._states.items())]

    def _vanished(self) -> list[str]:
        """The lost nodes of which nobody has said that they leave."""
        return [name for name in self._lost if name not in self._parted]

    def _lost_nodes(self) -> Diagnosis:
        """Blame the lost nodes; but where over a tenth are lost at once, the network or the controller has failed."""
        cluster, vanished = self._desk.cluster, self._vanished()
        lost_ranks = {rank for ranks in self._lost.values() for rank in ranks}
        others = tuple(sorted(set(cluster.node_of) - lost_ranks))
        told: list[str] = []
        if vanished:
            gone = fold_ranks(rank for name in vanished for rank in self._lost[name])
            told.append(f"agent and launcher of {fold_nodes(vanished)} (ranks {gone}) are gone together")
        lost, count = len(vanished), len(cluster.nodes)
        if lost > max(1, count // 10):
            missing = f"{lost} of {count} nodes vanished together: network or controller"
            return Diagnosis("crash", (), others, tuple(told), (missing,), "nodes lost")
        culprits: list[Culprit] = []
        for name, ranks in sorted(self._lost.items()):
            with_ranks = f"with ranks {fold_ranks(ranks)}"
            if (why := self._parted.get(name)) is not None:
                told.append(f"the launcher of {name} said that it leaves: {why}")
                culprits.append(Culprit(node=name, confidence="high", cause="node left", detail=with_ranks))
            else:
                detail = f"{with_ranks}: its host, network or launcher died"
                culprits.append(Culprit(node=name, confidence="medium", cause="node lost", detail=detail))
        told += [f"rank {rank} ended, too" for rank in sorted(self._findings)[:3]]
        title = "node lost" if vanished else "node left"
        return Diagnosis("crash", tuple(culprits), others, tuple(told), (), title)


def _tells_why(cause: FailureCause | None) -> bool:
    return cause is not None and cause.first is not None


def _how_it_ended(deaths: Mapping[int, Finding], by_us: Collection[int]) -> str:
    """What became of the ranks of a hang, in one line."""
    ended = [rank for rank in deaths if rank in by_us]
    others = [rank for rank in deaths if rank not in by_us]
    told = [f"{_ranks(ended)} {'was' if len(ended) == 1 else 'were'} ended"] if ended else []
    if others and ended:
        whose = "its connection" if len(others) == 1 else "their connections"
        told.append(f"{_ranks(others)} lost {whose}")
    elif others:
        words = next((deaths[rank].message for rank in others if deaths[rank].message), "")
        text = f"{_ranks(others)} {'gave up waiting' if not words or tells_of_a_timeout(words) else 'died'}"
        told.append(f"{text}: {words[:_MOST_WORDS]}" if words else text)
    return "; ".join(told)


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)}"
