"""The incidents of a job that are open: findings and answers go to their cases, and what these ask for goes out.

Whatever is wrong with the job is decided here; who is there and who plays which rank is the controller's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Effect, Say, Send, WriteIncident
from keepstep.control.incidents.crash_case import CrashCase
from keepstep.control.incidents.desk import noted
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.hang_remedy import HangRemedy, blamed_by, outlook
from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.questions import Question, Questions, probes_of
from keepstep.control.incidents.slow_case import SlowCase
from keepstep.control.incidents.validations import Validations
from keepstep.control.membership.operator_orders import Operating
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import MOST_RANKS
from keepstep.control.remedies.mitigation import Mitigation
from keepstep.control.settings import Settings
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Incident, Recovery
from keepstep.wire.messages import Kill, Message, Probed, Profile, SaveRings, States

_NO_STEP = 1 << 62
_MOST_SLOW_CASES = 16
_SAVE_ALL_RANKS = 1024
_OUTLOOK = {  # of a slowdown, by what may be done about one
    "auto": "none yet: a remedy is applied once one pays",
    "advise": "none: a remedy that pays is only advised (--mitigate advise)",
    "off": "none (--mitigate off)",
}


class Cases:
    """Those of one job. Implements :class:`keepstep.control.incidents.desk.Desk` for them."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        locators: Locators,
        reforming: Reforming,
        unix_s: Callable[[float], float],
        is_ending: Callable[[], bool],
        effect: Callable[[Effect], None],
        operating: Operating,
    ) -> None:
        """``is_ending``: the job has ended, or is told to; ``effect``: have it carried out."""
        self._operating = operating
        self.cluster, self.locators = cluster, locators
        self.ignored = 0  # findings that made no sense
        self._settings, self._reforming = settings, reforming
        self._unix_s, self._is_ending, self._effect = unix_s, is_ending, effect
        self._slow: list[SlowCase] = []
        self._hang: HangCase | None = None
        self._crash: CrashCase | None = None
        self._remedy: HangRemedy | None = None
        self._questions = Questions(cluster, settings.answer_s, settings.probe_s, self._send)
        self.validations = Validations(
            self, self._standstill, lambda peer, answer: self._send((peer,), answer)
        )
        self.mitigation = Mitigation(self, settings.mitigate, lambda: reforming.incarnation, self._standstill)
        self._hold_number = 0
        self._changes: deque[int] = deque(maxlen=64)
        self._newest_number = 0
        self._waiting_again_s = 0.0
        self._now_s = 0.0  # of the last tick

    def restore(self, incidents: Iterable[Incident]) -> None:
        """Go on where an earlier controller was."""
        for incident in incidents:
            self._newest_number = max(self._newest_number, incident.number)
            if incident.onset_step is not None:
                self._changes.append(incident.onset_step)
            if incident.status != "open":
                continue
            if incident.kind == "slow":
                self._slow.append(SlowCase(self, incident))
            elif incident.kind == "crash":
                self._crash = CrashCase(self, incident)
            else:
                self._hang = HangCase(self, incident)

    def tick(self, peers: Collection[int], now_s: float) -> None:
        """Time passes. ``peers``: those that are connected."""
        self._now_s = now_s
        self.watch_waiting(now_s)
        for question in self._questions.due(now_s):
            self._decide(question, now_s)
        for case in self._open():
            case.tick(now_s)
        self._tick_remedy(now_s)
        self.validations.tick(peers, now_s)
        self._sweep()
        self.mitigation.tick(self._slow, now_s)
        self._sweep()

    def end(self, now_s: float) -> None:
        """Decide what waits, close what is open."""
        self.validations.end(now_s)
        for case in self._open():
            case.end(now_s)
        self._slow, self._hang, self._crash = [], None, None

    @property
    def incidents(self) -> list[Incident]:
        """Those without an end."""
        found = [case.incident for case in self._open() if case.incident is not None]
        return sorted(found, key=lambda incident: incident.number)

    @property
    def newest_number(self) -> int:
        """The highest incident number given out in this run."""
        return self._newest_number

    @property
    def dying(self) -> int:
        """The incarnation in which there is a death; -1 when there is none."""
        return self._crash.incarnation if self._crash is not None else -1

    # --- what the cases call (Desk) -------------------------------------------------------------------------------

    def ask_profiles(
        self,
        first_step: int,
        last_step: int,
        now_s: float,
        onset_step: int = -1,
        blocks_of: tuple[int, ...] = (),
    ) -> int:
        return self._questions.ask_profiles(first_step, last_step, now_s, onset_step, blocks_of)

    def ask_states(self, stacks: bool, now_s: float, nodes: Collection[int] | None = None) -> int:
        return self._questions.ask_states(stacks, now_s, nodes)

    def ask_probes(self, pairs: Sequence[tuple[str, str]], now_s: float, load_bytes: int = 0) -> int | None:
        return self._questions.ask_probes(pairs, now_s, load_bytes)

    def validate(self, case: SlowCase, groups: Sequence[Sequence[int]], now_s: float) -> bool:
        return self._settings.validate and self.validations.begin(case, groups, now_s)

    def order(self, message: Message, node: int | None = None) -> None:
        agents = self.cluster.agents()
        peers = tuple(peer for rank, peer in agents.items() if node is None or rank == node)
        if peers:
            self._send(peers, message)

    def hold_number(self, now_s: float) -> int:
        self._hold_number = max(self._hold_number + 1, int(self._unix_s(now_s) * 1000))
        return self._hold_number

    def next_number(self) -> int:
        self._newest_number += 1
        return self._newest_number

    def publish(self, incident: Incident, say: Literal["verdict", "sharper", "acts", "closes", ""]) -> None:
        what, in_s = (
            self._outlook(incident) if incident.status == "open" and not incident.actions else ("", None)
        )
        at_unix_s = None if in_s is None else self._unix_s(self._now_s + in_s)
        incident = replace(incident, next_action=what, next_unix_s=at_unix_s)
        self._effect(WriteIncident(incident))
        if say:
            self._effect(Say(incident, say))
        if say == "verdict":
            self._save_rings(incident)
        if incident.onset_step is not None and incident.kind == "slow":
            change = incident.onset_step if incident.relief_step is None else incident.relief_step
            if change not in self._changes:
                self._changes.append(change)

    def _outlook(self, incident: Incident) -> tuple[str, float | None]:
        """What will be done about an open incident if nothing changes, and in how many seconds."""
        settings, hang = self._settings, self._hang
        if incident.kind == "slow":
            return _OUTLOOK[settings.mitigate], None
        if incident.kind == "crash" or hang is None:
            return "", None
        if not settings.restart_hangs:
            return (
                "none: hangs are reported, not ended (--on-hang restart with --max-restarts ends them)",
                None,
            )
        if self._reforming.restarts >= settings.max_restarts:
            return "none: no restart is left", None
        blamed, why_not = blamed_by(incident, hang.standing, self.cluster.known_ranks)
        return outlook(blamed, hang.last_states) if blamed else (f"none: {why_not}", None)

    def open_slow(self, incident: Incident, now_s: float) -> SlowCase:
        incident = noted(self, incident, "verdict", now_s)
        case = SlowCase(self, incident)
        self._slow.append(case)
        self.publish(incident, "verdict")
        return case

    def unix_s(self, now_s: float) -> float:
        return self._unix_s(now_s)

    def stamped(self, action: Action) -> Action:
        step = self.cluster.newest_step
        return replace(action, step=step if step >= 0 else None, begun_unix_s=self._unix_s(self._now_s))

    def clocks(self) -> Any:
        try:
            return self.locators.offsets(self.cluster.clock_samples())
        except Exception:  # without clocks the locators still have durations
            return None

    def previous_change(self, step: int) -> int:
        return max((change for change in self._changes if change < step), default=-1)

    def next_change(self, step: int) -> int:
        return min((change for change in self._changes if change > step), default=_NO_STEP)

    # --- findings -------------------------------------------------------------------------------------------------

    def found(self, finding: Finding, now_s: float) -> None:
        """What an agent or a launcher has found."""
        if not 0 <= finding.rank < MOST_RANKS or not _is_finite(finding):
            self.ignored += 1
            return
        kind = finding.kind
        if kind == "crash":
            self._crash_found(finding, now_s)
        elif self._crash is not None or self._is_ending():
            return  # what happens after a death is its consequence
        elif kind == "slow":
            self._slow_found(finding, now_s)
        elif kind == "relief":
            for case in self._slow:
                if not case.closed and case.relieved_by(finding):
                    case.relief(finding, now_s)
        elif kind == "hang":
            if self._hang is None or self._hang.closed:
                self._hang = HangCase(self)
            self._hang.found(finding, now_s)
        elif kind == "resumed":
            if self._hang is not None and not self._hang.closed:
                self._hang.resumed(finding, now_s)
        elif kind != "exit":
            self.ignored += 1

    def _slow_found(self, finding: Finding, now_s: float) -> None:
        if finding.onset_step < 0:
            self.ignored += 1
            return
        for case in self._slow:
            if not case.closed and case.takes(finding):
                case.found(finding, now_s)
                return
        if len(self._slow) >= _MOST_SLOW_CASES:
            self._slow[-1].found(finding, now_s)
            return
        case = SlowCase(self)
        self._slow.append(case)
        case.found(finding, now_s)

    def watch_waiting(self, now_s: float) -> None:
        """When all ranks wait for others, and longer than usual, none of them is in a pause: they have locked up.

        Of a few nodes that are not heard any more that cannot be known; they may be what the others wait for.
        """
        cluster = self.cluster
        if not cluster.overdue_nodes or self.validations.under_way or self._standstill():
            return
        if now_s < self._waiting_again_s:
            return
        nodes = cluster.nodes.values()
        heard = sum(node.overdue and not node.mute for node in nodes)
        if (
            all(node.overdue or node.mute for node in nodes)
            and 2 * heard >= len(nodes)
            and sum(len(node.ranks) for node in nodes) == cluster.known_ranks
        ):
            # by the next time the heartbeats are new ones
            self._waiting_again_s = now_s + 2 * self._settings.heartbeat_s
            self._hang = HangCase(self)
            self._hang.all_wait(now_s)

    def _crash_found(self, finding: Finding, now_s: float) -> None:
        if self._crash is not None and finding.incarnation < self._crash.incarnation:
            return  # said again to a controller that began anew
        self._death_in(finding.incarnation, now_s).found(finding, now_s)
        for case in [*self._slow, *([self._hang] if self._hang else [])]:
            case.end(now_s)
        self._sweep()

    def lost(self, node: Node, now_s: float) -> bool:
        """Neither agent nor launcher of a node is there; False: a hang's probes reach it, so it is."""
        if self._hang is not None and self._hang.is_reached(node.name):
            return False
        self._crash_case().lost(node.name, node.ranks, now_s)
        return True

    def lost_in(self, incarnation: int, node: Node, now_s: float) -> None:
        """A node of a job whose nodes begin again together is lost in this incarnation."""
        self._death_in(incarnation, now_s).lost(node.name, node.ranks, now_s, incarnation)

    def halted(self, now_s: float) -> None:
        """Workers are told to end: they hang no more."""
        if self._hang is not None:
            self._hang.end(now_s)
            self._sweep()

    def begin_again(self, how: str, now_s: float) -> None:
        """All nodes do; that is what was done about a death."""
        if self._crash is not None:
            self._crash.decide(now_s)
            self._crash.acted(Action("all nodes begin again", None, how))

    def exit_code(self, now_s: float) -> int:
        """That of the death which came first; 0 when there is none."""
        if self._crash is None:
            return 0
        self._crash.decide(now_s)
        return self._crash.exit_code or 0

    def stopped(self, code: int) -> None:
        """The job was told to end."""
        if self._crash is not None:
            self._crash.acted(Action("stop the job", None, f"exit code {code}"))

    def recovered(self, recovery: Recovery, now_s: float) -> None:
        """The job trains again."""
        if self._crash is not None and 0 <= self._crash.incarnation < recovery.incarnation:
            self._crash.restarted(recovery, now_s)
            self._sweep()

    def _death_in(self, incarnation: int, now_s: float) -> CrashCase:
        """The case of a death in this incarnation; that of an earlier one is over."""
        case = self._crash_case()
        if incarnation > case.incarnation >= 0:
            case.restarted(None, now_s)
            case = self._crash_case()
        return case

    def _crash_case(self) -> CrashCase:
        if self._crash is None or self._crash.closed:
            self._crash = CrashCase(self)
        return self._crash

    def _tick_remedy(self, now_s: float) -> None:
        case = self._hang
        if case is None or case.closed or self._crash is not None or self._is_ending():
            self._remedy = None
        elif (
            self._settings.restart_hangs and not self._reforming.under_way and not self.validations.under_way
        ):
            if self._remedy is None or self._remedy.case is not case:
                self._remedy = HangRemedy(self, case, self._end_hung)
            self._remedy.tick(now_s)

    def _end_hung(self, kill: Kill) -> bool:
        node = self.cluster.home(kill.rank)
        if node is None or node.launcher is None:
            return False
        self._send((node.launcher,), kill)
        return True

    def _standstill(self) -> str:
        """Why nobody can be held: the job does not run."""
        if self._crash is not None or self._is_ending():
            return "the job is ending"
        if self._reforming.under_way:
            return "its workers are being ended" if not self._reforming.suspended else "the job is suspended"
        return "the job hangs" if self._hang is not None else ""

    # --- answers --------------------------------------------------------------------------------------------------

    def answered(self, node: Node, answer: Profile | States | Probed, now_s: float) -> None:
        """What a node's agent was asked for."""
        question = self._questions.answered(node, answer, now_s)
        if question is None:
            return
        if question.due(now_s):
            self._decide(question, now_s)
        elif isinstance(answer, Probed) and self._hang is not None and self._hang.probing == question.number:
            self._hang.probed(probes_of(question), now_s, final=False)

    def _decide(self, question: Question, now_s: float) -> None:
        self._questions.close(question)
        if question.kind is Probed:
            probes = probes_of(question)
            self.mitigation.probed(question.number, probes, now_s)
            for case in (*self._slow, self._hang):
                if case is not None and case.probing == question.number and not case.closed:
                    case.probed(probes, now_s)
        elif question.kind is States:
            case, remedy = self._hang, self._remedy
            if remedy is not None and remedy.question == question.number:
                remedy.states(question.answers)
            elif case is not None and case.question == question.number and not case.closed:
                case.states(question.answers, self._names(question.unanswered), now_s)
        else:
            if self.mitigation.question == question.number:
                self.mitigation.profiles(question.answers, now_s)
            for case in self._slow:
                if case.question == question.number and not case.closed:
                    case.profiles(question.answers, self._names(question.unanswered), now_s)
        self._sweep()

    def exchange(self, takers: Mapping[int, int], why: str, now_s: float) -> str:
        """See `Desk`."""
        return self._operating.exchange(takers, why, now_s)

    def irreplaceable(self, nodes: Collection[int]) -> str:
        """See `Desk`."""
        return self._operating.irreplaceable(nodes)

    def replace(self, nodes: Mapping[int, str], why: str, now_s: float) -> str:
        """See `Desk`."""
        return self._operating.replace(nodes, why, now_s)

    def _names(self, node_ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.cluster.nodes[rank].name for rank in node_ranks)

    def _open(self) -> list[SlowCase | HangCase | CrashCase]:
        cases: list[SlowCase | HangCase | CrashCase] = [case for case in self._slow if not case.closed]
        if self._hang is not None and not self._hang.closed:
            cases.append(self._hang)
        if self._crash is not None and not self._crash.closed:
            cases.append(self._crash)
        return cases

    def _sweep(self) -> None:
        if any(case.closed for case in self._slow):
            self._slow = [case for case in self._slow if not case.closed]
        if self._hang is not None and self._hang.closed:
            self._hang = None
        if self._crash is not None and self._crash.closed:
            self._crash = None

    def _send(self, peers: tuple[int, ...], message: Message) -> None:
        self._effect(Send(peers, message))

    def _save_rings(self, incident: Incident) -> None:
        agents = self.cluster.agents()
        if self.cluster.known_ranks > _SAVE_ALL_RANKS:
            named = {culprit.node for culprit in incident.culprits}
            named |= {node for one in incident.culprits if one.link for node in one.link.nodes}
            agents = {rank: peer for rank, peer in agents.items() if self.cluster.nodes[rank].name in named}
        if agents:
            self._send(tuple(agents.values()), SaveRings(incident.number))


def _is_finite(finding: Finding) -> bool:
    values = (getattr(finding, field.name) for field in fields(finding))
    return all(math.isfinite(value) for value in values if isinstance(value, float))
