"""The open incidents of a job: findings and answers go to their cases, and the remedies follow from these.

What is wrong with the job is decided here; who is there and who plays which rank is decided in the controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields

from keepstep.checkpoint.memory.slots import Key
from keepstep.control.cluster import INSIDE_S, Cluster, Node
from keepstep.control.effects import Effect, Send
from keepstep.control.incidents.agents import Agents, Question, probes_of
from keepstep.control.incidents.case import Desk
from keepstep.control.incidents.corrupt_case import GO_BACK, CorruptCase
from keepstep.control.incidents.crash_case import CrashCase
from keepstep.control.incidents.early_slowness import EarlySlowness
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.hang_remedy import HangRemedy
from keepstep.control.incidents.held_back import HeldBack
from keepstep.control.incidents.job_words import JobWords
from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.open_cases import OpenCases
from keepstep.control.incidents.register import Register
from keepstep.control.incidents.slow_case import SlowCase
from keepstep.control.incidents.validations import Validations
from keepstep.control.incidents.warm_up_pairs import WarmUpPairs
from keepstep.control.membership.pauses import RankMoves
from keepstep.control.membership.rendezvous import MOST_RANKS
from keepstep.control.remedies.mitigation import Mitigation
from keepstep.control.running.thresholds import LiveSettings
from keepstep.control.saved_checksums import SavedChecksums
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Incident, Recovery
from keepstep.detect.corruption import Compared, Difference
from keepstep.wire.messages import (
    Checksums,
    Doubt,
    Families,
    Kill,
    Probed,
    Profile,
    States,
    WhichFamilies,
    Words,
)

_MOST_SLOW_CASES = 16
_MOST_CORRUPT_CASES = 16
_UNWATCHED = Action("watching is off", None, "by order of an operator")
_SETTLE_S = 3.0  # after watching has come on again, what was slow before is told only if it still is
_SETTLE_STEPS = 6


class Cases:
    """Opens cases, hands them what concerns them, and forgets them when they are closed."""

    def __init__(
        self,
        settings: LiveSettings,
        cluster: Cluster,
        locators: Locators,
        open_cases: OpenCases,
        rank_moves: RankMoves,
        effects: list[Effect],
        unix_s: Callable[[float], float],
    ) -> None:
        agents = Agents(cluster, settings.start, effects, unix_s)
        validations = Validations(
            cluster, agents, self._why_unheld, effects, is_wanted=lambda: settings.now.validate
        )
        register = Register(settings, cluster, open_cases.reforming, effects, unix_s)
        words = JobWords(unix_s, cluster.moved_on_s)
        self.desk = Desk(cluster, locators, agents, validations, rank_moves, register, words, unix_s)
        mitigate = (lambda: settings.now.mitigate, open_cases.reforming, open_cases)
        self.mitigation = Mitigation(self.desk, *mitigate)
        self.early = EarlySlowness(cluster)
        self._warm_up_pairs = WarmUpPairs(cluster, agents, effects)
        self.ignored = 0  # findings that made no sense
        self.recovery: Recovery | None = None  # the newest recovery of the job
        self._checksums = SavedChecksums()
        self.doubted: Key | None = None  # the first snapshot in which replicas differ that must not
        self._gone_back: set[int] = set()  # wrong ranks for which all ranks went back
        self._open, self._settings, self._effects = open_cases, settings, effects
        self.is_watched = True  # False: an operator wants no verdicts, remedies or holds
        self.held_back = HeldBack()
        self._remedy: HangRemedy | None = None
        self._waiting_again_s = 0.0  # until then ranks that all wait open no case
        self._inside_again_s = 0.0  # until then ranks that all are in operations open no case
        self._inside_pause_s = INSIDE_S  # how long that is after the next look

    def restore(self, incidents: Iterable[Incident]) -> None:
        """Continue the incidents that an earlier controller of this run left open."""
        for incident in incidents:
            self.desk.register.restore(incident)
            if incident.status != "open":
                continue
            if incident.kind == "slow":
                self._open.slow.append(SlowCase(self.desk, incident))
            elif incident.kind == "corrupt":
                self._open.corrupt.append(CorruptCase(self.desk, incident))
            elif incident.has_deaths:
                self._open.crash = CrashCase(self.desk, incident)
            else:
                self._open.hang = HangCase(self.desk, incident)

    def tick(self, peers: Collection[int], now_s: float) -> None:
        """Let time pass. ``peers``: the numbers of those that are connected."""
        self.desk.register.now_s = now_s
        if self.is_watched:
            self.watch_waiting(now_s)
            self._look_early(now_s)
            if not self._open.standstill():
                self._warm_up_pairs.tick(now_s)
            for finding in self.held_back.due(self.desk.cluster.newest_step, now_s):
                self.found(finding, now_s)
        for question in self.desk.agents.due(now_s):
            self._decide(question, now_s)
        for case in self._open.all():
            case.tick(now_s)
        self._close_recovered(now_s)
        self._tick_remedy(now_s)
        self.desk.validations.tick(peers, now_s)
        self._hand_back(now_s)
        self._open.sweep()
        if self.is_watched:
            self.mitigation.tick(self._open.slow, now_s)
            self._open.sweep()

    def watch(self, on: bool, now_s: float) -> None:
        """An operator wants the job to be watched from now on, or not: all cases but that of a crash are closed.

        When watching comes on, what agents then say to be slow counts only if it still is a few steps later.
        """
        self.is_watched = on
        self.held_back.forget()
        cluster = self.desk.cluster
        if not on:
            self.desk.validations.end(now_s, "watching was switched off")
            for case in (*self._open.slow, *self._open.corrupt, self._open.hang):
                if case is not None and not case.closed:
                    case.acted(_UNWATCHED)
                    case.end(now_s)
            self._open.sweep()
            self._remedy = None
            return
        iteration_s = max((beat.iteration_s for beat in cluster.beats()), default=0.0)
        self.held_back.hold(now_s + max(_SETTLE_S, _SETTLE_STEPS * iteration_s))
        self.early.begin_again()
        self._waiting_again_s = now_s + 2 * self._settings.start.heartbeat_s
        self._inside_again_s, self._inside_pause_s = now_s + INSIDE_S, INSIDE_S

    def _why_unheld(self) -> str:
        """Why no rank can be held now; "": it can."""
        return self._open.standstill() or ("" if self.is_watched else "watching is off: say watch on before")

    def end(self, now_s: float) -> None:
        """Decide what is undecided, and close all cases."""
        self.desk.validations.end(now_s)
        for case in self._open.all():
            case.end(now_s)
        self._open.slow.clear()
        self._open.corrupt.clear()
        self._open.hang = self._open.crash = None
        self.desk.register.tell_untold()

    @property
    def incidents(self) -> list[Incident]:
        """The incidents that are open."""
        found = [case.incident for case in self._open.all() if case.incident is not None]
        return sorted(found, key=lambda incident: incident.number)

    @property
    def dying(self) -> int:
        """The incarnation in which a rank died; -1 while none is known to have."""
        return self._open.crash.incarnation if self._open.crash is not None else -1

    # --- findings -------------------------------------------------------------------------------------------------

    def found(self, finding: Finding, now_s: float) -> None:
        """Take what an agent or a launcher has found."""
        values = [getattr(finding, field.name) for field in fields(finding)]
        is_finite = all(math.isfinite(value) for value in values if isinstance(value, float))
        if not 0 <= finding.rank < MOST_RANKS or not is_finite:
            self.ignored += 1
            return
        kind = finding.kind
        if kind == "crash":
            self._crash_found(finding, now_s)
        elif kind == "exit":
            self._left(finding, now_s)
        elif self._open.ends(finding.incarnation) or not self.is_watched:
            return  # findings after a crash are its consequences
        elif self.held_back.takes(finding, self._settings.now.hang_after_s, now_s):
            return
        elif kind == "slow":
            self._slow_found(finding, now_s)
        elif kind == "relief":
            for case in self._open.slow:
                if not case.closed and case.relieved_by(finding):
                    case.relief(finding, now_s)
        elif kind == "hang":
            if self._open.hang is None or self._open.hang.closed:
                self._open.hang = HangCase(self.desk)
            self._open.hang.found(finding, now_s)
        elif kind == "resumed":
            if self._open.hang is not None and not self._open.hang.closed:
                self._open.hang.resumed(finding, now_s)
        else:
            self.ignored += 1

    def _slow_found(self, finding: Finding, now_s: float) -> None:
        if finding.onset_step < 0:
            self.ignored += 1
            return
        if 0 < finding.after_s < self._settings.now.slow_ratio * finding.before_s:
            return
        for case in self._open.slow:
            if not case.closed and case.takes(finding):
                case.found(finding, now_s)
                return
        if len(self._open.slow) < _MOST_SLOW_CASES:
            self._open.slow.append(SlowCase(self.desk))
        self._open.slow[-1].found(finding, now_s)

    def _look_early(self, now_s: float) -> None:
        """Open a case for a rank that has been slower than its peers since the first steps."""
        if self._open.slow or self._open.crash is not None or self._open.standstill():
            return
        found = self.early.look(now_s) if now_s >= self.held_back.until_s else None
        if found is not None:
            self._open.slow.append(SlowCase(self.desk, early=True))
            self._open.slow[-1].found(found, now_s)

    def compare(self, node: Node, message: Checksums | Families, now_s: float) -> None:
        """Take checksums of what a node's ranks saved, or which tensors these are of."""
        if not self.is_watched:
            return
        if isinstance(message, Families):
            found = self._checksums.introduced(message)
        else:
            found = self._checksums.heard(node.rank, node.ranks, message, self.desk.cluster.nodes)
        for key, compared in found:
            self._compared(key, compared, now_s)
        if isinstance(message, Checksums) and node.agent is not None:
            asked = self._checksums.unknown(message)
            self._effects += [Send((node.agent,), WhichFamilies(digest)) for digest in asked]

    def tell_doubt(self, peer: int) -> None:
        """Tell an agent that has just come which snapshots are to be avoided."""
        if self.doubted is not None:
            self._effects.append(Send((peer,), Doubt(self.doubted.pack())))

    def _compared(self, key: Key, compared: Compared, now_s: float) -> None:
        for case in self._open.corrupt:
            if not case.closed and compared.mended:
                case.mended(compared.mended, key.step, now_s)
        self._open.sweep()
        if not self._open.corrupt and self.doubted is not None:
            self._doubt(None)
        for difference in compared.differences:
            cases = [case for case in self._open.corrupt if case.odd == difference.odd]
            if not cases and len(self._open.corrupt) >= _MOST_CORRUPT_CASES:
                continue
            if self.doubted is None or self.doubted.incarnation != key.incarnation:
                self._doubt(key)
            if not cases:
                cases = [CorruptCase(self.desk)]
                self._open.corrupt += cases
            cases[0].differs(difference, key.incarnation, now_s)
            if self._settings.now.restore_corrupt:
                self._go_back(cases[0], difference, now_s)

    def _doubt(self, key: Key | None) -> None:
        """Have all nodes avoid the snapshot and later ones when they restore; None: none any more."""
        self.doubted = key
        agents = tuple(self.desk.cluster.agents().values())
        self._effects.append(Send(agents, Doubt(key.pack() if key else 0)))

    def _go_back(self, case: CorruptCase, difference: Difference, now_s: float) -> None:
        """Have all ranks go back to the last step at which they were alike; once for each rank that is wrong."""
        rank = difference.odd[0] if len(difference.odd) == 1 else None
        if rank is None or rank in self._gone_back:
            return
        why = f"the state of rank {rank} is wrong since step {difference.since}"
        standstill = self._open.standstill()
        if refused := standstill or self.desk.rank_moves.go_back(why, now_s):
            case.acted(Action("none", None, f"the ranks cannot go back: {refused}"))
            return
        self._gone_back.add(rank)
        case.acted(Action(GO_BACK, None, f"to step {difference.alike}, the last at which they were alike"))

    def watch_waiting(self, now_s: float) -> None:
        """Open a hang's case when all ranks wait for others longer than usual: then none of them is in a pause.

        Less than half of the nodes may be silent: they may be the ones that the others wait for. Before that, where all
        ranks are in operations: calls that do not fit each other need no patience, in a job's first step as little as
        later. They are looked for after 3, 6, 12 … s.
        """
        cluster = self.desk.cluster
        if not cluster.inside_nodes:
            self._inside_again_s, self._inside_pause_s = 0.0, INSIDE_S
            if not cluster.overdue_nodes:
                return
        is_late = self.is_watched and now_s >= self._waiting_again_s
        if not is_late or self.desk.validations.under_way or self._open.standstill():
            return
        nodes = cluster.nodes.values()
        if sum(len(node.ranks) for node in nodes) != cluster.known_ranks:
            return
        heard = sum(node.overdue and not node.mute for node in nodes)
        if all(node.overdue or node.mute for node in nodes) and 2 * heard >= len(nodes):
            # By then every node has sent a new heartbeat.
            self._waiting_again_s = now_s + 2 * self._settings.start.heartbeat_s
            least_s = self._settings.now.hang_after_s
            if least_s and min((one.overdue_s for one in cluster.beats()), default=0.0) < least_s:
                return
            self._open.hang = HangCase(self.desk)
            self._open.hang.all_wait(now_s)
        elif now_s >= self._inside_again_s and all(node.inside and not node.mute for node in nodes):
            self._inside_again_s = now_s + self._inside_pause_s
            self._inside_pause_s *= 2
            self._open.hang = HangCase(self.desk)
            self._open.hang.all_inside(now_s)

    def _crash_found(self, finding: Finding, now_s: float) -> None:
        if self._open.crash is not None and finding.incarnation < self._open.crash.incarnation:
            return  # repeated to a controller that was restarted
        crash = self._death_in(finding.incarnation, now_s)
        crash.found(finding, now_s)
        if self._open.hang is not None:
            crash.follows(self._open.hang)
            self._open.hang = None
        for case in self._open.slow:
            case.end(now_s)
        self._open.sweep()

    def _left(self, finding: Finding, now_s: float) -> None:
        """Note that a rank ended with exit code 0: evidence, where others turn out to wait for it."""
        self.desk.cluster.leave(finding)
        if self._open.crash is not None:
            self._open.crash.left(now_s)

    def finished(self, node: Node, incarnation: int, now_s: float) -> None:
        """Note that all ranks of a node ended with exit code 0."""
        for rank in node.ranks:
            self._left(Finding("exit", rank, node.name, now_s, -1, incarnation=incarnation), now_s)

    def lost(self, node: Node, now_s: float) -> bool:
        """Note that a node's agent and launcher are gone; False: a hang's probes reach it, so it is not lost."""
        if self._open.hang is not None and self._open.hang.is_reached(node.name):
            return False
        self._crash_case().lost(node, now_s)
        return True

    def lost_in(self, incarnation: int, node: Node, now_s: float) -> None:
        """Note that a node is lost in this incarnation, of a job that re-forms without it."""
        self._death_in(incarnation, now_s).lost(node, now_s, incarnation)

    def halted(self, now_s: float) -> None:
        """Close the hang, as the workers are being ended."""
        if self._open.hang is not None:
            self._open.hang.end(now_s)
            self._open.sweep()

    def incarnation_over(self, now_s: float) -> None:
        """Give the verdict on the open crash: what the ranks were in is forgotten next."""
        if self._open.crash is not None:
            self._open.crash.decide(now_s)
        over = self.desk.words.begin_again(now_s)
        if self._open.crash is not None:
            self._open.crash.keep_words(over)

    def heard(self, node: Node, words: Words) -> None:
        """Take what ranks and the kernel of a node have said."""
        is_new = self.desk.words.heard(node.name, words)
        if self._open.crash is not None:
            self._open.crash.heard(node.name, words, is_new=is_new)

    def processes_began(self, now_s: float, *, exchanged: bool = False) -> None:
        """Start over with new processes. ``exchanged``: with nodes in each other's places."""
        self.held_back.forget()
        self.early.begin_again()
        self.mitigation.begin_again(now_s, exchanged=exchanged)

    def begin_again(self, how: str) -> None:
        """Note at the open crash that all nodes begin again: that is what was done about it."""
        if self._open.crash is not None:
            self._open.crash.acted(Action("all nodes begin again", None, how))

    def exit_code(self, now_s: float) -> int:
        """The exit code of the first death; 0 without one."""
        return 0 if self._open.crash is None else self._open.crash.exit_code(now_s) or 0

    def stopped(self, code: int) -> None:
        """Note at the open crash that the job was told to end."""
        if self._open.crash is not None:
            self._open.crash.acted(Action("stop the job", None, f"exit code {code}"))

    def recovered(self, recovery: Recovery, now_s: float) -> None:
        """Note that the job trains again."""
        self.recovery = recovery
        if self._open.crash is not None and 0 <= self._open.crash.incarnation < recovery.incarnation:
            self._open.crash.restarted(recovery, now_s)
            self._open.sweep()

    def _close_recovered(self, now_s: float) -> None:
        """Close a crash that was heard of only after the recovery from it."""
        crash, recovery = self._open.crash, self.recovery
        if crash is None or crash.closed or crash.incident is None or recovery is None:
            return
        if 0 <= crash.incarnation < recovery.incarnation:
            crash.restarted(recovery, now_s)

    def _death_in(self, incarnation: int, now_s: float) -> CrashCase:
        """The case of a crash in this incarnation; a crash in an earlier one is over."""
        case = self._crash_case()
        if incarnation > case.incarnation >= 0:
            case.end(now_s)  # the job did not train in between
            case = self._crash_case()
        return case

    def _crash_case(self) -> CrashCase:
        if self._open.crash is None or self._open.crash.closed:
            self._open.crash = CrashCase(self.desk)
        return self._open.crash

    @property
    def _is_held_up(self) -> bool:
        """Whether the job is made to wait, or made anew, so that nobody is ended."""
        return self._open.reforming.under_way or self.desk.validations.under_way

    def _tick_remedy(self, now_s: float) -> None:
        case = self._open.hang
        if case is None or case.closed or self._open.ends(case.incarnation):
            self._remedy = None
        elif self._settings.now.restart_hangs and self.is_watched and not self._is_held_up:
            if self._remedy is None or self._remedy.case is not case:
                self._remedy = HangRemedy(self.desk, case, self._end_hung)
            self._remedy.tick(now_s)

    def _end_hung(self, kill: Kill) -> bool:
        node = self.desk.cluster.home(kill.rank)
        if node is None or node.launcher is None:
            return False
        self._effects.append(Send((node.launcher,), kill))
        if self._open.hang is not None:
            self._open.hang.ended.add(kill.rank)
        return True

    # --- answers --------------------------------------------------------------------------------------------------

    def answered(self, node: Node, answer: Profile | States | Probed, now_s: float) -> None:
        """Take a node's answer, and decide its question once all have answered."""
        question, hang = self.desk.agents.answered(node, answer, now_s), self._open.hang
        if question is None:
            return
        if question.is_decided:
            self._decide(question, now_s)
        elif isinstance(answer, Probed) and hang is not None and hang.probing == question.number:
            hang.probed(probes_of(question), now_s, final=False)

    def _decide(self, question: Question, now_s: float) -> None:
        if question.kind is Probed:
            probes = probes_of(question)
            if self._warm_up_pairs.question == question.number:
                self._warm_up_pairs.probed(probes, now_s)
            self.mitigation.probed(question.number, probes, now_s)
            for case in (*self._open.slow, self._open.hang, self._open.crash):
                if case is not None and case.probing == question.number and not case.closed:
                    case.probed(probes, now_s)
        elif question.kind is States:
            case, remedy, crash = self._open.hang, self._remedy, self._open.crash
            if crash is not None and crash.takes(question.number):
                crash.states(question.number, question.answers)
            elif remedy is not None and remedy.question == question.number:
                remedy.states(() if self._is_held_up else question.answers, now_s)
            elif case is not None and case.question == question.number and not case.closed:
                case.states(question.answers, self._names(question.unanswered), now_s)
        else:
            if self.mitigation.question == question.number:
                self.mitigation.profiles(question.answers if self.is_watched else (), now_s)
            for case in self._open.slow:
                if case.question == question.number and not case.closed:
                    case.profiles(question.answers, self._names(question.unanswered), now_s)
                    self.early.learn_stages(case.stages)
        self._hand_back(now_s)
        self._open.sweep()

    def _hand_back(self, now_s: float) -> None:
        """Give other cases what agents have found, and a closed case has taken and not used."""
        for finding in [finding for case in self._open.slow for finding in case.given_back()]:
            self._slow_found(finding, now_s)

    def _names(self, node_ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.desk.cluster.nodes[rank].name for rank in node_ranks)
