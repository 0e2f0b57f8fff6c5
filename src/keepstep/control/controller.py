"""The controller's core: a message, who sent it and the time in; what to send, write and print out. No I/O, no clock.

The rim calls ``connected``, ``message``, ``disconnected`` and, ten times a second, ``tick``; each returns effects to be
carried out in order. Everything here is soft: after a restart agents and launchers say again who they are, which
groups they know and what still holds; incident numbers and open incidents come from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from keepstep.control.backups import Backups
from keepstep.control.cases import Cases
from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import (
    Disconnect,
    Effect,
    Exit,
    Reach,
    Send,
    StoreCouncil,
    StorePlacement,
    StoreStop,
    Tell,
)
from keepstep.control.incidents.locators import LibraryLocators, Locators
from keepstep.control.membership.admission import Admission
from keepstep.control.membership.council import Councils
from keepstep.control.membership.growth import Growing
from keepstep.control.membership.job_state import JobState, JobStates
from keepstep.control.membership.operator_orders import Operating
from keepstep.control.membership.reforming import (
    End,
    Exclude,
    HaltThese,
    Lost,
    Order,
    Reforming,
    Renew,
    Waiting,
)
from keepstep.control.membership.rendezvous import MOST_NODES, MOST_RANKS, Launcher, Placed, Rendezvous
from keepstep.control.membership.restart_budget import Spending
from keepstep.control.settings import Settings
from keepstep.core.incident import Incident, Recovery
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
    Sealed,
    Spare,
    Splits,
    States,
    Stop,
    Validate,
    Welcome,
)

_EXCLUDED = 1  # exit code of a launcher that was excluded
_MOST_ENDPOINTS = 4
_MOST_TEXT = 500  # characters of what went wrong
_FINISHED = Stop(0, "all nodes have finished")
_STALL_S = 1.0  # a tick this late means that we slept, not the agents

_Handler: TypeAlias = Callable[[Any, "_Peer", Any, float], None]
_OrderHandler: TypeAlias = Callable[[Any, Any, float], None]


@dataclass(slots=True)
class _Peer:
    number: int
    role: str
    hello: Hello | None = None
    node: Node | None = None
    launcher: Launcher | None = None


class Controller:
    """One job's controller."""

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
        self.rendezvous = Rendezvous(settings.nodes, join_s=settings.join_s, last_call_s=settings.last_call_s)
        waiting = Waiting(
            *(settings.lost_s, settings.away_s, settings.halt_s, settings.join_s),
            shrink_s=settings.shrink_s,
            grows=settings.backups > 0,
        )
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
        self._operating = Operating(
            self.rendezvous,
            self.reforming,
            lambda peer, answer: self._effects.append(Send((peer,), answer)),
            lambda peers, message: self._effects.append(Send(peers, message)),
            lambda: self.backups.withheld(),
            lambda why, now_s: self.cases.mitigation.not_moved(why, now_s),
        )
        self.cases = Cases(
            *(settings, self.cluster, locators or LibraryLocators(), self.reforming, unix_s),
            is_ending=lambda: self._stop is not None or self.over,
            effect=lambda effect: self._effects.append(effect),
            operating=self._operating,
        )
        self._growing = Growing(self.rendezvous, self.reforming, self._operating)
        self._launchers: dict[Launcher, Ended | Bye | None] = {}
        self._stop: Stop | None = None
        self._stop_is_told = False
        self._over_s: float | None = None
        self._exited = False
        self._ticked_s: float | None = None
        self._quiet_until_s = 0.0
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
        self._stop, self._stop_is_told = stop, stop is not None
        self.cases.restore(incidents)
        former = None
        if council is not None:
            self.councils.restore(council)
            self._stop = self._stop or council.stop
            placements = [(row.node, row.pid, row.placement) for row in council.table]
            if council.leader.token != self.settings.seat:
                former = Launcher(council.leader.node, council.leader.pid)
        if placements:
            table = {Launcher(node, pid): placement for node, pid, placement in placements}
            self.rendezvous.restore(table)
            self.reforming.restored(former)
            self._placed(table)
        if self._stop is not None:
            self.councils.end(self._stop)
            self.reforming.over()

    def connected(self, peer: int, role: str) -> None:
        """A peer has proved that it is of ours, in this role."""
        self._peers[peer] = _Peer(peer, role)

    def disconnected(self, peer: int, now_s: float, *, unanswered: bool = False) -> list[Effect]:
        """A connection has gone. ``unanswered``: nothing came from its host any more, no last packet either."""
        gone = self._peers.pop(peer, None)
        if gone is None:
            return []
        node = gone.node
        since_s = now_s + self.settings.link_s if unanswered else now_s  # a link may be back in a moment
        if gone.launcher is not None and self.rendezvous.leave(gone.launcher, peer):
            self.reforming.gone(gone.launcher, since_s)
        if gone.launcher is not None and self.rendezvous.peer(gone.launcher) is None:
            self.councils.gone(gone.launcher, now_s)
        if node is not None:
            if node.agent == peer:
                node.agent = None
            if node.launcher == peer:
                node.launcher = None
            if node.agent is None and node.launcher is None:
                node.lost_s = since_s
        return self._taken()

    def reached(self, peer: int) -> list[Effect]:
        """The election port of a launcher's `Reach` answers."""
        sender = self._peers.get(peer)
        if (
            sender is not None
            and sender.launcher is not None
            and self.rendezvous.peer(sender.launcher) == peer
        ):
            self.councils.reached(sender.launcher)
        return self._taken()

    def message(self, peer: int, message: Message, now_s: float) -> list[Effect]:
        """One message from a connected peer."""
        sender = self._peers.get(peer)
        if sender is None:
            return []
        if type(message) is Heartbeat:
            self._heartbeat(sender, message, now_s)
            return self._taken() if self._effects else []
        if type(message) is Hello:
            self._hello(sender, message, now_s)
        elif sender.hello is None:
            self._refuse(peer, "say Hello first")
        elif handler := self._HANDLERS.get(type(message)):
            handler(self, sender, message, now_s)
        return self._taken()

    def tick(self, now_s: float) -> list[Effect]:
        """Time passes; call it about ten times a second."""
        if self._ticked_s is not None and now_s - self._ticked_s > _STALL_S:
            self._quiet_until_s = now_s + self.settings.silent_s
            if self._withheld_since_s is not None:
                self._withheld_since_s += now_s - self._ticked_s
        self._ticked_s = now_s
        self._answer_joins(self.rendezvous.tick(now_s))
        self._watch_nodes(now_s)
        self._reform(self.reforming.tick(now_s), now_s)
        self._reform(self._operating.tick(self._peers.keys(), now_s), now_s)
        newcomers = self.settings.backups > 0 and bool(self._growing.newcomers)
        if (newcomers or self.reforming.is_untried) and self.state(now_s) is JobState.RUNNING:
            self.reforming.trains()
            self._growing.tick(now_s)
        self._tick_councils(now_s)
        self.cases.tick(self._peers.keys(), now_s)
        self._tick_backups(now_s)
        if self._over_s is not None and now_s - self._over_s >= self.settings.grace_s and not self._exited:
            self.cases.end(now_s)
            code = self._stop.exit_code if self._stop else 0
            self._effects.append(Exit(code, self._stop.reason if self._stop else "all launchers have ended"))
            self._exited = True
        return self._taken()

    def end(self, now_s: float) -> list[Effect]:
        """The job is over (or we are told to go with it): decide what waits, close what is open."""
        self.cases.end(now_s)
        return self._taken()

    @property
    def over(self) -> bool:
        """All launchers have ended."""
        return self._over_s is not None

    def state(self, now_s: float) -> JobState:
        """Where the job stands. Looks at every rank until all train."""
        code = None
        if self._stop is not None or self.over:
            code = 0 if self._stop is None or self._stop.by_operator else self._stop.exit_code
        return self.states.look(self.cluster, self.rendezvous, self.reforming, self.cases.dying, code, now_s)

    # --- what is wrong, and what is done about it ------------------------------------------------------------------

    def _found(self, sender: _Peer, message: Found, now_s: float) -> None:
        if not self.over:
            self.cases.found(message.finding, now_s)

    def _groups(self, sender: _Peer, message: Groups, now_s: float) -> None:
        self.cluster.learn_groups(message.groups)

    def _answered(self, sender: _Peer, message: Profile | States | Probed, now_s: float) -> None:
        if sender.node is not None:
            self.cases.answered(sender.node, message, now_s)

    def _reachable(self, sender: _Peer, message: Reachable, now_s: float) -> None:
        if sender.node is not None:
            sender.node.endpoints = message.endpoints[:_MOST_ENDPOINTS]

    def _tested(self, sender: _Peer, message: Held | Measured, now_s: float) -> None:
        if sender.node is not None:
            self.cases.validations.told(sender.node, message, now_s)

    def _validate(self, sender: _Peer, message: Validate, now_s: float) -> None:
        self.cases.validations.asked(sender.number, message, now_s)

    def _splits(self, sender: _Peer, message: Splits, now_s: float) -> None:
        if sender.node is not None:
            self.cases.mitigation.shares.told(sender.node, message)

    def _inventory(self, sender: _Peer, message: Inventory, now_s: float) -> None:
        if sender.node is not None and message.node_rank == sender.node.rank:
            self.backups.heard(sender.node, message)

    def _locate(self, sender: _Peer, message: Locate, now_s: float) -> None:
        located = self.backups.locate(message, self.cluster, self._expected_nodes, now_s)
        if located is not None:
            self._effects.append(Send((sender.number,), located))

    def _recovered(self, sender: _Peer, message: Recovered, now_s: float) -> None:
        self.recovery = message.recovery
        self.cases.recovered(message.recovery, now_s)

    # --- peers ----------------------------------------------------------------------------------------------------

    def _hello(self, sender: _Peer, hello: Hello, now_s: float) -> None:
        peer = sender.number
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
        if sender.launcher is not None and not self._plays(sender.launcher, hello.node_rank):
            return
        node = sender.node = self.cluster.node(hello.node_rank, hello.node)
        node.back()
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
        return not hello.launcher or self._plays(Launcher(hello.node, hello.launcher), hello.node_rank)

    def _plays(self, launcher: Launcher, node_rank: int) -> bool:
        placement = self.rendezvous.placements.get(launcher)
        return not self.rendezvous.placements or (placement is not None and placement.node_rank == node_rank)

    def _heartbeat(self, sender: _Peer, beat: Heartbeat, now_s: float) -> None:
        peer = sender.number
        node = sender.node
        if node is None:
            self._refuse(peer, "say Hello first")
        elif (
            node.agent == peer
            and self.cluster.nodes.get(node.rank) is node
            and (not beat.ranks or 0 <= beat.ranks[0].rank < MOST_RANKS)
        ):
            self.cluster.heard(node, beat, now_s)
            if node.overdue:
                self.cases.watch_waiting(now_s)
        else:
            self.ignored += 1

    def _join(self, sender: _Peer, join: Join, now_s: float) -> None:
        peer = sender.number
        if sender.launcher is None:
            self._refuse(peer, "only launchers join")
            return
        if reason := self.admission.objection(join, now_s):
            self._refuse(peer, reason)
            return
        if not join.max_restarts and join.incarnation > self.reforming.incarnation:
            self.cluster.begin_again({})  # by itself, as the launcher of one node does
            self.cases.mitigation.begin_again(now_s)
        placed = self.rendezvous.join(sender.launcher, join, peer, now_s)
        if not placed.refusals:
            self.councils.here(sender.launcher, join.seat)
        self._answer_joins(placed)
        if not placed.refusals and (council := self.councils.told(sender.launcher)) is not None:
            self._effects.append(Send((peer,), council))
        if placed.is_new:
            self._tick_councils(now_s)
        if self._stop is not None or self.over:
            if self._stop_is_told or self.over:
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
                node.launcher = peer
                node.back()
            if self.councils.allows(placement.incarnation):
                self._effects.append(Send((peer,), placement))
        if placed.spares:
            self._effects.append(Send(placed.spares, Spare(len(self.rendezvous.placements))))
        for peer, reason in placed.refusals:
            self._refuse(peer, reason)

    def _reform(self, orders: Sequence[Order], now_s: float) -> None:
        for order in orders:
            self._ORDERS[type(order)](self, order, now_s)

    def _halt(self, order: HaltThese, now_s: float) -> None:
        self.cases.halted(now_s)
        found = (self.rendezvous.peer(launcher) for launcher in order.launchers)
        halt = Halt(order.incarnation, order.suspend, order.fresh)
        self._effects.append(Send(tuple(p for p in found if p is not None), halt))

    def _lost(self, order: Lost, now_s: float) -> None:
        for launcher in order.launchers:
            node = self.cluster.nodes[self.rendezvous.placements[launcher].node_rank]
            node.lost_s = None
            self.cases.lost_in(self.rendezvous.incarnation, node, now_s)

    def _renew(self, order: Renew, now_s: float) -> None:
        table, before = self.rendezvous.placements, len(self.cluster.nodes)
        self.cluster.begin_again({one.node_rank: launcher.node for launcher, one in table.items()})
        self._launchers.update(dict.fromkeys(table))
        how = f"restart {self.reforming.restarts} of {self.rendezvous.max_restarts}"
        if len(table) != before:
            how += f", {len(table)} of {self.rendezvous.most} nodes"
        if len(table) != before or self.reforming.exchanged:  # nodes play other ranks
            self.backups = Backups(self.settings.backups, self.settings.lost_s)
        self.cases.mitigation.begin_again(now_s, exchanged=self.reforming.exchanged)
        self.cases.begin_again(how, now_s)
        self._answer_joins(order.placed)

    def _tell(self, order: Tell, now_s: float) -> None:
        self._effects.append(order)

    def _exclude(self, order: Exclude, now_s: float) -> None:
        if not self.councils.allows(self.rendezvous.incarnation):
            self._excluded.append(order)
            return
        self._effects.append(Tell(order.reason))
        peer = self.rendezvous.peer(order.launcher)
        if peer is not None:
            self.rendezvous.leave(order.launcher, peer)
            self.councils.leaves(order.launcher)
            self._effects.append(Send((peer,), Stop(_EXCLUDED, order.reason[:_MOST_TEXT])))

    def _operate(self, sender: _Peer, message: Operate, now_s: float) -> None:
        why = "the job is ending" if self._stop is not None or self.over else ""
        self._reform(self._operating.asked(sender.number, message, why, now_s), now_s)

    def _sealed(self, sender: _Peer, message: Sealed, now_s: float) -> None:
        if sender.launcher is not None:
            sealed = (message.incarnation, message.step, message.why[:_MOST_TEXT])
            self._reform(self._operating.sealed(sender.launcher, *sealed, now_s), now_s)

    def _halted(self, sender: _Peer, message: Halted, now_s: float) -> None:
        if sender.launcher is not None:
            told = (message.suspended, message.unfit, message.rigid)
            halted = (message.incarnation, message.free_port, now_s, *told)
            self._reform(self.reforming.halted(sender.launcher, *halted), now_s)

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
        self.cluster.resize(ordered[0][1].world_size)
        for (launcher, placement), end in zip(ordered, ends, strict=True):
            self._launchers.setdefault(launcher, None)
            node = self.cluster.node(placement.node_rank, launcher.node)
            self.cluster.plays(node, range(placement.first_rank, end))

    def _tick_councils(self, now_s: float) -> None:
        table = self.rendezvous.placements if self.rendezvous.max_restarts and not self.over else {}
        council = self.councils.tick(table, now_s)
        for launcher, seat in self.councils.to_reach(table):
            if (peer := self.rendezvous.peer(launcher)) is not None:
                self._effects.append(Reach(peer, seat))
        if not table or (self.councils.is_settled and self.councils.allows(self.rendezvous.incarnation)):
            self._withheld_since_s = None
        elif self._withheld_since_s is None:
            self._withheld_since_s = now_s
        elif now_s - self._withheld_since_s >= self.settings.join_s and self._stop is None:
            reason = (
                "most of the nodes that have to agree on who plays which rank are lost, or cut off from here"
            )
            self._end_job(End(1, reason), now_s)
        self._tell_stop(now_s)
        if council is None:
            return
        self._effects.append(StoreCouncil(council))
        for peer, sender in self._peers.items():
            if sender.launcher is not None and self.rendezvous.peer(sender.launcher) in (peer, None):
                told = self.councils.tells(sender.launcher)
                if told is not None:
                    self._effects.append(Send((peer,), told))

    def _kept(self, sender: _Peer, kept: Kept, now_s: float) -> None:
        launcher, incarnation = sender.launcher, self.rendezvous.incarnation
        if launcher is None:
            return
        waited = not self.councils.allows(incarnation)
        if not self.councils.kept(launcher, kept):
            return
        self._tell_stop(now_s)
        self._consider_over(now_s)
        if waited and self._stop is None and self.councils.allows(incarnation):
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
            if self.cases.lost(node, now_s):
                node.lost_s, node.lost = None, True
        lost, waited_s = self.cluster.wait_for_lost()
        begins_again = self.rendezvous.max_restarts > 0
        if lost and waited_s > self.settings.gone_s and not (begins_again or self.over or self._stop):
            reason = f"{lost} lost without a last packet; all other ranks have waited for {waited_s:.0f} s"
            self._end_job(End(1, reason), now_s)

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
            who = "" if ended.by_operator else f"node {sender.launcher.node} failed: "
            self._end_job(End(ended.exit_code, who + ended.message, ended.by_operator), now_s)
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
            self.councils.leaves(launcher)
            self._tick_councils(now_s)

    def _end_job(self, end: End, now_s: float) -> None:
        """All nodes end with the exit code of who failed first."""
        code = end.exit_code if end.by_operator else self.cases.exit_code(now_s) or end.exit_code
        self._stop = Stop(code, end.reason[:_MOST_TEXT], end.by_operator)
        self.reforming.over()
        self._operating.end()
        self.councils.end(self._stop)
        self._tell_stop(now_s)

    def _tell_stop(self, now_s: float) -> None:
        """That the job ends, once that holds under any leader, or there can be none."""
        if self._stop is None or self._stop_is_told:
            return
        since_s = self._withheld_since_s
        if self.councils.stop is None and (since_s is None or now_s - since_s < self.settings.join_s):
            return
        self._stop_is_told = True
        self._stop = self.councils.stop or self._stop
        self._effects.append(StoreStop(self._stop))
        self.cases.stopped(self._stop.exit_code)
        self._tell_launchers(self._stop)
        self._consider_over(now_s)

    def _consider_over(self, now_s: float) -> None:
        expected = self.rendezvous.placements or self._launchers
        if self._over_s is not None or any(self._launchers.get(one) is None for one in expected):
            return
        if not self._stop_is_told and (self._stop is not None or not self.councils.is_settled):
            return  # another leader may know of a later incarnation, or end it otherwise
        self._over_s = now_s
        self.reforming.over()
        if self._stop is None:
            self._effects.append(StoreStop(_FINISHED))  # some may not have read it when we are started anew
            self._tell_launchers(_FINISHED)

    def _tell_launchers(self, stop: Stop) -> None:
        peers = tuple(number for number, peer in self._peers.items() if peer.launcher is not None)
        self._effects.append(Send(peers, stop))

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    # --- who handles what -----------------------------------------------------------------------------------------

    _HANDLERS: ClassVar[Mapping[type, _Handler]] = {
        Found: _found,
        Groups: _groups,
        Profile: _answered,
        States: _answered,
        Probed: _answered,
        Reachable: _reachable,
        Held: _tested,
        Measured: _tested,
        Validate: _validate,
        Splits: _splits,
        Inventory: _inventory,
        Locate: _locate,
        Recovered: _recovered,
        Operate: _operate,
        Join: _join,
        Sealed: _sealed,
        Failed: _failed,
        Halted: _halted,
        Kept: _kept,
        Ended: _ended,
        Bye: _bye,
    }
    _ORDERS: ClassVar[Mapping[type, _OrderHandler]] = {
        HaltThese: _halt,
        Lost: _lost,
        Exclude: _exclude,
        Renew: _renew,
        Tell: _tell,
        End: _end_job,
    }
