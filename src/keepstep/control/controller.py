"""The controller's core: a message, who sent it and the time in; what to send, write and print out. No I/O, no clock.

The rim calls ``connected``, ``message``, ``disconnected`` and, ten times a second, ``tick``; each returns effects to be
carried out in order. Everything here is soft: after a restart agents and launchers say again who they are, which
groups they know and what still holds; incident numbers and open incidents come from the files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from keepstep.control.admission import Admission
from keepstep.control.backups import Backups
from keepstep.control.cluster import Cluster, Node
from keepstep.control.council import Councils
from keepstep.control.crash_case import CrashCase
from keepstep.control.effects import (
    Disconnect,
    Effect,
    Exit,
    Say,
    Send,
    StoreCouncil,
    StorePlacement,
    StoreStop,
    Tell,
    WriteIncident,
)
from keepstep.control.hang_case import HangCase
from keepstep.control.hang_remedy import HangRemedy
from keepstep.control.job_state import JobState, JobStates
from keepstep.control.locators import LibraryLocators, Locators
from keepstep.control.operating import Operating
from keepstep.control.questions import Question, Questions, probes_of
from keepstep.control.reforming import End, Exclude, HaltThese, Lost, Order, Reforming, Renew, Waiting
from keepstep.control.rendezvous import MOST_NODES, MOST_RANKS, Launcher, Placed, Rendezvous
from keepstep.control.slow_case import SlowCase
from keepstep.control.spending import Spending
from keepstep.control.validations import Validations
from keepstep.core.budgets import Limits
from keepstep.core.finding import Finding
from keepstep.core.incident import Action, Incident, Recovery
from keepstep.wire.messages import (
    PROTOCOL,
    Bye,
    Council,
    Ended,
    Failed,
    Found,
    Groups,
    Halt,
    Halted,
    Heartbeat,
    Held,
    Hello,
    Inventory,
    Join,
    Kept,
    Kill,
    Locate,
    Measured,
    Message,
    Operate,
    Placement,
    Probed,
    Profile,
    Reachable,
    Recovered,
    Refused,
    SaveRings,
    Sealed,
    Spare,
    States,
    Stop,
    Validate,
    Welcome,
)

_NO_STEP = 1 << 62
_EXCLUDED = 1  # exit code of a launcher that was excluded
_MOST_SLOW_CASES = 16
_SAVE_ALL_RANKS = 1024
_MOST_ENDPOINTS = 4
_MOST_TEXT = 500  # characters of what went wrong
_FINISHED = Stop(0, "all nodes have finished")
_STALL_S = 1.0  # a tick this late means that we slept, not the agents


@dataclass(frozen=True, slots=True)
class Settings:
    """Waiting times in seconds, and the number of nodes that the job was started for."""

    nodes: int = 1
    heartbeat_s: float = 1.0
    mute_s: float = 1.3  # without a heartbeat, that comes every second: nobody waits for the agent's answers
    silent_s: float = 3.0  # without a heartbeat: the agent is silent
    lost_s: float = 3.0  # neither agent nor launcher connected: the node is lost
    answer_s: float = 1.0  # longest wait for profiles and states
    probe_s: float = 4.0  # for probes: what agents wait, and a margin
    away_s: float = (
        10.0  # the same of one not heard since this controller began, or when many are gone at once
    )
    halt_s: float = 60.0  # for a launcher to end its workers
    join_s: float = 600.0  # for launchers to come, at first and for a place that is vacant
    last_call_s: float = 30.0
    grace_s: float = 1.0  # from the last launcher's end to our own
    backups: int = 0  # nodes that back up each rank's checkpoints
    validate: bool = True  # hold the job to test devices and links when profiles leave a doubt
    restart_budget: Limits = field(default_factory=Limits)
    restart_hangs: bool = False  # have processes ended that hang for sure: the launchers begin again
    seat: int = 0  # token of the launcher beside us; 0: the controller stays where it is
    term: int = 0  # in which that launcher was elected; 1: it was there first


@dataclass(slots=True)
class _Peer:
    role: str
    hello: Hello | None = None
    node: Node | None = None
    launcher: Launcher | None = None


class Controller:
    """One job's controller. Implements :class:`keepstep.control.desk.Desk` for its cases."""

    def __init__(
        self,
        settings: Settings,
        *,
        locators: Locators | None = None,
        unix_s: Callable[[float], float] = lambda now_s: now_s,
        pid: int = 0,
    ) -> None:
        self.settings = settings
        self.cluster = Cluster(max(settings.nodes, 1))
        self.locators: Locators = locators or LibraryLocators()
        self.rendezvous = Rendezvous(settings.nodes, join_s=settings.join_s, last_call_s=settings.last_call_s)
        waiting = Waiting(settings.lost_s, settings.away_s, settings.halt_s, settings.join_s)
        self.admission = Admission(unix_s)
        self.spending = Spending(settings.restart_budget, unix_s)
        self.reforming = Reforming(self.rendezvous, waiting, self._is_heard, self.spending)
        self.port = 0  # that we listen on
        self.councils = Councils(settings.seat, settings.term, lambda: self.port)
        self.backups = Backups(settings.backups, settings.lost_s)
        self.recovery: Recovery | None = None  # the newest
        self.states = JobStates()
        self.ignored = 0  # messages that made no sense in their place
        self._unix_s, self._pid = unix_s, pid
        self._peers: dict[int, _Peer] = {}
        self._effects: list[Effect] = []
        self._slow: list[SlowCase] = []
        self._hang: HangCase | None = None
        self._remedy: HangRemedy | None = None
        self._crash: CrashCase | None = None
        self._validations = Validations(
            self, self._standstill, lambda peer, answer: self._effects.append(Send((peer,), answer))
        )
        self._operating = Operating(
            self.rendezvous,
            self.reforming,
            lambda peer, answer: self._effects.append(Send((peer,), answer)),
            lambda peers, message: self._effects.append(Send(peers, message)),
        )
        self._hold_number = 0
        self._changes: deque[int] = deque(maxlen=64)
        self._newest_number = 0
        self._questions = Questions(
            self.cluster,
            settings.answer_s,
            settings.probe_s,
            lambda peers, message: self._effects.append(Send(peers, message)),
        )
        self._launchers: dict[Launcher, Ended | Bye | None] = {}
        self._stop: Stop | None = None
        self._over_s: float | None = None
        self._exited = False
        self._ticked_s: float | None = None
        self._quiet_until_s = 0.0
        self._waiting_again_s = 0.0
        self._withheld_since_s: float | None = None  # that a council is not settled
        self._excluded: list[Exclude] = []  # that may have to vote on it still

    # --- what the rim calls ---------------------------------------------------------------------------------------

    def restore(
        self,
        incidents: Iterable[Incident],
        placements: Sequence[tuple[str, int, Placement]] = (),
        stop: Stop | None = None,
        council: Council | None = None,
    ) -> None:
        """Continue a run that an earlier controller began: its numbers, open incidents, rank table, end.

        ``council``: that of this host's launcher; its table counts, and when it was led by another, that one is away.
        """
        self._stop = stop
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
        former = None
        if council is not None:
            self.councils.restore(council)
            placements = [(row.node, row.pid, row.placement) for row in council.table]
            if council.leader.token != self.settings.seat:
                former = Launcher(council.leader.node, council.leader.pid)
        if placements:
            table = {Launcher(node, pid): placement for node, pid, placement in placements}
            self.rendezvous.restore(table)
            self.reforming.restored(former)
            self._placed(table)
        if stop is not None:
            self.reforming.over()

    def connected(self, peer: int, role: str) -> None:
        """A peer has proved that it is of ours, in this role."""
        self._peers[peer] = _Peer(role)

    def disconnected(self, peer: int, now_s: float) -> list[Effect]:
        """A connection has gone."""
        gone = self._peers.pop(peer, None)
        if gone is None:
            return []
        node = gone.node
        if gone.launcher is not None and self.rendezvous.leave(gone.launcher, peer):
            self.reforming.gone(gone.launcher, now_s)
            self.councils.gone(gone.launcher, now_s)
        if node is not None:
            if node.agent == peer:
                node.agent = None
            if node.launcher == peer:
                node.launcher = None
            if node.agent is None and node.launcher is None:
                node.lost_s = now_s
        return self._taken()

    def message(self, peer: int, message: Message, now_s: float) -> list[Effect]:
        """One message from a connected peer."""
        sender = self._peers.get(peer)
        if sender is None:
            return []
        if type(message) is Heartbeat:
            self._heartbeat(peer, sender, message, now_s)
            return self._taken() if self._effects else []
        if isinstance(message, Hello):
            self._hello(peer, sender, message, now_s)
        elif sender.hello is None:
            self._refuse(peer, "say Hello first")
        elif isinstance(message, Found):
            self._found(message.finding, sender, now_s)
        elif isinstance(message, Groups):
            self.cluster.learn_groups(message.groups)
        elif isinstance(message, Profile | States | Probed):
            self._answered(sender, message, now_s)
        elif isinstance(message, Reachable):
            if sender.node is not None:
                sender.node.endpoints = message.endpoints[:_MOST_ENDPOINTS]
        elif isinstance(message, Held | Measured):
            if sender.node is not None:
                self._validations.told(sender.node, message, now_s)
        elif isinstance(message, Inventory):
            if sender.node is not None and message.node_rank == sender.node.rank:
                self.backups.heard(sender.node, message)
        elif isinstance(message, Locate):
            located = self.backups.locate(message, self.cluster, self._expected_nodes, now_s)
            if located is not None:
                self._effects.append(Send((peer,), located))
        elif isinstance(message, Validate):
            self._validations.asked(peer, message, now_s)
        elif isinstance(message, Operate):
            why = "the job is ending" if self._stop is not None or self.over else ""
            self._reform(self._operating.asked(peer, message, why, now_s), now_s)
        elif isinstance(message, Sealed):
            if sender.launcher is not None:
                wish = self._operating.sealed(sender.launcher, message.incarnation, message.step, now_s)
                self._reform(wish, now_s)
        elif isinstance(message, Join):
            self._join(peer, sender, message, now_s)
        elif isinstance(message, Failed):
            self._failed(sender, message, now_s)
        elif isinstance(message, Halted):
            if sender.launcher is not None:
                told = (message.incarnation, message.free_port, now_s, message.suspended, message.unfit)
                self._reform(self.reforming.halted(sender.launcher, *told), now_s)
        elif isinstance(message, Kept):
            if sender.launcher is not None:
                self._kept(sender.launcher, message, now_s)
        elif isinstance(message, Recovered):
            self._recovered(message.recovery, now_s)
        elif isinstance(message, Ended):
            self._ended(sender, message, now_s)
        elif isinstance(message, Bye):
            self._bye(sender, message, now_s)
        return self._taken()

    def tick(self, now_s: float) -> list[Effect]:
        """Time passes; call it about ten times a second."""
        if self._ticked_s is not None and now_s - self._ticked_s > _STALL_S:
            self._quiet_until_s = now_s + self.settings.silent_s
        self._ticked_s = now_s
        self._answer_joins(self.rendezvous.tick(now_s))
        self._watch_nodes(now_s)
        self._reform(self.reforming.tick(now_s), now_s)
        self._reform(self._operating.tick(self._peers.keys(), now_s), now_s)
        self._tick_councils(now_s)
        self._watch_waiting(now_s)
        for question in self._questions.due(now_s):
            self._decide(question, now_s)
        for case in self._cases():
            case.tick(now_s)
        self._tick_remedy(now_s)
        self._validations.tick(self._peers.keys(), now_s)
        self._tick_backups(now_s)
        self._sweep()
        if self._over_s is not None and now_s - self._over_s >= self.settings.grace_s and not self._exited:
            self._end(now_s)
            code = self._stop.exit_code if self._stop else 0
            self._effects.append(Exit(code, self._stop.reason if self._stop else "all launchers have ended"))
            self._exited = True
        return self._taken()

    def end(self, now_s: float) -> list[Effect]:
        """The job is over (or we are told to go with it): decide what waits, close what is open."""
        self._end(now_s)
        return self._taken()

    def _end(self, now_s: float) -> None:
        self._validations.end(now_s)
        for case in self._cases():
            case.end(now_s)
        self._slow, self._hang, self._crash = [], None, None

    @property
    def open_incidents(self) -> list[Incident]:
        """Incidents without an end."""
        found = [case.incident for case in self._cases() if case.incident is not None]
        return sorted(found, key=lambda incident: incident.number)

    @property
    def newest_number(self) -> int:
        """The highest incident number given out in this run."""
        return self._newest_number

    @property
    def over(self) -> bool:
        """All launchers have ended."""
        return self._over_s is not None

    def state(self, now_s: float) -> JobState:
        """Where the job stands. Looks at every rank until all train."""
        dying = self._crash.incarnation if self._crash is not None else -1
        code = None
        if self._stop is not None or self.over:
            code = 0 if self._stop is None or self._stop.by_operator else self._stop.exit_code
        return self.states.look(self.cluster, self.rendezvous, self.reforming, dying, code, now_s)

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

    def ask_probes(self, pairs: Sequence[tuple[str, str]], now_s: float) -> int | None:
        return self._questions.ask_probes(pairs, now_s)

    def validate(self, case: SlowCase, groups: Sequence[Sequence[int]], now_s: float) -> bool:
        return self.settings.validate and self._validations.begin(case, groups, now_s)

    def order(self, message: Message, node: int | None = None) -> None:
        agents = self.cluster.agents()
        peers = tuple(peer for rank, peer in agents.items() if node is None or rank == node)
        if peers:
            self._effects.append(Send(peers, message))

    def hold_number(self, now_s: float) -> int:
        self._hold_number = max(self._hold_number + 1, int(self._unix_s(now_s) * 1000))
        return self._hold_number

    def next_number(self) -> int:
        self._newest_number += 1
        return self._newest_number

    def publish(self, incident: Incident, say: Literal["verdict", "sharper", "closes", ""]) -> None:
        self._effects.append(WriteIncident(incident))
        if say:
            self._effects.append(Say(incident, say))
        if say == "verdict":
            self._save_rings(incident)
        if incident.onset_step is not None and incident.kind == "slow":
            self._changes.append(
                incident.onset_step if incident.relief_step is None else incident.relief_step
            )

    def unix_s(self, now_s: float) -> float:
        return self._unix_s(now_s)

    def clocks(self) -> Any:
        try:
            return self.locators.offsets(self.cluster.clock_samples())
        except Exception:  # without clocks the locators still have durations
            return None

    def previous_change(self, step: int) -> int:
        return max((change for change in self._changes if change < step), default=-1)

    def next_change(self, step: int) -> int:
        return min((change for change in self._changes if change > step), default=_NO_STEP)

    # --- peers ----------------------------------------------------------------------------------------------------

    def _hello(self, peer: int, sender: _Peer, hello: Hello, now_s: float) -> None:
        if hello.protocol != PROTOCOL:
            self._refuse(
                peer, f"this controller speaks protocol {PROTOCOL}, {hello.node} speaks {hello.protocol}"
            )
            return
        if sender.role == "agent" and not self._is_ours(hello):
            self._refuse(peer, f"another launcher plays node {hello.node_rank} now")
            return
        if hello.role != sender.role or hello.node_rank >= MOST_NODES:
            self._refuse(peer, f"{hello.node} said role {hello.role!r} and node rank {hello.node_rank}")
            return
        sender.hello = hello
        if sender.role == "launcher":
            sender.launcher = Launcher(hello.node, hello.pid)
            self._launchers.setdefault(sender.launcher, None)
        self._effects.append(
            Send((peer,), Welcome(self._pid, self.settings.heartbeat_s, term=self.settings.term))
        )
        if hello.node_rank < 0 or sender.role == "client":
            return
        node = sender.node = self.cluster.node(hello.node_rank, hello.node)
        node.lost_s = None
        if sender.role == "launcher":
            node.launcher = max(peer, node.launcher or 0)
            return
        self.backups.forget(node.rank)
        if node.agent_pid != hello.pid:
            node.agent_pid, node.agent_starts = hello.pid, node.agent_starts + 1
        node.agent, node.left, node.failure_domain = peer, False, hello.failure_domain
        node.heard_s, node.mute, node.silent = now_s, False, False

    def _is_ours(self, hello: Hello) -> bool:
        """Whether this agent's launcher plays its node: one that was cut off may have been replaced."""
        placement = self.rendezvous.placements.get(Launcher(hello.node, hello.launcher))
        strange = placement is None or placement.node_rank != hello.node_rank
        return not (hello.launcher and self.rendezvous.placements and strange)

    def _heartbeat(self, peer: int, sender: _Peer, beat: Heartbeat, now_s: float) -> None:
        node = sender.node
        if node is None:
            self._refuse(peer, "say Hello first")
        elif node.agent == peer and (not beat.ranks or 0 <= beat.ranks[0].rank < MOST_RANKS):
            self.cluster.heard(node, beat, now_s)
            if node.overdue:
                self._watch_waiting(now_s)
        else:
            self.ignored += 1

    def _join(self, peer: int, sender: _Peer, join: Join, now_s: float) -> None:
        if sender.launcher is None:
            self._refuse(peer, "only launchers join")
            return
        if reason := self.admission.objection(join, now_s):
            self._refuse(peer, reason)
            return
        if not join.max_restarts and join.incarnation > self.reforming.incarnation:
            self.cluster.begin_again({})  # by itself, as the launcher of one node does
        placed = self.rendezvous.join(sender.launcher, join, peer, now_s)
        if not placed.refusals:
            self.councils.here(sender.launcher, join.seat)
        self._answer_joins(placed)
        if not placed.refusals and (council := self.councils.told(sender.launcher)) is not None:
            self._effects.append(Send((peer,), council))
        if placed.is_new:
            self._tick_councils(now_s)
        if self._stop is not None or self.over:
            self._effects.append(Send((peer,), self._stop or _FINISHED))
        elif self.rendezvous.placements and not placed.refusals:
            self._reform(self.reforming.here(sender.launcher, join.incarnation, now_s), now_s)

    def _answer_joins(self, placed: Placed) -> None:
        if placed.is_new:
            table = self.rendezvous.placements
            self._placed(table)
            self._effects.append(
                StorePlacement(tuple((one.node, one.pid, placement) for one, placement in table.items()))
            )
        for peer, placement in placed.answers:
            sender = self._peers.get(peer)
            if sender is not None and sender.launcher is not None:
                node = sender.node = self.cluster.node(placement.node_rank, sender.launcher.node)
                node.launcher, node.lost_s = peer, None
            if self.councils.allows(placement.incarnation):
                self._effects.append(Send((peer,), placement))
        if placed.spares:
            self._effects.append(Send(placed.spares, Spare(len(self.rendezvous.placements))))
        for peer, reason in placed.refusals:
            self._refuse(peer, reason)

    def _reform(self, orders: Sequence[Order], now_s: float) -> None:
        for order in orders:
            if isinstance(order, HaltThese):
                if self._hang is not None:
                    self._hang.end(now_s)
                    self._sweep()
                found = (self.rendezvous.peer(launcher) for launcher in order.launchers)
                halt = Halt(order.incarnation, order.suspend)
                self._effects.append(Send(tuple(p for p in found if p is not None), halt))
            elif isinstance(order, Lost):
                for launcher in order.launchers:
                    node = self.cluster.nodes[self.rendezvous.placements[launcher].node_rank]
                    node.lost_s = None
                    incarnation = self.rendezvous.incarnation
                    self._death_in(incarnation, now_s).lost(node.name, node.ranks, now_s, incarnation)
            elif isinstance(order, Exclude):
                self._exclude(order, now_s)
            elif isinstance(order, Renew):
                table = self.rendezvous.placements
                self.cluster.begin_again({one.node_rank: launcher.node for launcher, one in table.items()})
                self._launchers.update(dict.fromkeys(table))
                if self._crash is not None:
                    self._crash.decide(now_s)
                    detail = f"restart {self.reforming.restarts} of {self.rendezvous.max_restarts}"
                    self._crash.acted(Action("all nodes begin again", None, detail))
                self._answer_joins(order.placed)
            elif isinstance(order, Tell):
                self._effects.append(order)
            else:
                self._end_job(order, now_s)

    def _exclude(self, order: Exclude, now_s: float) -> None:
        if not self.councils.allows(self.rendezvous.incarnation):
            self._excluded.append(order)
            return
        self._effects.append(Tell(order.reason))
        peer = self.rendezvous.peer(order.launcher)
        if peer is not None:
            self.rendezvous.leave(order.launcher, peer)
            self.councils.gone(order.launcher, now_s)
            self._effects.append(Send((peer,), Stop(_EXCLUDED, order.reason[:_MOST_TEXT])))

    def _failed(self, sender: _Peer, failed: Failed, now_s: float) -> None:
        if sender.launcher is not None:
            self.spending.failed(sender.launcher.node, failed, now_s)
            code, text = failed.exit_code, failed.message[:_MOST_TEXT]
            self._reform(self.reforming.failed(sender.launcher, failed.incarnation, code, text, now_s), now_s)

    def _is_heard(self, node_rank: int, now_s: float) -> bool:
        node = self.cluster.nodes.get(node_rank)
        if node is None or node.agent is None or node.heard_s is None:
            return False
        return now_s - node.heard_s <= self.settings.silent_s

    def _placed(self, table: dict[Launcher, Placement]) -> None:
        ordered = sorted(table.items(), key=lambda item: item[1].first_rank)
        ends = [placement.first_rank for _, placement in ordered[1:]] + [ordered[0][1].world_size]
        self.cluster.world_size = ordered[0][1].world_size
        for (launcher, placement), end in zip(ordered, ends, strict=True):
            self._launchers.setdefault(launcher, None)
            node = self.cluster.node(placement.node_rank, launcher.node)
            self.cluster.plays(node, range(placement.first_rank, end))

    def _tick_councils(self, now_s: float) -> None:
        table = self.rendezvous.placements if self.rendezvous.max_restarts and not self.over else {}
        council = self.councils.tick(table, now_s)
        if not table or (self.councils.is_settled and self.councils.allows(self.rendezvous.incarnation)):
            self._withheld_since_s = None
        elif self._withheld_since_s is None:
            self._withheld_since_s = now_s
        elif now_s - self._withheld_since_s >= self.settings.join_s and self._stop is None:
            reason = (
                "most of the nodes that have to agree on who plays which rank are lost, or cut off from here"
            )
            self._end_job(End(1, reason), now_s)
        if council is None:
            return
        self._effects.append(StoreCouncil(council))
        for peer, sender in self._peers.items():
            if sender.launcher is not None and self.rendezvous.peer(sender.launcher) == peer:
                told = self.councils.told(sender.launcher)
                if told is not None:
                    self._effects.append(Send((peer,), told))

    def _kept(self, launcher: Launcher, kept: Kept, now_s: float) -> None:
        incarnation = self.rendezvous.incarnation
        waited = not self.councils.allows(incarnation)
        if not self.councils.kept(launcher, kept):
            return
        if waited and self.councils.allows(incarnation):
            for one, placement in self.rendezvous.placements.items():
                if (peer := self.rendezvous.peer(one)) is not None:
                    self._effects.append(Send((peer,), placement))
            excluded, self._excluded = self._excluded, []
            for order in excluded:
                if order.launcher not in self.rendezvous.placements:
                    self._exclude(order, now_s)
        self._tick_councils(now_s)

    def _refuse(self, peer: int, reason: str) -> None:
        self.ignored += 1
        self._effects += [Send((peer,), Refused(reason)), Disconnect(peer, reason)]

    def _watch_nodes(self, now_s: float) -> None:
        if now_s < self._quiet_until_s:
            return
        for node in self.cluster.nodes.values():
            if node.left:
                continue
            if node.heard_s is not None:
                node.mute = now_s - node.heard_s > self.settings.mute_s
                node.silent = node.silent or now_s - node.heard_s > self.settings.silent_s
            if node.lost_s is None or now_s - node.lost_s <= self.settings.lost_s or self.over:
                continue
            if self._hang is None or not self._hang.is_reached(node.name):
                node.lost_s = None
                self._crash_case().lost(node.name, node.ranks, now_s)

    def _tick_backups(self, now_s: float) -> None:
        if self.settings.backups and not self.over:
            for peer, order in self.backups.tick(self.cluster, self._expected_nodes, now_s):
                self._effects.append(Send((peer,), order))

    @property
    def _expected_nodes(self) -> int:
        return len(self.rendezvous.placements) or self.settings.nodes

    # --- the end of the job ---------------------------------------------------------------------------------------

    def _ended(self, sender: _Peer, ended: Ended, now_s: float) -> None:
        if sender.launcher is None:
            return
        if self.rendezvous.placements and sender.launcher not in self.rendezvous.placements:
            return  # a spare that goes is no loss
        if ended.exit_code == 0 and ended.incarnation < self.reforming.incarnation:
            return  # it has begun again since
        self._launchers[sender.launcher] = ended
        if sender.node is not None:
            sender.node.left = True
        if ended.exit_code == 0:
            self.reforming.ended(sender.launcher)
        elif self._stop is None:
            self._end_job(End(ended.exit_code, f"node {sender.launcher.node} failed: {ended.message}"), now_s)
        self._consider_over(now_s)

    def _bye(self, sender: _Peer, bye: Bye, now_s: float) -> None:
        node = sender.node
        if node is not None and bye.orphaned:
            # It does not leave: it is lost, and nothing more will be heard of it.
            plays = self.rendezvous.placements.items()
            for launcher in [one for one, placement in plays if placement.node_rank == node.rank]:
                self.reforming.orphaned(launcher)
            return
        launcher = sender.launcher
        if launcher is not None and launcher in self.rendezvous.placements and self.rendezvous.max_restarts:
            self.reforming.orphaned(launcher)  # a spare that went in the moment in which it got a place
            return
        if node is not None and (sender.role == "launcher" or node.launcher is None):
            node.left = True
        if launcher is None:
            return
        if self._launchers.get(launcher) is None:
            self._launchers[launcher] = bye
        peer = self.rendezvous.peer(launcher)
        if peer is not None and launcher not in self.rendezvous.placements:
            self.rendezvous.leave(launcher, peer)  # a spare that goes gets no place any more
            self.reforming.gone(launcher, now_s)

    def _end_job(self, end: End, now_s: float) -> None:
        """All nodes end with the exit code of who failed first."""
        code = end.exit_code
        if self._crash is not None and not end.by_operator:
            self._crash.decide(now_s)
            code = self._crash.exit_code or code
        self._stop = Stop(code, end.reason[:_MOST_TEXT], end.by_operator)
        self._effects.append(StoreStop(self._stop))
        self.reforming.over()
        self._operating.end()
        if self._crash is not None:
            self._crash.acted(Action("stop the job", None, f"exit code {code}"))
        self._tell_launchers(self._stop)

    def _consider_over(self, now_s: float) -> None:
        expected = self.rendezvous.placements or self._launchers
        if self._over_s is not None or any(self._launchers.get(one) is None for one in expected):
            return
        self._over_s = now_s
        self.reforming.over()
        if self._stop is None:
            self._tell_launchers(_FINISHED)

    def _tell_launchers(self, stop: Stop) -> None:
        peers = tuple(number for number, peer in self._peers.items() if peer.launcher is not None)
        self._effects.append(Send(peers, stop))

    # --- findings -------------------------------------------------------------------------------------------------

    def _found(self, finding: Finding, sender: _Peer, now_s: float) -> None:
        if not 0 <= finding.rank < MOST_RANKS or not _is_finite(finding):
            self.ignored += 1
            return
        kind = finding.kind
        if kind == "crash":
            self._crash_found(finding, now_s)
        elif self._crash is not None or self._stop is not None or self.over:
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

    def _watch_waiting(self, now_s: float) -> None:
        """When all ranks wait for others, and longer than usual, none of them is in a pause: they have locked up.

        Of a few nodes that are not heard any more that cannot be known; they may be what the others wait for.
        """
        cluster = self.cluster
        if not cluster.overdue_nodes or self._validations.under_way or self._standstill():
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
            self._waiting_again_s = now_s + 2 * self.settings.heartbeat_s
            self._hang = HangCase(self)
            self._hang.all_wait(now_s)

    def _crash_found(self, finding: Finding, now_s: float) -> None:
        if self.over:
            return
        if self._crash is not None and finding.incarnation < self._crash.incarnation:
            return  # said again to a controller that began anew
        self._death_in(finding.incarnation, now_s).found(finding, now_s)
        for case in [*self._slow, *([self._hang] if self._hang else [])]:
            case.end(now_s)
        self._sweep()

    def _recovered(self, recovery: Recovery, now_s: float) -> None:
        self.recovery = recovery
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
        if case is None or case.closed or self._crash is not None or self._stop is not None or self.over:
            self._remedy = None
        elif self.settings.restart_hangs and not self.reforming.under_way and not self._validations.under_way:
            if self._remedy is None or self._remedy.case is not case:
                self._remedy = HangRemedy(self, case, self._end_hung)
            self._remedy.tick(now_s)

    def _end_hung(self, kill: Kill) -> bool:
        node = self.cluster.home(kill.rank)
        if node is None or node.launcher is None:
            return False
        self._effects.append(Send((node.launcher,), kill))
        return True

    def _standstill(self) -> str:
        """Why nobody can be held: the job does not run."""
        if self._crash is not None or self._stop is not None or self.over:
            return "the job is ending"
        if self.reforming.under_way:
            return "its workers are being ended" if not self.reforming.suspended else "the job is suspended"
        return "the job hangs" if self._hang is not None else ""

    # --- answers --------------------------------------------------------------------------------------------------

    def _answered(self, sender: _Peer, answer: Profile | States | Probed, now_s: float) -> None:
        question = self._questions.answered(sender.node, answer, now_s) if sender.node is not None else None
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
            for case in self._slow:
                if case.question == question.number and not case.closed:
                    case.profiles(question.answers, self._names(question.unanswered), now_s)
        self._sweep()

    def _names(self, node_ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.cluster.nodes[rank].name for rank in node_ranks)

    def _cases(self) -> list[SlowCase | HangCase | CrashCase]:
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

    def _save_rings(self, incident: Incident) -> None:
        agents = self.cluster.agents()
        if self.cluster.known_ranks > _SAVE_ALL_RANKS:
            named = {culprit.node for culprit in incident.culprits}
            named |= {node for one in incident.culprits if one.link for node in one.link.nodes}
            agents = {rank: peer for rank, peer in agents.items() if self.cluster.nodes[rank].name in named}
        if agents:
            self._effects.append(Send(tuple(agents.values()), SaveRings(incident.number)))

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def _is_finite(finding: Finding) -> bool:
    values = (getattr(finding, field.name) for field in fields(finding))
    return all(math.isfinite(value) for value in values if isinstance(value, float))
